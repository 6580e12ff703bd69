"""Runs scripts in a process of their own: as `python train.py` does, and as a worker of scaleflow does."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleflow.interfaces.events import Event, MetricsLogged


def record_script(words: Sequence[str], folder: str, stops_after: float | None = None) -> list[Event]:
    """Runs the words after `scaleflow`, whose first one is a script, in this process. Returns the events of the worker.

    `stops_after` is the number of seconds after which the run is asked to stop.
    """
    from scaleflow.commands.table import translate_file_word
    from scaleflow.config.compose import compose_config
    from scaleflow.launcher.prepare import make_plan, make_spec
    from scaleflow.worker.process import run_worker

    os.chdir(folder)
    run_folder = Path(folder, "run")
    run_folder.mkdir(exist_ok=True)
    typed = translate_file_word([*words[:1], "tracking=none", "hardware=cpu", *words[1:]])
    plan = make_plan(compose_config(typed))
    spec = make_spec(plan, run_folder, time.time(), ())
    events: list[Event] = []
    began = time.monotonic()

    def should_stop() -> bool:
        return stops_after is not None and time.monotonic() > began + stops_after

    run_worker(spec, events.append, should_stop)
    return events


class Interrupted(BaseException):
    """Ends a script after a batch, like a fault that it does not catch."""


def record_part(words: Sequence[str], folder: str, last_batch: int | None, attempt: int) -> tuple[list[Event], int]:
    """Runs a script until a batch of its fits, and saves its state after each batch.

    Args:
        words: the words after `scaleflow`; the first one is the script.
        folder: the current folder, which will have the folder of the run.
        last_batch: the number of the batch after which the script ends; None: it runs to its end.
        attempt: 0: the run begins; 1: it continues.

    Returns:
        The events, and the number of batches that were trained on.
    """
    from dataclasses import replace

    from scaleflow.commands.table import translate_file_word
    from scaleflow.config.compose import compose_config
    from scaleflow.features.script.fit_progress import FitProgress
    from scaleflow.launcher.prepare import make_plan, make_spec
    from scaleflow.runs import EventWriter
    from scaleflow.worker.process import run_worker

    os.chdir(folder)
    run_folder = Path(folder, "run")
    run_folder.mkdir(exist_ok=True)
    setting = ("tracking=none", "hardware=cpu", "checkpoint.every_seconds=0.000001")
    plan = make_plan(compose_config(translate_file_word([*words[:1], *setting, *words[1:]])))
    spec = replace(make_spec(plan, run_folder, time.time(), ()), attempt=attempt)
    events: list[Event] = []
    write = EventWriter(spec.events)
    batches = 0
    train = FitProgress.train_batch

    def emit(event: Event) -> None:
        write(event)
        events.append(event)

    def count_batch(progress: FitProgress, iterator: Any) -> Any:
        nonlocal batches
        logs = train(progress, iterator)
        batches += 1
        if batches == last_batch:
            raise Interrupted
        return logs

    FitProgress.train_batch = count_batch  # type: ignore[method-assign]
    run_worker(spec, emit, lambda: False)
    write.close()
    return events, batches


def run_plainly(script: str, folder: str) -> list[dict[str, list[float]]]:
    """Runs a script as Python does, in this process. Returns the histories of its calls of `fit`."""
    import keras

    os.chdir(folder)
    histories: list[dict[str, list[float]]] = []
    fit = keras.Model.fit

    def keep_history(model: Any, *arguments: Any, **named: Any) -> Any:
        history = fit(model, *arguments, **{**named, "verbose": 0})
        histories.append(flatten_history(history.history))
        return history

    keras.Model.fit = keep_history
    sys.path.insert(0, str(Path(script).absolute().parent))
    runpy.run_path(script, run_name="__main__")
    return histories


def flatten_history(history: Mapping[str, Sequence[Any]]) -> dict[str, list[float]]:
    """Returns a history of numbers. Each place of a vector is a metric of its own: `f1/0`."""
    import numpy as np

    columns: dict[str, list[float]] = {}
    for name, values in history.items():
        rows = np.asarray(values)
        if rows.ndim == 1:
            columns[name] = [float(value) for value in rows]
        else:
            for place in range(rows.shape[1]):
                columns[f"{name}/{place}"] = [float(value) for value in rows[:, place]]
    return columns


def read_points(events: Sequence[Event]) -> dict[str, list[tuple[int, float]]]:
    """Returns the (step, value) pairs of each metric."""
    points: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        if isinstance(event, MetricsLogged):
            for name, value in event.values.items():
                points.setdefault(name, []).append((event.step, value))
    return points


def join_histories(histories: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Returns the values of several fits under the names of metrics: `val_loss` is `val/loss`."""
    values: dict[str, list[float]] = {}
    for history in histories:
        for name, column in history.items():
            metric = f"val/{name.removeprefix('val_')}" if name.startswith("val_") else f"train/{name}"
            values.setdefault(metric, []).extend(column)
    return values
