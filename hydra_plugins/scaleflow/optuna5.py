"""The Hydra sweeper `hydra/sweeper=optuna5`: searches for the best values with Optuna (`scaleflow[optuna]`).

The study is stored in an Optuna storage, by default a file in the sweep's folder. So the same command continues an
interrupted search. A pruner stops jobs that are worse than others at the same step.
"""

from __future__ import annotations

import csv
import json
import math
import platform
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, QuotedString, RangeSweep, Transformer
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from scaleflow.compat.optuna import continue_trial
from scaleflow.config.compose import mask_sweep_config
from scaleflow.config.parse import flatten_config, format_value, is_under
from scaleflow.config.words import write_value
from scaleflow.errors import NothingCanRun, read_reason
from scaleflow.interfaces.events import Event, MetricsLogged
from scaleflow.interfaces.formatting import format_number, join_first
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.command_exit import write_error

if TYPE_CHECKING:
    import optuna

    from scaleflow.sweep.composer import JobRequest

NODE = {
    "_target_": "hydra_plugins.scaleflow.optuna5.OptunaSweeper",
    "n_trials": 20,
    "direction": None,
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
TRIALS = "trials.csv"

#: A search ends after this number of rejected trials if no trial has run.
MAX_REFUSED = 5

#: Prefix of a storage that is an Optuna journal file. Several machines can share it on a network file system.
JOURNAL = "journal:"

#: Attribute of a study that identifies its search.
SEARCH = "scaleflow.search"

#: Values of `sweep.on_change` that allow a search to continue with a changed config.
CONTINUING = ("new", "rerun", "keep")

#: Attributes of a trial: the ID of the sweep folder that runs it, and the folder's machine and path.
OWNER = "scaleflow.owner"
SWEEP = "scaleflow.sweep"


class OptunaSweeper(Sweeper):
    """Runs jobs with values that Optuna proposes, and reports their results to Optuna.

    Args:
        n_trials: the search ends when the study has this number of trials, at least 1. Complete, pruned, failed and
            running trials count, including trials of other commands.
        direction: `minimize` or `maximize` the result of a job. scaleflow's jobs return the last `sweep.metric`. None:
            the better direction of `sweep.metric`; in other apps `minimize`.
        sampler: `tpe`, `random`, `gp` or `cmaes`.
        pruner: `median`, `hyperband` or `successive_halving`, only for scaleflow's jobs. None: no pruning.
        seed: the seed of the sampler. Each command adds the number of its first trial. None: a random seed.
        storage: the URL of an Optuna storage, or `journal:PATH` for a file. None: `optuna.db` in the sweep's folder.
            Several commands, also on several machines, may share a storage. Each runs its own trials.
        study_name: the name of the study in the storage. A study belongs to one search: a command with another config
            is rejected.
        params: config key -> values to search, as typed in an override.
    """

    def __init__(
        self,
        n_trials: int,
        direction: str | None,
        sampler: str,
        pruner: str | None,
        seed: int | None,
        storage: str | None,
        study_name: str,
        params: Mapping[str, str] | None,
    ) -> None:
        self._count = n_trials
        self._direction = direction
        self._sampler = sampler
        self._pruner = pruner
        self._seed = seed
        self._storage = None if storage is None else storage.strip()
        self._name = study_name
        self._params = dict(params or {})
        self._is_reseeded = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Checks the options and makes the launcher. Hydra calls this method once per sweep.

        Raises HydraException if an option is wrong.
        """
        self._direction = choose_direction(self._direction, config)
        check_choice("sampler", self._sampler, SAMPLERS)
        if self._pruner is not None:
            check_choice("pruner", self._pruner, PRUNERS)
        if self._count < 1:
            raise HydraException(f"hydra.sweeper.n_trials={self._count}: expected at least 1")
        self._task: Any = task_function
        self._context = hydra_context
        self._config = config
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Runs jobs until the study has `n_trials` trials, and all trials of this command have ended.

        Args:
            arguments: the typed overrides.

        Returns:
            The best values and their result; {} if no trial is complete.

        Raises HydraException if there is nothing to search, or an option is wrong.
        """
        parser = OverridesParser.create(config_loader=self._context.config_loader)
        params = [f"{key}={value}" for key, value in self._params.items()]
        latest = {override.get_key_element(): override for override in parser.parse_overrides([*params, *arguments])}
        space: dict[str, Any] = {}
        fixed: list[str] = []
        for key, override in latest.items():
            if override.is_sweep_override():
                space[key] = make_distribution(override)
            else:
                fixed.append(f"{key}={override.get_value_element_as_str()}")
        if not space:
            raise HydraException(
                "hydra/sweeper=optuna5: there is no parameter to search; write KEY=interval(LOW,HIGH) or KEY=A,B"
            )
        folder = Path(str(self._config.hydra.sweep.dir))
        folder.mkdir(parents=True, exist_ok=True)
        study = self._study(folder)
        for key, values in space.items():
            space[key] = match_earlier_values(study, key, values, self._elsewhere)
        self._check_search(study, space, fixed)
        OmegaConf.save(self._config, folder / "multirun.yaml")
        mask_sweep_config(folder / "multirun.yaml")
        self._search(study, space, fixed, folder=folder)
        return self._best(study, folder)

    def _study(self, folder: Path) -> optuna.Study:
        """Opens or creates the study. Raises HydraException if that fails, or if its direction is the opposite one."""
        from scaleflow.tracking.connection import migration_lock

        optuna = import_optuna()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        pruner = (
            optuna.pruners.NopPruner() if self._pruner is None else getattr(optuna.pruners, PRUNERS[self._pruner])()
        )
        address = self._storage or f"sqlite:///{(folder / 'optuna.db').absolute()}"
        try:
            with migration_lock(address):
                study = optuna.create_study(
                    study_name=self._name,
                    storage=open_storage(address),
                    sampler=self._make_sampler(0),
                    pruner=pruner,
                    direction=self._direction,
                    load_if_exists=True,
                )
        except Exception as error:  # SQLAlchemy, drivers and file systems raise many types
            reason = mask_secrets(read_reason(error))
            raise HydraException(f"hydra.sweeper.storage={mask_secrets(address)}: can't be opened: {reason}") from error
        if study.direction.name.lower() != self._direction:
            raise HydraException(
                f"hydra.sweeper.study_name={self._name}: this study is there to {study.direction.name.lower()}, and "
                f"the command is to {self._direction}; choose another name"
            )
        return study

    def _check_search(self, study: optuna.Study, space: Mapping[str, Any], fixed: Sequence[str]) -> None:
        """Records the search in the study. Raises HydraException if the study belongs to another search."""
        metric = OmegaConf.select(self._config, "sweep.metric")
        base = self._describe_search(space, fixed)
        states = import_optuna().trial.TrialState
        has_results = any(trial.state != states.FAIL for trial in study.get_trials(deepcopy=False))
        before = study.user_attrs.get(SEARCH) if has_results else None
        swept = list(space)
        if before is not None:
            start = f"hydra.sweeper.study_name={self._name}: this study belongs to another search: "
            if before["metric"] != metric:
                raise HydraException(
                    f"{start}its trials were judged by {before['metric']}, and the command has sweep.metric={metric}; "
                    f"{self._elsewhere}"
                )
            swept = [*dict.fromkeys((*before["swept"], *swept))]
            changed = [] if base is None else list_changed(before["base"], base, swept)
            may_change = OmegaConf.select(self._config, "sweep.on_change") in CONTINUING
            if changed and not may_change:
                more = ", or sweep.on_change=new to continue it with this config" if self._is_scaleflow else ""
                raise HydraException(f"{start}{join_first(changed)}; {self._elsewhere}{more}")
            base = before["base"] if base is None else base
        study.set_user_attr(SEARCH, {"base": base or {}, "swept": swept, "metric": metric})

    def _describe_search(self, space: Mapping[str, Any], fixed: Sequence[str]) -> dict[str, Any] | None:
        """Returns the config values that affect the jobs' results, by key, without the searched keys.

        None if no job can be composed.
        """
        from scaleflow.runs.identity import list_job_leaves
        from scaleflow.sweep.composer import drop_hydra

        if self._is_scaleflow:
            request = self._compose_example(space, fixed)
            if request is None:
                return None
            leaves = list_job_leaves(request.config)
            base: dict[str, Any] = {key: value for key, value in leaves.items() if key not in request.references}
            base["sweep.folds"] = request.options.folds
        else:  # another Hydra app
            content: Any = OmegaConf.to_container(drop_hydra(self._config), resolve=False)
            base = {"hydra.job.name": self._config.hydra.job.name, **flatten_config(content)}
            for word in fixed:
                key, _, value = word.partition("=")
                base[key] = yaml.safe_load(value)
        shown = json.loads(json.dumps(mask_secrets(base), default=str))
        return {key: value for key, value in shown.items() if not is_under(key, list(space))}

    def _compose_example(self, space: Mapping[str, Any], fixed: Sequence[str]) -> JobRequest | None:
        """Composes a job with some of the searched values. Returns None if `MAX_REFUSED` attempts fail."""
        from scaleflow.sweep.composer import JobComposer

        composer = JobComposer(self._context, self._config)
        for attempt in range(MAX_REFUSED):
            words = list(fixed)
            for key, distribution in space.items():
                words.append(f"{key}={format_choice(pick_value(distribution, attempt))}")
            request = composer.read_request(words, 0)
            if not request.refusal:
                return request
        return None

    @property
    def _elsewhere(self) -> str:
        """Advice for messages: how to use another study."""
        if self._storage is None:
            return "choose another folder (hydra.sweep.dir)"
        return "choose another hydra.sweeper.study_name"

    def _make_sampler(self, first: int) -> Any:
        """Makes the sampler of a command. `first` is the number of its first new trial.

        The sampler's seed depends on it, so that commands with the same seed propose different values.
        """
        seed = None if self._seed is None else self._seed + first
        is_seeded = self._sampler != "cmaes" or seed is not None
        return getattr(import_optuna().samplers, SAMPLERS[self._sampler])(**({"seed": seed} if is_seeded else {}))

    def _search(self, study: optuna.Study, space: Mapping[str, Any], fixed: Sequence[str], folder: Path) -> None:
        """Runs trials in batches of the launcher's `n_jobs`, first the open trials of earlier commands in this folder.

        Other commands' trials in the same study count towards `n_trials`, but this command does not run them.
        """
        optuna = import_optuna()
        owner = read_owner(folder)
        if not self._find_open_trials(study, owner) and count_begun(study) >= self._count:
            return
        runner = self._task.sweep(self._context, self._config) if self._is_scaleflow else None
        # Again: now the runner has locked the folder, so nobody else runs them.
        open_trials = self._find_open_trials(study, owner)
        batch_size = max(1, int(self._config.hydra.launcher.get("n_jobs", 1)))
        number = 0
        refused = 0
        while True:
            batch = open_trials[:batch_size]
            open_trials = open_trials[batch_size:]
            while len(batch) < batch_size and count_begun(study) < self._count:
                batch.append(self._ask(study, owner, folder))
            if not batch:
                return
            overrides = [[*fixed, *choose_values(trial, space)] for trial in batch]
            pruned = self._watch(batch)
            try:
                results = self._launcher.launch(overrides, number)
            except NothingCanRun as refusal:
                for trial in batch:  # open trials would be rejected again in the next command
                    study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
                refused += len(batch)
                if not number and (refused >= MAX_REFUSED or count_begun(study) >= self._count):
                    raise
                write_error(str(mask_secrets(str(refusal))))
                continue  # other combinations of the values may work
            is_stopped = runner is not None and runner.is_stopped
            for trial, returned in zip(batch, results, strict=True):
                value = as_number(returned.return_value)
                is_pruned = trial.number in pruned
                tell_result(study, trial.number, value, is_pruned=is_pruned, is_stopped=is_stopped)
            number += len(batch)
            if is_stopped:
                return

    def _find_open_trials(self, study: optuna.Study, owner: str) -> list[optuna.Trial]:
        """Returns the open trials that a command in this folder started."""
        optuna = import_optuna()
        running = study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING])
        open_trials = []
        for trial in running:
            if self._storage is None or trial.user_attrs.get(OWNER) == owner:
                open_trials.append(continue_trial(study, trial))
        return open_trials

    def _ask(self, study: optuna.Study, owner: str, folder: Path) -> optuna.Trial:
        """Starts a trial. The number of the command's first trial determines the seed of the sampler."""
        trial = study.ask()
        trial.set_user_attr(OWNER, owner)
        trial.set_user_attr(SWEEP, f"{platform.node()}:{folder.absolute()}")
        if not self._is_reseeded and trial.number:
            study.sampler = self._make_sampler(trial.number)
        self._is_reseeded = True
        return trial

    @property
    def _is_scaleflow(self) -> bool:
        """Whether the launcher is scaleflow's own, which checks and watches the jobs."""
        return bool(getattr(self._launcher, "checks_jobs", False))

    def _watch(self, trials: Sequence[optuna.Trial]) -> set[int]:
        """Makes the sweep report the metric of running jobs to the pruner.

        Returns:
            The set of the numbers of pruned trials. It grows while the jobs run.
        """
        pruned: set[int] = set()
        if self._pruner is None:
            return pruned
        if not self._is_scaleflow:
            raise HydraException(
                f"hydra.sweeper.pruner={self._pruner}: only jobs of scaleflow's own command report values while "
                "they run; use null"
            )
        metric = OmegaConf.select(self._config, "sweep.metric") or "val/loss"

        def watch(indices: Sequence[int], event: Event) -> bool:
            if not isinstance(event, MetricsLogged):
                return False
            value = event.values.get(metric, math.nan)
            if not math.isfinite(value):
                return False
            watched = [trials[index] for index in indices]  # one job has several trials if Optuna repeats values
            numbers = set()
            for trial in watched:
                trial.report(value, event.step)
                numbers.add(trial.number)
            if any(trial.should_prune() for trial in watched):
                pruned.update(numbers)
            return not numbers.isdisjoint(pruned)

        self._task.sweep(self._context, self._config).watch = watch
        return pruned

    def _best(self, study: optuna.Study, folder: Path) -> dict[str, Any]:
        """Writes all trials and the best values to the sweep's folder. Prints and returns the best values.

        Returns {} if no trial is complete.
        """
        states = import_optuna().trial.TrialState
        trials = study.get_trials(deepcopy=False)
        write_trials(trials, folder / TRIALS)
        if not any(trial.state == states.COMPLETE for trial in trials):
            return {}
        best = {"name": "optuna", "best_params": dict(study.best_params), "best_value": study.best_value}
        OmegaConf.save(OmegaConf.create(best), folder / RESULTS)
        words = " ".join(f"{key}={format_choice(value)}" for key, value in study.best_params.items())
        sweep = study.best_trial.user_attrs.get(SWEEP, "")
        elsewhere = f" in {sweep}" if study.best_trial.user_attrs.get(OWNER) != read_owner(folder) and sweep else ""
        running = sum(trial.state == states.RUNNING for trial in trials)
        more = f"; {running} of other commands still run" if running else ""
        count = len(trials) - running
        print(f"best of {count}: {format_number(study.best_value)} with {words}{elsewhere}{more}", flush=True)
        return best


