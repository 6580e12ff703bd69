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

from scaleflow.command import leave, printable, refuse, split_overrides
from scaleflow.config.composing import Composed, plain
from scaleflow.config.explain import in_a_line, parsed
from scaleflow.config.plan import make_plan
from scaleflow.config.tracked import Words, again, store_named
from scaleflow.errors import Refusal, RunError
from scaleflow.events import Event, Reader, Writer
from scaleflow.interfaces import Plan, Tracking
from scaleflow.launcher.launch import Stop, stop_signals
from scaleflow.launcher.process import serving, started
from scaleflow.launcher.terminal import display_for
from scaleflow.masking import masked
from scaleflow.profiler import report
from scaleflow.provenance import command_line
from scaleflow.rerun import argument_parser, words_of
from scaleflow.tracking.past import Past, fetch_model, find, log_evaluation, place_opened, store_of
from scaleflow.worker.life import Job, work
from scaleflow.worker.measure import SPLITS, Measure

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
        words = words_of(parser, typed)
        split = parser.parse_intermixed_args(split_overrides(typed)).split
        store = store_of(store_named(words))
        tracker, past = find(words.run_id, store)
        place_opened(past, store)
        plan = planned(again(past.config, past.params, words, SECTIONS), store)
        with tempfile.TemporaryDirectory(prefix="scaleflow-evaluate-") as folder, stop_signals() as stop:
            model = fetch_model(tracker, past, store, Path(folder))
            measure = Measure(str(model), past.run_id, split, is_typed("precision", words))
            events = evaluated(Job(plan, Path(folder), began, measure=measure), stop)
            if stop.is_set():
                return 128 + (stop.signal or signal.SIGTERM)
            return recorded(tracker, past, plan, events)
    except Refusal as refusal:
        return refuse(str(refusal))
    except RunError as error:
        print(f"scaleflow: {masked(str(error))}", file=sys.stderr)
        return FAILED


def is_typed(key: str, words: Words) -> bool:
    return any(str(override.key_or_group).partition(".")[0] == key for override in parsed(words.overrides))


def planned(made: Composed, store: Tracking) -> Plan:
    """The plan of an evaluation: of one process.

    Raises:
        Refusal: where it asks for more.
    """
    try:
        config = plain(made.config)
    except OmegaConfBaseException as error:
        raise Refusal(in_a_line(error)) from error
    plan = make_plan(config, made.choices, made.search, look_outside=False)
    if plan.strategy.name not in STRATEGIES or plan.evaluator is not None:
        raise Refusal(
            f"strategy={plan.strategy.name}: an evaluation is one process's work; use {' or '.join(STRATEGIES[1:])}"
        )
    return replace(plan, tracking=store)


def evaluated(job: Job, stop: Stop) -> list[Event]:
    """What the worker tells, shown as it comes, until it has ended.

    Raises:
        Refusal: if what was asked can't work.
        RunError: if it failed.
    """
    display = display_for()
    reader = Reader(job.events)
    events: list[Event] = []

    def look() -> None:
        for event in reader.read():
            events.append(event)
            if event["event"] == "note":
                display.show(event)

    if job.plan.debug.inline:
        work(job, Writer(job.events), stop.is_set)
        look()
    else:
        with serving() as server, started([job], [{}], server) as (process,):
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
        raise (RunError if last.get("keep") else Refusal)(without_log(last["message"], job))
    return events


def without_log(message: str, job: Job) -> str:
    """A worker's message, where the log that it names is not kept."""
    return message.replace(f"; the traceback is in {job.log}", "")


def recorded(tracker: Any, past: Past, plan: Plan, events: Sequence[Event]) -> int:
    """Puts it into the run, and tells the user."""
    ready = next(event for event in events if event["event"] == "ready")
    told = next(event for event in events if event["event"] == "data")
    split, resolved = ready["split"], ready["resolved"]
    name = told["name"].replace("/", "-") + ("" if split == "test" else f".{split}")
    profiles = [report(event) for event in events if event["event"] == "profile"]
    how = (
        f"{ready['examples']} examples of {split}, {resolved['strategy']}, {resolved['precision']}, "
        f"{resolved['replicas']} replica(s)"
    )
    rows = [("run", f"{printable(past.name)}  ({past.run_id})"), ("model", f"models:/{past.model_id}"), ("on", how)]
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
    display_for().summary(rows)
    if error is not None:
        print(f"scaleflow: the store did not take it: {masked(error)}", file=sys.stderr)
    return FINISHED if error is None else FAILED


if __name__ == "__main__":
    leave(main())
