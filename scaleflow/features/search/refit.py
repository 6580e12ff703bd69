"""Trains the model of a run, or of the best job of a sweep, once more: on all rows but those of the test split.

    scaleflow refit PARENT
    scaleflow refit RUN_ID --all
    scaleflow refit PARENT training.batch_size=64 --trust my_models

PARENT is the id of a sweep's run in MLflow, or the sweep's folder; RUN_ID is as for rerun. The new run has no
validation split. It ends after as many updates as were the best: those of the exported model; of a sweep with folds,
the median over the folds of the best job. What the validation rows decided about the answers, such as a threshold or
sets, is used again. With --all it trains on the test split, too, and has no test metrics.

Exit code: as that of rerun.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaleflow.api import Result, check_outcome, launch_prepared
from scaleflow.commands.frame import make_main
from scaleflow.commands.tracked_run import find_run, make_run_parser, parse_command, place_objects, reuse_for_new_run
from scaleflow.config.compose import CommandWords, Folders, to_folders
from scaleflow.config.typed_folder import in_typed_folder
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Outputs, Tracking
from scaleflow.launcher.command_exit import Outcome
from scaleflow.launcher.prepare import prepare_run
from scaleflow.runs import RunFolder
from scaleflow.runs.reuse import find_store_options
from scaleflow.runs.run import Run
from scaleflow.sweep.ranking import find_best_job
from scaleflow.tracking.model_uris import RUN_OR_MODEL

#: Tag of the new run: the id of the run whose config it uses.
TAG = "scaleflow.refit_of"


@make_main
def main(typed: list[str]) -> Outcome:
    parser = make_run_parser("refit", __doc__)
    parser.add_argument("--all", action="store_true", help="train on the rows of the test split, too")
    words, options = parse_command(parser, typed, takes_run=False)  # the id may name a sweep
    return launch_refit(words, options.all)[0]


@in_typed_folder
def refit_run(
    run: str | Path, *overrides: str, all_rows: bool = False, trust: Sequence[str] = (), config_dir: Folders = ()
) -> Result:
    """Trains the model of a run, or of a sweep's best job, once more, as `scaleflow refit` does.

    Args:
        run: id or folder of a run or a sweep.
        overrides: overrides of the run's config.
        all_rows: whether to train on the rows of the test split as well.
        trust: modules whose code may run, and folders (with a `/`) whose files may be used.
        config_dir: folders with your own config options.

    Raises:
        ConfigError: if the run does not exist, or its config does not work here.
        RunFailed: if the run began and failed.
    """
    words = CommandWords(overrides, to_folders(config_dir), run_id=str(run), trusted=trust)
    return check_outcome(*launch_refit(words, all_rows))


def launch_refit(words: CommandWords, takes_all: bool) -> tuple[Outcome, Path]:
    """Runs the refit. Returns the outcome of the new run, and its folder."""
    run_id, steps = find_best_run(words.run_id, find_store_options(words))
    run, words = find_run(replace(words, run_id=run_id))
    typed = {override.partition("=")[0] for override in words.overrides}
    changed = list_changes(run, steps, takes_all)
    added = [override for override in changed if override.partition("=")[0] not in typed]
    answers: Mapping[str, Any] = {}
    if "dataset.validation" not in typed:  # otherwise its new validation rows decide
        answers, changes = carry_answers(run, typed)
        added += changes
    words = replace(words, overrides=[*added, *words.overrides])
    composed, copy_objects = place_objects(run, words, reuse_for_new_run(run, words, "refit of"))
    again = prepare_run(composed)
    plan = replace(again.spec.plan, answers=answers)
    spec = replace(again.spec, plan=plan, tags={TAG: run.model.run_id, **again.spec.tags})
    return launch_prepared(replace(again, spec=spec), copy_objects)


def find_best_run(named: str, options: Tracking) -> tuple[str, int]:
    """Returns a run and the number of updates of its best model: for a sweep, the best job's; else 0 (not
    looked up).
    """
    is_sweep = RunFolder(Path(named).expanduser()).ledger.is_file()
    if is_sweep or (RUN_OR_MODEL.fullmatch(named) and not named.startswith("models:/")):
        try:
            best = find_best_job(named, options)
        except ConfigError:
            if is_sweep:
                raise
        else:
            return (str(best.run.files.path) if is_sweep else str(best.run.run_id)), best.steps
    return named, 0


def list_changes(run: Run, steps: int, takes_all: bool) -> list[str]:
    """Returns the overrides that turn a run's config into its refit's config. Raises ConfigError if none can."""
    steps = steps or run.model.step
    if not steps:
        raise ConfigError(f"{run.run_id}: has no model, so it is not known how long to train; rerun trains anew")
    config = run.config
    changes = ["dataset.validation=null", "dataset.fold=null", f"training.max_steps={steps}"]
    changes += ["training.early_stopping=null"] if (config.get("training") or {}).get("early_stopping") else []
    changes += ["checkpoint=default"] if (config.get("checkpoint") or {}).get("name") == "best" else []
    if not takes_all:
        return changes
    if "test" not in (config.get("dataset") or {}):
        raise ConfigError("--all: the test split of this dataset is not drawn, so its rows cannot be trained on")
    return [*changes, "dataset.test=0"]


#: Results of the validation rows: the config key that requests one, and its field in the model's outputs.
ANSWERS = {
    "evaluation.calibrate": "calibration",
    "evaluation.interval": "margins",
    "evaluation.sets": "set_threshold",
}

THRESHOLD = "evaluation.threshold"

#: Costs of a miss and of a false alarm, in the order of `evaluation.threshold={cost: [5, 1]}`.
COSTS = ("evaluation.miss_cost", "evaluation.alarm_cost")


def carry_answers(run: Run, typed: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the results of a run's validation rows, and the overrides of a run that reuses them.

    For keys that are `typed`, the user's values stay.
    """
    section = run.config.get("evaluation")
    options: Mapping[str, Any] = section if isinstance(section, dict) else {}
    asked = {key: field for key, field in ANSWERS.items() if options.get(key.partition(".")[2]) is not None}
    threshold = options.get("threshold", 0.5)
    decides_threshold = isinstance(threshold, str | dict)
    if "evaluation" in typed or not (asked or decides_threshold):
        return {}, []
    outputs = run.learned_state.outputs
    answers = dict[str, Any]()
    changes = list[str]()
    assert isinstance(outputs, Outputs)  # with several outputs, no validation rows decide
    for key, field in asked.items():
        if key not in typed:
            changes.append(f"{key}=null")
            value = getattr(outputs, field)
            if value is not None:
                answers[field] = value
    if decides_threshold and THRESHOLD not in typed:
        changes.append(f"{THRESHOLD}={0.5 if outputs.threshold is None else outputs.threshold}")
        cost = threshold.get("cost") if isinstance(threshold, dict) else None
        if isinstance(cost, list) and len(cost) == 2 and not {*COSTS} & {*typed}:
            changes += [f"{key}={value}" for key, value in zip(COSTS, cost, strict=True)]
    return answers, changes
