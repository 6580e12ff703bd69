"""Ends a run: does the command's work after it, and prints the last lines.

The lines contain how the run ended, its results, and where they are.
"""

import os
import shlex
import time
from typing import Protocol

from scaleflow.config.words import quote_override
from scaleflow.interfaces import name_command
from scaleflow.interfaces.clock import measure_since
from scaleflow.interfaces.extras import guard_extra
from scaleflow.interfaces.features import import_named, list_features
from scaleflow.interfaces.formatting import format_duration, format_number, format_with_interval
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.recording.monitor import RunMonitor
from scaleflow.runs import RunSpec, RunState


class EndTask(Protocol):
    """Work of a command after the end of its run. It cannot change how the run ended.

    A feature declares its end task. The launcher calls `run` if the plan uses the feature.
    """

    def run(self, monitor: RunMonitor, is_recorded: bool) -> list[tuple[str, str]]:
        """Does the work if this run needs it. Returns rows for the last lines.

        `is_recorded` is whether the store has the complete run.
        """


#: The constant predictions, by the metric for which they are the baseline.
PREDICTIONS = {
    "accuracy": "always the most frequent class",
    "exact_match": "always the most frequent labels",
    "mae": "always the mean",
    "rmse": "always the mean",
}

NO_ANSWER = "it does not answer"


def run_end_tasks(monitor: RunMonitor, is_recorded: bool) -> list[tuple[str, str]]:
    """Runs the end tasks of the features that a run's plan uses. Returns rows for the last lines.

    An error in a task becomes a note with the feature's name.
    """

    def print_note(text: str) -> None:
        monitor.display.print_line(f"note: {text}", "yellow")

    rows: list[tuple[str, str]] = []
    for feature in list_features().values():
        if not feature.end_task or not feature.is_used_by(monitor.spec.plan):
            continue
        with guard_extra(f"the feature {feature.name}", print_note):
            task: EndTask = import_named(feature.end_task)()
            rows += [(str(label), str(text)) for label, text in task.run(monitor, is_recorded)]
    return rows


def finish_run(monitor: RunMonitor) -> None:
    """Waits for the recorder, runs the end tasks, and prints how the run ended and where its results are."""
    spec = monitor.spec
    state = monitor.state
    recorder = monitor.recorder
    display = monitor.display
    folder = os.path.relpath(spec.folder)
    duration = format_duration(measure_since(spec.started))
    signals = monitor.stop.times
    patience = spec.plan.tracking.flush_seconds
    if spec.plan.tracking.name != "none" and spec.records:
        display.begin_phase("recording the run in MLflow")
    waiting_since = time.monotonic()
    is_recorded = recorder.finish(patience, lambda: monitor.stop.times > signals)
    seconds = time.monotonic() - waiting_since
    monitor.read_reports()
    done = run_end_tasks(monitor, is_recorded)
    if is_recorded:
        display.end_phase()
    display.close()
    if state.error:
        display.print_error(str(mask_secrets(state.error)))
    rows = [("status", f"{state.status} in {duration}")]
    with guard_extra("note: the results in the last lines", display.print_error):
        rows += list_results(monitor)
    rows += [("output", folder)]
    rows += describe_continuation(state, folder)
    if monitor.restart_advice:
        rows += [("restarts", monitor.restart_advice)]
    if is_recorded:
        rows += recorder.transfer.tracker.describe_links()
    rows += done
    display.print_summary(rows)
    if not is_recorded:
        how_long = describe_wait(seconds, patience, is_interrupted=monitor.stop.times > signals)
        display.print_error(
            f"the store has not received {'everything' if recorder.recorded else 'anything'}{how_long}: "
            f"{mask_secrets(recorder.reason or NO_ANSWER)}; nothing is lost; to send the rest, run "
            f"{name_command('sync')} {shlex.quote(folder)}"
        )


def list_results(monitor: RunMonitor) -> list[tuple[str, str]]:
    """Returns rows with the results of a run, including the features' rows."""
    spec = monitor.spec
    state = monitor.state
    rows: list[tuple[str, str]] = []
    if spec.task.trains:
        rows += describe_results(spec, state)
    elif state.result is not None:
        rows += state.result.list_rows()
    if state.status == "FINISHED" and monitor.hooks is not None:
        rows += monitor.hooks.describe_end()
    for variant in state.model.variants.values():
        rows += variant.list_rows()
    rows += [("profile", line) for line in state.annotations.profiles.values()]
    return rows


def describe_wait(seconds: float, patience: float, is_interrupted: bool) -> str:
    """Describes how long the command waited for the store; empty if the store refused at once."""
    if is_interrupted:
        return f" in {format_duration(seconds)}, when a signal ended the wait"
    return f" within tracking.flush_seconds={patience:g}" if seconds >= patience else ""


def describe_continuation(state: RunState, folder: str) -> list[tuple[str, str]]:
    """Returns rows with the newest checkpoint of an unfinished run, and the command that continues from it."""
    if state.status == "FINISHED" or state.checkpoint is None:
        return []
    return [
        ("checkpoint", f"of step {state.checkpoint}"),
        ("go on", f"{name_command()} {quote_override('resume', folder)}"),
    ]


def describe_results(spec: RunSpec, state: RunState) -> list[tuple[str, str]]:
    """Returns rows with the run's last metrics and their baselines. Jobs of a sweep leave out the baselines."""
    known = RunState.read(spec.folder) if spec.is_resumed else state
    baseline = {} if spec.parent else known.baseline
    rows = []
    middle = "median" if spec.plan.objective.levels else "mean"
    shown = known if state.status == "FINISHED" else state  # a resumed run does not repeat values that it has recorded
    for name in shown.results:
        reference = baseline.get(name)
        metric = name.rpartition("/")[2]
        why = f": {PREDICTIONS[metric]}".replace("mean", middle) if metric in PREDICTIONS else ""
        parts = [] if reference is None else [f"baseline {format_number(reference)}{why}"]
        fitted = [f"{model} {format_number(value)}" for model, value in known.find_fitted_baselines(name).items()]
        if fitted and known.fitted_rows:
            which = "both of" if len(fitted) == 2 else "of"
            fitted[-1] += f", {which} {known.fitted_rows:,} training rows"
        parts += fitted
        rows.append((name.replace("/", " "), format_with_interval(shown.metrics, name, "; ".join(parts))))
    return rows
