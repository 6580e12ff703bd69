"""`hydra/sweeper=optuna5`: looks for the best values with a current Optuna (`pip install 'scaleflow[optuna]'`).

The study is in Optuna's own storage, a file in the sweep's folder unless told otherwise, so that a search that was
interrupted goes on. A job that does worse than others did at its step is stopped, if a pruner is named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    import optuna

NODE = {
    "_target_": "hydra_plugins.scaleflow.optuna5.OptunaSweeper",
    "n_trials": 20,
    "direction": "minimize",
    "sampler": "tpe",
    "pruner": None,
    "seed": 0,
    "storage": None,
    "study_name": "sweep",
    "params": {},
}

ConfigStore.instance().store(group="hydra/sweeper", name="optuna5", node=NODE, provider="scaleflow")

SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "gp": "GPSampler", "cmaes": "CmaEsSampler"}
PRUNERS = {"median": "MedianPruner", "hyperband": "HyperbandPruner", "successive_halving": "SuccessiveHalvingPruner"}
DIRECTIONS = ("minimize", "maximize")

RESULTS = "optimization_results.yaml"


class OptunaSweeper(Sweeper):
    """Asks Optuna for values, and tells it what came of them.

    Args:
        n_trials: how many jobs have an end at last, whichever.
        direction: minimize or maximize what a job returns (of ours: the last value of `sweep.metric`).
        sampler: tpe, random, gp, cmaes.
        pruner: null, median, hyperband, successive_halving; for jobs of our own command.
        seed: the sampler's.
        storage: Optuna's, as a URL; null: a file in the sweep's folder.
        study_name: in that storage.
        params: key -> what is looked for, as it would be typed.
    """

    def __init__(
        self,
        n_trials: int,
        direction: str,
        sampler: str,
        pruner: str | None,
        seed: int | None,
        storage: str | None,
        study_name: str,
        params: Mapping[str, str] | None,
    ) -> None:
        self._count = n_trials
        self._direction, self._sampler, self._pruner, self._seed = direction, sampler, pruner, seed
        self._storage, self._name, self._params = storage, study_name, dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra once for each sweep."""
        one_of("direction", self._direction, DIRECTIONS)
        one_of("sampler", self._sampler, SAMPLERS)
        if self._pruner is not None:
            one_of("pruner", self._pruner, PRUNERS)
        if self._count < 1:
            raise HydraException(f"hydra.sweeper.n_trials={self._count}: expected at least 1")
        self._context, self._task, self._config = hydra_context, task_function, config
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Runs jobs until there were enough; gives the best values, and what they came to.

        Args:
            arguments: the overrides that were typed.
        """
        parser = OverridesParser.create(config_loader=self._context.config_loader)
        overrides = parser.parse_overrides([*(f"{k}={v}" for k, v in self._params.items()), *arguments])
        latest = {override.get_key_element(): override for override in overrides}
        space = {key: distribution(o) for key, o in latest.items() if o.is_sweep_override()}
        fixed = [f"{k}={o.get_value_element_as_str()}" for k, o in latest.items() if not o.is_sweep_override()]
        if not space:
            raise HydraException("hydra/sweeper=optuna5: nothing to look for; write KEY=interval(LOW,HIGH) or KEY=A,B")
        folder = Path(str(self._config.hydra.sweep.dir))
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self._config, folder / "multirun.yaml")
        study = self._study(folder)
        self._search(study, space, fixed)
        return self._best(study, folder)

    def _study(self, folder: Path) -> optuna.Study:
        optuna = imported()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        is_seeded = self._sampler != "cmaes" or self._seed is not None
        sampler = getattr(optuna.samplers, SAMPLERS[self._sampler])(**({"seed": self._seed} if is_seeded else {}))
        pruner = (
            optuna.pruners.NopPruner() if self._pruner is None else getattr(optuna.pruners, PRUNERS[self._pruner])()
        )
        return optuna.create_study(
            study_name=self._name,
            storage=self._storage or f"sqlite:///{(folder / 'optuna.db').absolute()}",
            sampler=sampler,
            pruner=pruner,
            direction=self._direction,
            load_if_exists=True,
        )

    def _search(self, study: optuna.Study, space: dict[str, Any], fixed: Sequence[str]) -> None:
        """Batches of as many trials as the launcher runs at a time; first those that an earlier command left."""
        optuna = imported()
        ended = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED, optuna.trial.TrialState.FAIL)
        left = study.get_trials(states=[optuna.trial.TrialState.RUNNING])
        trials = [optuna.trial.Trial(study, trial._trial_id) for trial in left]
        at_once = max(1, int(self._config.hydra.launcher.get("n_jobs", 1)))
        number = 0
        while (missing := self._count - len(study.get_trials(states=ended))) > 0:
            batch, trials = trials[:at_once], trials[at_once:]
            while len(batch) < min(at_once, missing):
                batch.append(study.ask(space))
            overrides = [[*fixed, *(f"{key}={shown(v)}" for key, v in trial.params.items())] for trial in batch]
            pruned = self._watch(batch)
            for trial, returned in zip(batch, self._launcher.launch(overrides, number), strict=True):
                value = as_number(returned.return_value)
                if trial.number in pruned:
                    study.tell(trial.number, state=optuna.trial.TrialState.PRUNED)
                elif value is None:
                    study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
                else:
                    study.tell(trial.number, value)
            number += len(batch)

    def _watch(self, trials: Sequence[optuna.Trial]) -> set[int]:
        """Has our own jobs report their metric as they go; gives the numbers of the trials that are stopped for it."""
        pruned: set[int] = set()
        if self._pruner is None:
            return pruned
        if not hasattr(self._task, "sweep"):
            raise HydraException(
                f"hydra.sweeper.pruner={self._pruner}: only jobs of scaleflow's own command tell how they go; use null"
            )
        metric = OmegaConf.select(self._config, "sweep.metric") or "val/loss"

        def watch(indices: Sequence[int], event: Mapping[str, Any]) -> bool:
            value = event["values"].get(metric) if event["event"] == "metrics" else None
            if value is None or not math.isfinite(value):
                return False
            watched = [trials[index] for index in indices]  # several where a value was proposed twice
            for trial in watched:
                trial.report(value, event["step"])
            if any(trial.should_prune() for trial in watched):
                pruned.update(trial.number for trial in watched)
            return any(trial.number in pruned for trial in watched)

        self._task.sweep(self._context, self._config).watch = watch
        return pruned

    def _best(self, study: optuna.Study, folder: Path) -> dict[str, Any]:
        """Leaves the best values in the sweep's folder, and says them."""
        optuna = imported()
        if not study.get_trials(states=[optuna.trial.TrialState.COMPLETE]):
            return {}
        best = {"name": "optuna", "best_params": dict(study.best_params), "best_value": study.best_value}
        OmegaConf.save(OmegaConf.create(best), folder / RESULTS)
        words = " ".join(f"{key}={shown(value)}" for key, value in study.best_params.items())
        print(f"best of {len(study.trials)}: {study.best_value:.6g} with {words}", flush=True)
        return best


