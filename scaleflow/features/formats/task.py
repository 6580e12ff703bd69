"""Exports a model in further formats, in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scaleflow.config.feature_sections import list_feature_defaults
from scaleflow.config.plan import set_values
from scaleflow.errors import ConfigError
from scaleflow.features.formats.events import FormatExported
from scaleflow.features.formats.feature import ExportOptions
from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import (
    Emit,
    Event,
    FaultReported,
    Note,
    PhaseBegan,
    RunEnded,
    RunRefused,
)
from scaleflow.runs import EventReader, RunSpec, Task, WorkerProcess

#: Seconds between two checks of the converting process.
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class ConvertModel(Task):
    """Exports a model in further formats."""

    model: str  # folder of the exported model; gets the formats
    formats: Sequence[str]  # names from `export.formats`
    is_trial: bool = False  # whether this is a trial with a few examples before training

    def run(self, process: WorkerProcess) -> None:
        from scaleflow.features.formats.converter import convert_to_formats

        convert_to_formats(process.spec.plan, Path(self.model), self.formats, self.is_trial, emit=process.emit)
        process.emit(RunEnded("FINISHED"))


def export_formats(
    plan: Plan,
    exported: Path,
    emit: Emit,
    *,
    log: Path,
    should_stop: Callable[[], bool] = bool,
    is_trial: bool = False,
) -> list[FormatExported]:
    """Exports the model of a folder in the formats of the plan, in a process without the run's devices.

    If the process dies, as after a fault in a converter, the current format fails and a new process makes the others.

    Args:
        log: file that the output of the process is added to.
        should_stop: returns True to skip the remaining formats.
        is_trial: whether the model is untrained.

    Raises ConfigError if the run's data cannot be read.
    """
    results: dict[str, FormatExported] = {}
    names = list(plan.of(ExportOptions).formats or ())
    while remaining := [name for name in names if name not in results]:
        task = ConvertModel(str(exported), remaining, is_trial)
        error = "stopped"
        for event in run_conversion(plan, task, log=log, should_stop=should_stop):
            if isinstance(event, FormatExported):
                results[event.name] = event
            elif isinstance(event, PhaseBegan | Note):
                emit(event)
            elif isinstance(event, RunRefused):
                raise ConfigError(event.message)
            elif isinstance(event, FaultReported):
                error = event.error
        missing = next((name for name in remaining if name not in results), None)
        if missing:
            results[missing] = FormatExported(missing, "", error=error)
    return [results[name] for name in names]


def run_conversion(plan: Plan, task: ConvertModel, log: Path, should_stop: Callable[[], bool]) -> Iterator[Event]:
    """Converts a model in another process and yields that process's events as they arrive.

    If `should_stop` returns True, the process is killed. If it ends without an event `end` or `refused`, the last event
    has its exit code. Its output is added to the file `log`.
    """
    with tempfile.TemporaryDirectory(prefix="scaleflow-convert-") as temporary:
        child = RunSpec(make_conversion_plan(plan), Path(temporary), time.time(), task)
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        own_log = Path(temporary, "log")
        with own_log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "scaleflow.worker.main"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=variables,
            )
        assert process.stdin is not None
        try:
            process.stdin.write(child.to_line(os.environ))
            process.stdin.flush()  # stays open: if this process ends, the other one ends
            reader = EventReader(child.events)
            last = None
            is_over = False
            while not is_over:
                is_over = process.poll() is not None
                for event in reader.read():
                    last = event
                    yield event
                if should_stop():
                    return
                time.sleep(0.0 if is_over else POLL_SECONDS)
            with log.open("ab") as output:
                output.write(own_log.read_bytes())
            if not isinstance(last, RunEnded | RunRefused):
                yield FaultReported(f"its converter ended with exit code {process.returncode}")
        finally:
            process.stdin.close()
            if process.poll() is None:
                process.kill()
            process.wait()


def make_conversion_plan(plan: Plan) -> Plan:
    """Returns the plan of the converting process, on the CPU of this machine."""
    none = dict.fromkeys(("hardware.tpu", "hardware.devices", "hardware.memory_limit_mb"))
    one: dict[str, Any] = {"hardware.logical_devices": 1, "dataset.shards": 1, "training.accumulate": 1}
    cpu: dict[str, Any] = {"strategy": {"name": "one_device"}, "hardware.name": "cpu", "hardware.remat": False}
    batch = {"training.global_batch_size": None, "training.batch_size": 32}
    # The run already reported what features do with the training examples, so they are at their defaults here.
    data = list_feature_defaults("dataset")
    alone = set_values(plan, {**none, **one, **cpu, **batch, **data, "cluster": {}, "profiler": {}})
    return replace(alone, task=None, tf_config=None, resume=None)


def make_format_table(formats: Sequence[FormatExported]) -> dict[str, list[object]]:
    """Returns a table for MLflow's UI: column names and rows."""
    keys: dict[str, None] = {}
    for exported in formats:
        keys |= dict.fromkeys(exported.values)
    rows: list[object] = []
    for exported in formats:
        values = [exported.values.get(key) for key in keys]
        rows.append([exported.name, exported.error or "good", *values, exported.split])
    return {"columns": ["format", "result", *keys, "split"], "data": rows}
