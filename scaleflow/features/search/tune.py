"""Searches for good settings of a run within a time, and trains the best once more on the validation rows, too.

    scaleflow tune dataset=table dataset.data_dir=house.csv dataset.target=price --minutes 10
    scaleflow tune dataset=digits model=cnn --minutes 30 --trials 40
    scaleflow tune dataset=digits 'model.units=32,[64,64]' sweep.folds=5 --no-refit

Type the words of the run, as for `scaleflow`. Optuna proposes values of the learning rate, the weight decay, the batch
size, and the widths, depth and dropout of the chosen model. A key that you type keeps your value, or is searched among
your values. A job that is worse than others at the same step is stopped. Jobs are judged by `sweep.metric` (`val/loss`)
on the validation rows; with `sweep.folds=5` on all of them, which takes five times as long and suits small data.

The search ends after --minutes or --trials; the running job is stopped then. The new run (`scaleflow refit`) takes its
own time. The same command continues: it has all its minutes once more, and knows the trials before.

Exit code: as that of refit; with --no-refit 0 the search has a best job; 1 it has none; 2 the command cannot work.
"""

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from scaleflow.api import Result, SweepResult, check_outcome, run_sweep
from scaleflow.commands.frame import CommandParser, make_main
from scaleflow.config.compose import CommandWords, Folders, compose_config, to_folders
from scaleflow.config.typed_folder import in_typed_folder
from scaleflow.config.words import split_overrides
from scaleflow.errors import ConfigError
from scaleflow.features.search.refit import launch_refit
from scaleflow.interfaces import BY_SIZE
from scaleflow.launcher.command_exit import FAILED, FINISHED, Outcome
from scaleflow.sweep.parent_run import describe_jobs

#: Keys of a model that are sizes of layers, and keys that are numbers of layers.
WIDTHS = ("units", "width", "filters", "embedding", "dense_units")
DEPTHS = ("blocks",)

#: Values to search for keys that default to a choice by the size of the data.
WIDTHS_BY_SIZE = ([64] * 3, [128] * 3, [256] * 3)
BATCHES_BY_SIZE = (64, 128, 256, 512)

#: Number of trials that no search reaches in its time.
MAX_TRIALS = 10_000


@make_main
def main(argv: list[str]) -> Outcome:
    parser = CommandParser("tune", __doc__)
    parser.add_overrides("a word of the run")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="of the search (default 10)")
    parser.add_argument("--trials", type=int, metavar="N", help="the most jobs (default: as many as there is time for)")
    parser.add_argument("--folder", metavar="DIR", help="of the search (default: one that the words name)")
    parser.add_argument("--no-refit", action="store_true", help="end with the best job")
    typed = parser.parse_intermixed_args(split_overrides(argv))
    result = search(typed.overrides, typed.minutes, typed.trials, folder=typed.folder, config_dirs=typed.config_dir)
    if typed.no_refit:
        return Outcome(FINISHED if result.best else FAILED, partial(describe_jobs, result.folder))
    return launch_refit(name_best(result, typed.overrides, typed.config_dir), False)[0]


@in_typed_folder
def tune_run(
    *overrides: str,
    minutes: float = 10.0,
    trials: int | None = None,
    folder: str | Path | None = None,
    config_dir: Folders = (),
) -> Result:
    """Searches for good settings and trains the best once more, as `scaleflow tune` does.

    Args:
        overrides: overrides of the run's config.
        minutes: duration of the search.
        trials: maximum number of jobs; None: as many as the time allows.
        folder: folder of the search; None: derived from the overrides, so that the same call continues.
        config_dir: folders with your own config options.

    Raises:
        ConfigError: if no job can run, or none has a result.
        RunFailed: if the new run failed.
    """
    dirs = to_folders(config_dir)
    result = search(overrides, minutes, trials, folder=folder, config_dirs=dirs)
    return check_outcome(*launch_refit(name_best(result, overrides, dirs), False))