def pick_value(values: Any, attempt: int) -> Any:
    """Returns a value of a distribution: its lowest number, or the choice with the number `attempt`."""
    choices = getattr(values, "choices", None)
    return values.low if choices is None else choices[attempt % len(choices)]


def list_changed(before: Mapping[str, Any], now: Mapping[str, Any], swept: Sequence[str]) -> list[str]:
    """Returns the changed config values of two searches as text, without the keys in `swept`."""
    if "experiment" in swept:  # its recipes may set any key
        return []
    changes = []
    for key, value in before.items():
        if key in now and now[key] != value and not is_under(key, swept):
            changes.append(f"{key}={format_value(now[key])} (was {format_value(value)})")
    return changes


def match_earlier_values(study: optuna.Study, key: str, values: Any, elsewhere: str) -> Any:
    """Returns the distribution of a key in a form that is compatible with the study's earlier trials.

    Numbers may get other ends and steps. Choices must be the same; they get the earlier order. Raises HydraException
    for any other change, which Optuna does not support.
    """
    distributions = import_optuna().distributions
    earlier = []
    for trial in study.get_trials(deepcopy=False):
        if key in trial.distributions:
            earlier.append(trial.distributions[key])
    if not earlier:
        return values
    before = earlier[0]
    if isinstance(before, distributions.CategoricalDistribution) and type(values) is type(before):
        if sorted(map(repr, before.choices)) == sorted(map(repr, values.choices)):
            return before
        reason = "Optuna cannot change the choices of a key"
    else:
        try:
            distributions.check_distribution_compatibility(before, values)
            return values
        except ValueError:
            reason = "Optuna can change the ends and the step of numbers, but not their kind or scale"
    raise HydraException(
        f"{key}={describe_values(values)}: this study has searched {describe_values(before)} before; {reason}; "
        f"repeat the earlier values, or {elsewhere}"
    )