def distribution(override: Override) -> Any:
    """What Optuna draws a key's values from."""
    optuna = imported()
    sweep = override.value()
    if isinstance(sweep, ChoiceSweep):
        return optuna.distributions.CategoricalDistribution([plain(value) for value in sweep.list])
    if isinstance(sweep, RangeSweep):
        low, stop, step = sweep.start or 0, sweep.stop or 0, sweep.step
        high = low + (math.ceil((stop - low) / step) - 1) * step  # `stop` itself is not in it
        of_ints = isinstance(low, int) and isinstance(step, int)
        kind = optuna.distributions.IntDistribution if of_ints else optuna.distributions.FloatDistribution
        return kind(low, high, step=step)
    if isinstance(sweep, IntervalSweep):
        of_ints = all(type(end) is int for end in (sweep.start, sweep.end))  # whatever Hydra's annotations say of them
        kind = optuna.distributions.IntDistribution if of_ints else optuna.distributions.FloatDistribution
        return kind(sweep.start, sweep.end, log="log" in sweep.tags)
    raise HydraException(f"{override.input_line}: optuna5 takes values, choice(...), range(...), interval(...)")


def plain(value: Any) -> Any:
    """A value as Optuna's storage takes it: text, a number, a truth value or null."""
    from hydra.core.override_parser.types import QuotedString

    if isinstance(value, QuotedString):
        return value.text
    return (
        value
        if isinstance(value, str | int | float | bool) or value is None
        else Override._get_value_element_as_str(value)
    )


def shown(value: Any) -> str:
    """A value as it is typed in an override."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def as_number(value: Any) -> float | None:
    """What a job returned, if that says how good it is."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def one_of(key: str, value: str, known: Sequence[str] | Mapping[str, str]) -> None:
    names = list(known)
    if value not in names:
        raise HydraException(f"hydra.sweeper.{key}={value}: expected one of {', '.join(names)}")


def imported() -> Any:
    """Optuna, which takes seconds to import.

    Raises:
        HydraException: if it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise HydraException(
            "hydra/sweeper=optuna5: optuna is not installed; pip install 'scaleflow[optuna]'"
        ) from error
    return optuna