def search(
    overrides: Any, minutes: float, trials: int | None, folder: str | Path | None, config_dirs: Any
) -> SweepResult:
    """Runs the jobs of a search. Raises ConfigError if it cannot begin."""
    if not 0 < minutes < 1e6:
        raise ConfigError(f"--minutes {minutes:g}: expected a number above 0")
    if trials is not None and not 0 < trials <= MAX_TRIALS:
        raise ConfigError(f"--trials {trials}: expected a number from 1 to {MAX_TRIALS:,}")
    words = CommandWords(overrides, config_dirs, is_sweep=True)
    for key, instead in (("hydra/sweeper", "scaleflow -m"), ("hydra.sweep.dir", "--folder")):
        if key in words.keys:
            raise ConfigError(f"{key}: this command chooses it; leave it out, or use {instead}")
    words_of_run = []
    for word, override in zip(overrides, words.parsed, strict=True):
        if not override.is_sweep_override() and not word.startswith(("sweep.", "hydra")):
            words_of_run.append(word)
    config = compose_config(words_of_run, config_dirs).resolved
    space = choose_space(config, words.keys)
    digest = hashlib.blake2b("\0".join(overrides).encode(), digest_size=4).hexdigest()
    try:
        return run_sweep(
            "hydra/sweeper=optuna5",
            "hydra.sweeper.pruner=median",
            f"hydra.sweeper.n_trials={trials or MAX_TRIALS}",
            f"sweep.max_seconds={minutes * 60:g}",
            *space,
            *overrides,
            config_dir=config_dirs,
            folder=folder or Path("multirun", f"tune-{digest}"),
        )
    except ConfigError as error:
        raise ConfigError(str(error).replace("(hydra.sweep.dir)", "(--folder)")) from error


def name_best(result: SweepResult, overrides: Any, config_dirs: Any) -> CommandWords:
    """Returns the words that train the best job once more. Raises ConfigError if no job has a result."""
    if result.best is None:
        raise ConfigError(f"tune: no job of {result.folder} has a result; give it more --minutes")
    store = [word for word in overrides if word.startswith("tracking.uri=")]
    return CommandWords(store, config_dirs, run_id=str(result.folder))


def choose_space(config: Mapping[str, Any], typed: set[str]) -> list[str]:
    """Returns the sweep overrides of a search, from a run's config. Keys that the user has `typed` are left out."""
    optimizer = config.get("optimizer") or {}
    training = config.get("training") or {}
    model = config.get("model") or {}
    space: dict[str, str] = {}
    rate = optimizer.get("learning_rate")
    decay = optimizer.get("weight_decay")
    if isinstance(rate, float | int):
        space["optimizer.learning_rate"] = f"tag(log,interval({rate / 10:g},{rate * 10:g}))"
    if isinstance(decay, float | int):
        space["optimizer.weight_decay"] = "tag(log,interval(1e-5,1e-1))"
    batch = training.get("batch_size")
    if isinstance(batch, int) or batch == BY_SIZE:
        sizes = BATCHES_BY_SIZE if batch == BY_SIZE else [batch * factor for factor in (1, 2, 4, 8)]
        space["training.batch_size"] = ",".join(str(size) for size in sizes)
    if isinstance(model.get("dropout"), float | int):
        space["model.dropout"] = "interval(0.0,0.5)"
    for name in (*WIDTHS, *DEPTHS):
        choices = list_sizes(model.get(name), name in DEPTHS)
        if len(choices) > 1:
            space[f"model.{name}"] = ",".join(str(choice).replace(" ", "") for choice in choices)
    return [f"{key}={values}" for key, values in space.items() if key not in typed]


def list_sizes(value: Any, is_depth: bool) -> list[Any]:
    """Returns the values to try for a size, or for a list of sizes; [] for any other value, and for 0."""
    if not value:
        return []
    if value == BY_SIZE:
        return list(WIDTHS_BY_SIZE)
    if isinstance(value, int):
        return [value, 2 * value, 3 * value] if is_depth else [value, 2 * value, 4 * value]
    if isinstance(value, list) and all(isinstance(size, int) for size in value):
        doubled = [2 * size for size in value]
        quadrupled = [4 * size for size in value]
        return [value, doubled, quadrupled]
    return []