def describe_values(values: Any) -> str:
    """Formats a distribution as an override."""
    choices = getattr(values, "choices", None)
    if choices is not None:
        return ",".join(map(format_choice, choices))
    if values.step is not None and (values.step != 1 or isinstance(values.low, float)):
        return f"range({values.low},{values.high + values.step},{values.step})"
    text = f"interval({values.low},{values.high})"
    if isinstance(values.low, int):
        text = f"int({text})"
    return f"tag(log, {text})" if values.log else text


def choose_values(trial: optuna.Trial, space: Mapping[str, Any]) -> list[str]:
    """Lets the sampler choose all values of a trial. Returns them as overrides."""
    for key, values in space.items():
        suggest_value(trial, key, values)
    return [f"{key}={format_choice(value)}" for key, value in trial.params.items()]


def tell_result(study: optuna.Study, number: int, value: float | None, is_pruned: bool, is_stopped: bool) -> None:
    """Reports a trial's result to the study. A trial stopped by a signal stays open; the next command runs it first."""
    states = import_optuna().trial.TrialState
    if is_pruned:
        study.tell(number, state=states.PRUNED)
    elif value is not None:
        study.tell(number, value)
    elif not is_stopped:
        study.tell(number, state=states.FAIL)


def read_owner(folder: Path) -> str:
    """Returns the ID of a sweep's folder, which marks its trials in a shared storage. Creates it if it is missing."""
    path = folder / "optuna.id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex)
    return path.read_text()


