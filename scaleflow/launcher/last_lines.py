"""The last lines of a run: how it ended, its results, and where they are."""

from __future__ import annotations

import os
import shlex
import time

from scaleflow.config.words import quote_override
from scaleflow.interfaces import name_command
from scaleflow.interfaces.formatting import format_duration, format_number
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.recording.monitor import RunMonitor
from scaleflow.runs import RunSpec, RunState

#: The constant prediction whose metric the baseline is.
PREDICTIONS = {
    "accuracy": "always the most frequent class",
    "exact_match": "always the most frequent labels",
    "mae": "always the mean",
    "rmse": "always the mean",
}

NO_ANSWER = "it does not answer"


def finish_run(monitor: RunMonitor) -> None:
    """Waits for the recorder, and prints how the run ended and where its results are."""
    spec, state, recorder, display = monitor.spec, monitor.state, monitor.recorder, monitor.display
    folder = os.path.relpath(spec.folder)
    duration = format_duration(time.time() - spec.started)
    signals, patience = monitor.stop.times, spec.plan.tracking.flush_seconds
    if spec.plan.tracking.name != "none" and spec.records:
        display.begin_stage("recording the run in MLflow")
    is_recorded = recorder.finish(patience, lambda: monitor.stop.times > signals)
    if is_recorded:
        display.end_stage()
    display.close()
    if state.error:
        display.print_error(str(mask_secrets(state.error)))
    rows = [("status", f"{state.status} in {duration}")]
    rows += describe_results(spec, state) if spec.trial is None else describe_found(state)
    rows += [("profile", line) for line in recorder.profiles.values()]
    rows += [("output", folder)]
    rows += describe_continuation(state, folder)
    if is_recorded:
        rows += recorder.describe_links()
    display.print_summary(rows)
    if not is_recorded:
        display.print_error(
            f"the store has not received {'everything' if recorder.recorded else 'anything'} within "
            f"tracking.flush_seconds={patience:g}: {mask_secrets(recorder.reason or NO_ANSWER)}; nothing is lost; to "
            f"send the rest, run {name_command('sync')} {shlex.quote(folder)}"
        )


def describe_continuation(state: RunState, folder: str) -> list[tuple[str, str]]:
    """Returns rows with the newest checkpoint of a run that did not finish, and the command that continues from it."""
    if state.status == "FINISHED" or state.checkpoint is None:
        return []
    return [
        ("checkpoint", f"of step {state.checkpoint}"),
        ("go on", f"{name_command()} {quote_override('resume', folder)}"),
    ]


def describe_found(state: RunState) -> list[tuple[str, str]]:
    """Returns rows with what a trial has found."""
    return [] if state.found is None else [("use", state.found.word), ("because", state.found.reason)]


def describe_results(spec: RunSpec, state: RunState) -> list[tuple[str, str]]:
    """Returns rows with the last metrics of the run, each beside the baselines, which jobs of a sweep leave out."""
    known = RunState.read(spec.folder) if spec.is_resumed else state
    baseline = {} if spec.parent else known.baseline
    rows = []
    for name, value in state.results.items():
        reference, metric = baseline.get(name), name.rpartition("/")[2]
        why = f": {PREDICTIONS[metric]}" if metric in PREDICTIONS else ""
        parts = [] if reference is None else [f"baseline {format_number(reference)}{why}"]
        parts += [f"{model} {format_number(each)}" for model, each in known.find_fitted_baselines(name).items()]
        beside = f" ({'; '.join(parts)})" if parts else ""
        rows.append((name.replace("/", " "), format_number(value) + beside))
    return rows
