"""Evaluates a tracked model on a dataset, and records the metrics in the run of the model.

    scaleflow evaluate RUN_ID                          # on the test split of its own dataset
    scaleflow evaluate RUN_ID dataset=csv dataset.data_dir=new.csv dataset.target=price
    scaleflow evaluate RUN_ID --split validation strategy=mirrored precision=mixed
    scaleflow evaluate RUN_ID profiler=trace            # with a profile of some batches

The metrics are evaluate/DATASET/loss and so on, at the step at which the model was logged. For a split other than the
test split they are evaluate/DATASET.SPLIT/loss. The dataset becomes an input of the run. A profile traces batches of
the split, which is repeated if it is too short. The profile is stored under evaluate/DATASET/profile/.

Dataset, objective, precision and seed are those of the run, unless you type them. Strategy and hardware are those of
this command.
RUN_ID is the id of a run in MLflow, the folder of a run, or a model: models:/NAME/VERSION, models:/NAME@ALIAS or
models:/m-... A run stands for the model that is its result.
The run is looked up in `tracking.uri=...`, else in MLFLOW_TRACKING_URI, else in sqlite:///mlflow.db.

Exit code: 0 the metrics are recorded; 1 the evaluation failed; 2 the command cannot work; 130 or 143 interrupted.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaleflow.commands.frame import run_command
from scaleflow.commands.process import end_with
from scaleflow.commands.supervision import supervise_worker
from scaleflow.commands.tracked_run import (
    answer_model,
    format_model_rows,
    make_one_process_plan,
    make_run_parser,
    parse_command,
)
from scaleflow.config.compose import ComposedConfig, resolve_config
from scaleflow.config.from_mlflow import (
    RerunCommand,
    complete_command,
    find_config_dirs,
    find_store_options,
    load_config,
    reuse_config,
)
from scaleflow.config.hydra_errors import parse_overrides
from scaleflow.errors import ConfigError
from scaleflow.events import DatasetDescribed, EvaluationReady, Event, MetricsLogged, StepsProfiled
from scaleflow.formatting import format_number
from scaleflow.interfaces import Plan, Tracking
from scaleflow.launcher.answer import ANSWER, FAILED, FINISHED, write_error
from scaleflow.launcher.display import Display, display_for
from scaleflow.launcher.named_runs import find_named_run
from scaleflow.launcher.stop import catch_stop_signals
from scaleflow.profiler import analyze_window
from scaleflow.provenance import command_line
from scaleflow.runs import EvaluationSpec, RunSpec
from scaleflow.secret_masking import mask_secrets
from scaleflow.tracking.tracked_runs import (
    TrackedRun,
    describe_opened_run,
    download_model,
    log_evaluation,
)
from scaleflow.worker.evaluate import SPLITS

#: The sections of a tracked config that an evaluation uses.
SECTIONS = ("dataset", "objective", "precision", "seed")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 the metrics are recorded, 1 failed, 2 refused, 130 or 143 interrupted.
    """
    return run_command(evaluate_words, argv)


def evaluate_words(typed: list[str]) -> int:
    parser = make_run_parser("evaluate", __doc__)
    parser.add_argument(
        "--split",
        choices=SPLITS,
        help="the split to evaluate on (default: the first of test, validation and train that the dataset has)",
    )
    words, options = parse_command(parser, typed)
    with contextlib.closing(display_for()) as display:
        return evaluate(words, options.split, display)


def evaluate(words: RerunCommand, split: str | None, display: Display) -> int:
    """Evaluates a tracked model. Raises ConfigError if that cannot work, and RunError if it failed."""
    began = time.time()
    typed_keys = {str(o.key_or_group) for o in parse_overrides(words.overrides)}
    if "dataset.shards" in typed_keys:
        raise ConfigError("dataset.shards: an evaluation reads all files in one process; leave it out")
    display.begin_stage("reading the run and its model from MLflow")
    store, tracker, tracked = find_named_run(words.run_id, find_store_options(words))
    describe_opened_run(tracked, store)
    words = replace(words, tracked_dirs=find_config_dirs(tracked.command))
    plan = make_evaluation_plan(reuse_config(tracked.config, tracked.params, words, SECTIONS), store)
    command = complete_command(load_config(tracked.config, tracked.run_id), plan.trusted_modules or (), words)
    with tempfile.TemporaryDirectory(prefix="scaleflow-evaluate-") as folder, catch_stop_signals() as stop:
        model = download_model(tracker, tracked, store, Path(folder))
        sections = {key.partition(".")[0] for key in typed_keys}
        evaluation = EvaluationSpec(str(model), tracked.run_id, split, "precision" in sections, command)
        events = supervise_worker(RunSpec(plan, Path(folder), began, evaluation=evaluation), stop, display)
        if stop.is_set():
            return stop.exit_code
        return record_evaluation(tracker, tracked, events, display)


def make_evaluation_plan(composed: ComposedConfig, store: Tracking) -> Plan:
    """Makes the plan of an evaluation. Raises ConfigError as `make_one_process_plan` does."""
    config = resolve_config(composed.config)
    config["dataset"] = {**config["dataset"], "shards": 1}  # the run's, for its workers
    plan = make_one_process_plan(config, composed, "evaluations")
    if plan.training.batch_size == "auto":
        raise ConfigError("training.batch_size=auto: an evaluation needs a number, such as training.batch_size=32")
    return replace(plan, tracking=store)


def record_evaluation(tracker: Any, tracked: TrackedRun, events: Sequence[Event], display: Display) -> int:
    """Records the evaluation in the run and prints the metrics; returns the exit code."""
    ready = next(event for event in events if isinstance(event, EvaluationReady))
    dataset = next(event for event in events if isinstance(event, DatasetDescribed))
    split, resolved = ready.split, ready.resolved
    name = dataset.name.replace("/", "-") + ("" if split == "test" else f".{split}")
    profiles = [analyze_window(event) for event in events if isinstance(event, StepsProfiled)]
    text = (
        f"{ready.examples} examples of {split}, {resolved['strategy']}, {resolved['precision']}, "
        f"{resolved['replicas']} replica(s)"
    )
    rows = [*format_model_rows(tracked), ("on", text)]
    try:
        values: Mapping[str, float] = log_evaluation(
            tracker, tracked, name, events, f"{text}; {command_line(sys.orig_argv)}", profiles
        )
        error = None
    except Exception as failed:  # a store may raise anything
        values = {k: v for event in events if isinstance(event, MetricsLogged) for k, v in event.values.items()}
        error = str(failed).strip().partition("\n")[0] or type(failed).__name__
    described = {**answer_model(tracked), "name": name, "split": split}
    ANSWER.read = lambda: {**described, "examples": ready.examples, "metrics": values}
    rows += [(key, format_number(value)) for key, value in values.items()]
    rows += [("profile", profile.line) for profile in profiles]
    display.print_summary(rows)
    if error is not None:
        write_error(f"the metrics could not be recorded: {mask_secrets(error)}")
    return FINISHED if error is None else FAILED


if __name__ == "__main__":
    end_with(main)
