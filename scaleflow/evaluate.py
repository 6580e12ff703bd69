"""A tracked model on a dataset, its metrics into that run.

    python -m scaleflow.evaluate RUN_ID                          # on the test split of what it was trained on
    python -m scaleflow.evaluate RUN_ID dataset=csv dataset.data_dir=new.csv dataset.target=price
    python -m scaleflow.evaluate RUN_ID --split validation strategy=mirrored precision=mixed
    python -m scaleflow.evaluate RUN_ID profiler=trace            # and where the time of a batch goes

The metrics are evaluate/DATASET/loss and so on, at the step that the model was logged at; of another split than the
test split evaluate/DATASET.SPLIT/loss. The dataset is an input of the run. The steps of a profile are batches of the
split, which is gone through as often as they need; it goes to evaluate/DATASET/profile/. Strategy and hardware are this
command's; the dataset, the precision and the seed are the run's unless they are typed. The run is looked for in
`tracking.uri=...`, else MLFLOW_TRACKING_URI, else sqlite:///mlflow.db.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from scaleflow.command import exit_process, refuse, split_overrides, to_printable
from scaleflow.config.compose import ComposedConfig, to_plain
from scaleflow.config.from_mlflow import RerunCommand, find_store_options, reuse_config
from scaleflow.config.hydra_errors import parse_overrides, shorten_error
from scaleflow.config.plan import make_plan
from scaleflow.errors import ConfigError, RunError
from scaleflow.events import Event, EventReader, EventWriter
from scaleflow.interfaces import Plan, Tracking
from scaleflow.launcher.display import display_for
from scaleflow.launcher.supervisor import StopRequest, catch_stop_signals
from scaleflow.launcher.worker_process import start_fork_server, start_workers
from scaleflow.profiler import analyze_window
from scaleflow.provenance import command_line
from scaleflow.rerun import argument_parser, parse_command
from scaleflow.secret_masking import mask_secrets
from scaleflow.tracking.tracked_runs import (
    TrackedRun,
    choose_store,
    describe_opened_run,
    download_model,
    find_run,
    log_evaluation,
)
from scaleflow.worker.evaluate import SPLITS, EvaluationSpec
from scaleflow.worker.main import RunSpec, run_worker

#: Of a tracked config what an evaluation goes by.
SECTIONS = ("dataset", "precision", "seed")

STRATEGIES = ("auto", "one_device", "mirrored")

POLL_SECONDS = 0.1

FINISHED, FAILED = 0, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 it is in the run, 1 it failed, 2 refused, 130 or 143 interrupted.
    """
    began = time.time()
    parser = argument_parser("scaleflow.evaluate", __doc__)
    parser.add_argument("--split", choices=SPLITS, help="which part of the dataset; the test split, where there is one")
    typed = list(sys.argv[1:] if argv is None else argv)
    try:
        words = parse_command(parser, typed)
        split = parser.parse_intermixed_args(split_overrides(typed)).split
        store = choose_store(find_store_options(words))
        tracker, past = find_run(words.run_id, store)
        describe_opened_run(past, store)
        plan = make_evaluation_plan(reuse_config(past.config, past.params, words, SECTIONS), store)
        with tempfile.TemporaryDirectory(prefix="scaleflow-evaluate-") as folder, catch_stop_signals() as stop:
            model = download_model(tracker, past, store, Path(folder))
            evaluation = EvaluationSpec(str(model), past.run_id, split, is_typed("precision", words))
            events = run_evaluation(RunSpec(plan, Path(folder), began, measure=evaluation), stop)
            if stop.is_set():
                return 128 + (stop.signal or signal.SIGTERM)
            return record_evaluation(tracker, past, plan, events)
    except ConfigError as refusal:
        return refuse(str(refusal))
    except RunError as error:
        print(f"scaleflow: {mask_secrets(str(error))}", file=sys.stderr)
        return FAILED


def is_typed(key: str, words: RerunCommand) -> bool:
    return any(str(override.key_or_group).partition(".")[0] == key for override in parse_overrides(words.overrides))


def make_evaluation_plan(made: ComposedConfig, store: Tracking) -> Plan:
    """The plan of an evaluation: of one process.

    Raises:
        ConfigError: where it asks for more.
    """
    try:
        config = to_plain(made.config)
    except OmegaConfBaseException as error:
        raise ConfigError(shorten_error(error)) from error
    plan = make_plan(config, made.choices, made.search, look_outside=False)
    if plan.strategy.name not in STRATEGIES or plan.evaluator is not None:
        raise ConfigError(
            f"strategy={plan.strategy.name}: an evaluation is one process's work; use {' or '.join(STRATEGIES[1:])}"
        )
    return replace(plan, tracking=store)


def run_evaluation(spec: RunSpec, stop: StopRequest) -> list[Event]:
    """What the worker tells, shown as it comes, until it has ended.

    Raises:
        ConfigError: if what was asked can't work.
        RunError: if it failed.
    """
    display = display_for()
    reader = EventReader(spec.events)
    events: list[Event] = []

    def look() -> None:
        for event in reader.read():
            events.append(event)
            if event["event"] == "note":
                display.show_event(event)

    if spec.plan.debug.inline:
        run_worker(spec, EventWriter(spec.events), stop.is_set)
        look()
    else:
        with start_fork_server() as server, start_workers([spec], [{}], server) as (process,):
            while process.is_alive and not stop.is_set():
                process.wait(POLL_SECONDS)
                look()
            look()
            if stop.is_set():
                return events
            if not events or events[-1]["event"] not in ("end", "refused"):
                raise RunError(process.reason()[0])
    last = events[-1]
    if last["event"] == "refused":
        raise (RunError if last.get("keep") else ConfigError)(drop_log_hint(last["message"], spec))
    return events


def drop_log_hint(message: str, spec: RunSpec) -> str:
    """A worker's message, where the log that it names is not kept."""
    return message.replace(f"; the traceback is in {spec.log}", "")


def record_evaluation(tracker: Any, past: TrackedRun, plan: Plan, events: Sequence[Event]) -> int:
    """Puts it into the run, and tells the user."""
    ready = next(event for event in events if event["event"] == "ready")
    told = next(event for event in events if event["event"] == "data")
    split, resolved = ready["split"], ready["resolved"]
    name = told["name"].replace("/", "-") + ("" if split == "test" else f".{split}")
    profiles = [analyze_window(event) for event in events if event["event"] == "profile"]
    how = (
        f"{ready['examples']} examples of {split}, {resolved['strategy']}, {resolved['precision']}, "
        f"{resolved['replicas']} replica(s)"
    )
    rows = [("run", f"{to_printable(past.name)}  ({past.run_id})"), ("model", f"models:/{past.model_id}"), ("on", how)]
    try:
        values: Mapping[str, float] = log_evaluation(
            tracker, past, name, events, f"{how}; {command_line(sys.orig_argv)}", profiles
        )
        error = None
    except Exception as failed:  # whatever a store may raise
        values = {k: v for event in events if event["event"] == "metrics" for k, v in event["values"].items()}
        error = str(failed).strip().partition("\n")[0] or type(failed).__name__
    rows += [(key, f"{value:.4f}") for key, value in values.items()]
    rows += [("profile", profile.line) for profile in profiles]
    display_for().print_summary(rows)
    if error is not None:
        print(f"scaleflow: the store did not take it: {mask_secrets(error)}", file=sys.stderr)
    return FINISHED if error is None else FAILED


if __name__ == "__main__":
    exit_process(main())
