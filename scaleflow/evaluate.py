"""Evaluates a tracked model on a dataset, and records the metrics in the run of the model.

    scaleflow evaluate RUN_ID                          # on the test split of its own dataset
    scaleflow evaluate RUN_ID dataset.data_dir=new.csv # on all rows of a new file
    scaleflow evaluate RUN_ID --split validation strategy=mirrored precision=mixed
    scaleflow evaluate RUN_ID profiler=trace            # with a profile of some batches

The metrics are evaluate/DATASET/loss and so on, at the step at which the model was logged. For a split other than the
test split they are evaluate/DATASET.SPLIT/loss. The second data of one name are evaluate/DATASET-DIGEST/loss. The
dataset becomes an input of the run. A profile traces batches of the split, which is repeated if it is too short. The
profile is stored under evaluate/DATASET/profile/.

Dataset, objective, precision and seed are those of the run, unless you type them. Strategy and hardware are those of
this command. New data are read as the run read its own: the same columns, kinds and classes, matched by name. All of
their examples are evaluated, unless they have a test split of their own or you name a split.
RUN_ID is the id of a run in MLflow, the folder of a run, or a model: models:/NAME/VERSION, models:/NAME@ALIAS or
models:/m-... A run stands for the model that is its result.
The run is looked up in `tracking.uri=...`, else in MLFLOW_TRACKING_URI, else in sqlite:///mlflow.db.

Exit code: 0 the metrics are recorded; 1 the evaluation failed; 2 the command cannot work; 130 or 143 interrupted.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from scaleflow.commands.frame import make_main
from scaleflow.commands.tracked_run import (
    answer_model,
    find_run,
    format_model_rows,
    make_evaluation_plan,
    make_run_parser,
    parse_command,
    show_notes,
    supervise_worker,
    take_costs,
)
from scaleflow.config.compose import CommandWords
from scaleflow.config.evaluation_rules import ADVICE
from scaleflow.config.parse import is_under
from scaleflow.config.policies import EVALUATE
from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import Dataset
from scaleflow.interfaces.events import DatasetDescribed, EvaluationReady, Event, MetricsLogged, StepsProfiled
from scaleflow.interfaces.formatting import format_with_interval
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.command_exit import FAILED, FINISHED, Outcome
from scaleflow.launcher.display import Display, display_for
from scaleflow.launcher.processes.stop import catch_stop_signals
from scaleflow.profiler import analyze_window
from scaleflow.runs import RunSpec
from scaleflow.runs.provenance.tags import command_line
from scaleflow.runs.reuse import complete_command
from scaleflow.runs.run import Run
from scaleflow.runs.state import drop_intervals
from scaleflow.tracking.tracked_runs import attach_opened_run, download_model, log_evaluation
from scaleflow.worker.evaluate import ALL, SPLITS, EvaluateModel

#: Arguments of scaleflow's datasets that select the data.
DATA_KEYS = ("_target_", "data_dir", "name", "config", "version")


@make_main
def main(typed: list[str]) -> Outcome:
    parser = make_run_parser("evaluate", __doc__)
    parser.add_argument(
        "--split",
        choices=(*SPLITS, ALL),
        help="the split to evaluate on, or all examples of the dataset (default: all of new data without splits, "
        "otherwise the first of test, validation and train that the dataset has)",
    )
    parser.add_argument(
        "--unknown-classes",
        choices=("refuse", "count"),
        default="refuse",
        help="what to do with examples of a class that the model does not know: refuse them, or count them as wrong "
        "(default: refuse)",
    )
    words, options = parse_command(parser, typed)
    with display_for() as display:
        return evaluate(words, options, display)


def evaluate(words: CommandWords, flags: argparse.Namespace, display: Display) -> Outcome:
    """Evaluates a tracked model. Raises ConfigError if the command cannot work, RunError if the evaluation fails."""
    began = time.time()
    typed_keys = words.keys
    check_keys(typed_keys)
    display.begin_phase("reading the run and its model from MLflow")
    run, words = find_run(words)
    attach_opened_run(run.model.run_id, run.name, run.store)
    composed = show_notes(run.reuse_config(words, EVALUATE), display)
    config = composed.resolved
    is_new = has_new_data(run.config, config, typed_keys)
    names_test = "dataset.test" in typed_keys and config["dataset"].get("test")
    split = flags.split or ("test" if is_new and names_test else None)
    takes_all = (is_new or split == ALL) and "dataset.limit" not in typed_keys
    plan = take_costs(make_evaluation_plan(composed, takes_all), run)
    with tempfile.TemporaryDirectory(prefix="scaleflow-evaluate-") as folder, catch_stop_signals() as stop:
        task = EvaluateModel(
            str(download_model(run.tracker, run.model, Path(folder))),
            run.model.run_id,
            split,
            precision=any(is_under(key, ("precision",)) for key in typed_keys),
            command=complete_command(run.config, plan.trusted_modules or (), words),
            is_new=is_new,
            counts_unknown=flags.unknown_classes == "count",
        )
        events = supervise_worker(RunSpec(plan, Path(folder), began, task), stop, display)
        return record_evaluation(run, events, display, is_new=is_new)


def check_keys(typed: Collection[str]) -> None:
    """Raises ConfigError for keys that an evaluation does not take."""
    if "dataset.shards" in typed:
        raise ConfigError("dataset.shards: an evaluation reads all files in one process; leave it out")
    for key in typed:
        if is_under(key, ADVICE):
            raise ConfigError(f"{key}: an evaluation uses what the run's validation rows decided; leave it out")
        if key.startswith("objective.levels"):
            raise ConfigError(f"{key}: the quantiles that a model predicts are those of its run; leave it out")


def has_new_data(tracked: Mapping[str, Any], config: Mapping[str, Any], typed: Collection[str]) -> bool:
    """Returns whether an evaluation uses other data than the run: another dataset, file or name.

    Args:
        tracked: the config of the run, with unresolved interpolations.
        config: the config of the evaluation.
        typed: the keys and groups that the user typed. Only these can differ.
    """
    before = dict(tracked.get("dataset") or {})
    now = dict(config.get("dataset") or {})
    keys = set(DATA_KEYS)
    if not str(now.get("_target_")).startswith("scaleflow."):  # any argument of the user's class may select data
        options = {field.name for field in fields(Dataset)}
        keys = {*before, *now} - options
    if "dataset" not in typed:
        keys &= {key.split(".")[1] for key in typed if key.startswith("dataset.")}
    return any(to_address(before.get(key)) != to_address(now.get(key)) for key in keys)


def to_address(value: Any) -> Any:
    """Converts text without `://` to an absolute path. Other values stay unchanged."""
    if not isinstance(value, str) or "://" in value:
        return value
    return os.path.abspath(os.path.expanduser(value.strip()))  # noqa: PTH100, PTH111  (it may be no path)


def record_evaluation(run: Run, events: Sequence[Event], display: Display, is_new: bool) -> Outcome:
    """Records the evaluation in the run, and prints the metrics. `is_new`: whether its data differ from the run's."""
    ready = next(event for event in events if isinstance(event, EvaluationReady))
    dataset = next(event for event in events if isinstance(event, DatasetDescribed))
    profiles = [analyze_window(event) for event in events if isinstance(event, StepsProfiled)]
    (described,) = dataset.splits.values()
    split = ready.split
    name = dataset.name.replace("/", "-")
    is_usual = split == "test" or (split == ALL and is_new)
    if not is_usual:
        name += f".{split}"

    examples = f"all {ready.examples} examples" if split == ALL else f"{ready.examples} examples of {split}"
    resolved = ready.resolved
    text = f"{examples}, {resolved['strategy']}, {resolved['precision']}, {resolved['replicas']} replica(s)"
    metrics: Mapping[str, float]
    try:
        tag = f"{text}, data {described['digest']}; {command_line(sys.orig_argv)}"
        metrics = log_evaluation(run.tracker, run.model, name, events=[*events, *profiles], tag=tag)
        code = FINISHED
        error = ""
    except Exception as failed:  # a store may raise anything
        metrics = merge_metrics(events)
        code = FAILED
        error = f"the metrics could not be recorded: {mask_secrets(read_reason(failed))}"

    rows = [*format_model_rows(run), ("on", text)]
    for key in drop_intervals(metrics):
        rows.append((key, format_with_interval(metrics, key)))
    for profile in profiles:
        rows.append(("profile", profile.line))
    display.print_summary(rows)
    answer = {**answer_model(run), "name": name, "split": split, "examples": ready.examples, "metrics": metrics}
    return Outcome(code, lambda: answer, error=error)


def merge_metrics(events: Sequence[Event]) -> dict[str, float]:
    """Returns the metrics of all events, by name."""
    metrics: dict[str, float] = {}
    for event in events:
        if isinstance(event, MetricsLogged):
            metrics |= event.values
    return metrics