def open_storage(address: str) -> Any:
    """Returns a file storage for `journal:PATH`, or an SQLAlchemy URL unchanged. Raises Optuna's errors."""
    if not address.startswith(JOURNAL):
        return address
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(address.removeprefix(JOURNAL)))


def count_begun(study: optuna.Study) -> int:
    """Counts the running and ended trials of a study, of all commands."""
    waiting = import_optuna().trial.TrialState.WAITING
    return sum(trial.state != waiting for trial in study.get_trials(deepcopy=False))


def suggest_value(trial: optuna.Trial, key: str, values: Any) -> None:
    """Lets the sampler choose a value, unless the trial already has one."""
    distributions = import_optuna().distributions
    if isinstance(values, distributions.CategoricalDistribution):
        trial.suggest_categorical(key, values.choices)
    elif isinstance(values, distributions.IntDistribution):
        trial.suggest_int(key, values.low, values.high, step=values.step, log=values.log)
    else:
        trial.suggest_float(key, values.low, values.high, step=values.step, log=values.log)


def write_trials(trials: Sequence[optuna.trial.FrozenTrial], path: Path) -> None:
    """Writes a CSV table with a row for each trial of a study, also for other commands' trials."""
    keys: list[str] = []
    for trial in trials:
        for key in trial.params:
            if key not in keys:
                keys.append(key)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["trial", "state", "value", *keys, "sweep"])
        for trial in trials:
            chosen = []
            for key in keys:
                chosen.append(format_choice(trial.params[key]) if key in trial.params else "")
            value = trial.value if trial.state.name == "COMPLETE" else None
            writer.writerow([trial.number, trial.state.name, value, *chosen, trial.user_attrs.get(SWEEP, "")])


def choose_direction(typed: str | None, config: DictConfig) -> str:
    """Returns the direction of a search: the typed one, or that which scaleflow's options `sweep` imply.

    Raises HydraException if it is invalid, unknown, or the opposite of `sweep.mode`.
    """
    from scaleflow.sweep.ranking import choose_mode

    metric = OmegaConf.select(config, "sweep.metric")
    mode = OmegaConf.select(config, "sweep.mode")
    if typed is None:
        chosen = choose_mode(metric, str(mode), None, runs=()) if isinstance(metric, str) else "min"
        if chosen is None:
            raise HydraException(
                f"sweep.metric={metric}: scaleflow does not know whether larger values are better; set "
                "sweep.mode=max or min"
            )
        return f"{chosen}imize"
    check_choice("direction", typed, DIRECTIONS)
    if mode in ("min", "max") and not typed.startswith(mode):
        raise HydraException(
            f"hydra.sweeper.direction={typed}: sweep.mode={mode} is the opposite; remove one of the two"
        )
    return typed


def make_distribution(override: Override) -> Any:
    """Converts a sweep override to an Optuna distribution.

    Raises HydraException for a sweep without a corresponding distribution, such as `glob(...)`.
    """
    optuna = import_optuna()
    sweep = override.value()
    if isinstance(sweep, ChoiceSweep):
        return optuna.distributions.CategoricalDistribution([to_plain_value(value) for value in sweep.list])
    if isinstance(sweep, RangeSweep):
        low = sweep.start or 0
        stop = sweep.stop or 0
        step = sweep.step
        high = low + (math.ceil((stop - low) / step) - 1) * step  # `stop` is exclusive
        of_ints = isinstance(low, int) and isinstance(step, int)
        kind = optuna.distributions.IntDistribution if of_ints else optuna.distributions.FloatDistribution
        return kind(low, high, step=step)
    if isinstance(sweep, IntervalSweep):
        of_ints = all(type(end) is int for end in (sweep.start, sweep.end))  # Hydra annotates them as float
        kind = optuna.distributions.IntDistribution if of_ints else optuna.distributions.FloatDistribution
        return kind(sweep.start, sweep.end, log="log" in sweep.tags)
    raise HydraException(f"{override.input_line}: optuna5 supports values, choice(...), range(...), interval(...)")


def to_plain_value(value: Any) -> Any:
    """Converts a value of Hydra's parser to one that Optuna can store: str, int, float, bool or None.

    Text keeps the quotes that Hydra needs.
    """
    if isinstance(value, str | QuotedString):
        return write_value(value if isinstance(value, str) else value.text)
    is_plain = isinstance(value, int | float | bool) or value is None
    return value if is_plain else Transformer.str(value)


def format_choice(value: Any) -> str:
    """Formats a value as in an override."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_number(value: Any) -> float | None:
    """Converts a job's result to a finite number; None if it is not one."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def check_choice(key: str, value: str, known: Sequence[str] | Mapping[str, str]) -> None:
    names = list(known)
    if value not in names:
        raise HydraException(f"hydra.sweeper.{key}={value}: expected one of {', '.join(names)}")


def import_optuna() -> Any:
    """Imports Optuna, which takes seconds. Raises HydraException if it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise HydraException(
            "hydra/sweeper=optuna5: optuna is not installed; pip install 'scaleflow[optuna]'"
        ) from error
    return optuna
