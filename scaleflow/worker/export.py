"""Exports the trained model to the run's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.config.plan import set_values
from scaleflow.errors import ConfigError, RunError
from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import (
    ArtifactWritten,
    Emit,
    Event,
    FaultReported,
    FormatExported,
    MetricsLogged,
    Note,
    PhaseBegan,
    RunEnded,
    RunRefused,
)
from scaleflow.runs import EventReader, RunSpec, Task, WorkerProcess

if TYPE_CHECKING:
    from scaleflow.worker.trainer import Trainer

#: Seconds between two looks at the process that converts a model.
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class ConvertModel(Task):
    """Exports a model in further formats."""

    model: str  # the folder of the exported model, to which the formats are added
    formats: Sequence[str]  # of `export.formats`
    is_trial: bool = False  # whether it is only tried with a few examples, before the training

    def run(self, process: WorkerProcess) -> None:
        from scaleflow.worker.convert import convert_to_formats

        convert_to_formats(process.spec.plan, Path(self.model), self.formats, self.is_trial, emit=process.emit)
        process.emit(RunEnded("FINISHED"))


def export_model(trainer: Trainer) -> str:
    """Exports the model, and returns the digest of its weights.

    All workers must call it, because reading some variables needs all of them. Only the chief keeps the files. Raises
    RunError if the files cannot be written.
    """
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as temporary:
        folder = trainer.spec.files.model if trainer.spec.worker == 0 else Path(temporary)
        try:
            return trainer.setup.export(folder)
        except (OSError, tf.errors.OpError) as error:
            if isinstance(error, tf.errors.ResourceExhaustedError) and "OOM" in str(error):
                raise  # the memory of the device is full, not the disk
            reason = getattr(error, "strerror", None) or str(getattr(error, "message", None) or error)
            raise RunError(f"the model could not be exported to {folder}: {reason.splitlines()[0]}") from error


def try_formats(trainer: Trainer) -> None:
    """Exports the untrained model in the formats of a new run, with two examples. All workers must call it.

    Raises ConfigError if a format cannot express the model: nothing has been trained then.
    """
    spec = trainer.spec
    if not spec.plan.export.formats or spec.is_resumed:
        return
    with tempfile.TemporaryDirectory(prefix="scaleflow-formats-") as folder:
        trainer.setup.export(Path(folder), True)
        found = []
        if spec.records:
            found = export_formats(
                spec.plan, Path(folder), trainer.emit, log=spec.log, should_stop=trainer.should_stop, is_trial=True
            )
    for each in found:
        if each.error:
            others = [other.name for other in found if not other.error]
            rest = f"[{', '.join(others)}]" if others else "null"
            raise ConfigError(f"export.formats: {each.name}: {each.error}; use export.formats={rest}")


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

    If the process is killed, as by a fault in a converter, the format fails, and another process does the others.

    Args:
        log: the file that gets the output of the process, too.
        should_stop: returns True to leave the rest out.
        is_trial: whether the model is not trained yet.

    Raises ConfigError if the data of the run cannot be read.
    """
    found: dict[str, FormatExported] = {}
    names = list(plan.export.formats or ())
    while remaining := [name for name in names if name not in found]:
        task = ConvertModel(str(exported), remaining, is_trial)
        error = "stopped"
        for event in run_conversion(plan, task, log=log, should_stop=should_stop):
            if isinstance(event, FormatExported):
                found[event.name] = event
            elif isinstance(event, PhaseBegan | Note):
                emit(event)
            elif isinstance(event, RunRefused):
                raise ConfigError(event.message)
            elif isinstance(event, FaultReported):
                error = event.error
        if missing := next((name for name in remaining if name not in found), None):
            found[missing] = FormatExported(missing, "", error=error)
    return [found[name] for name in names]


def run_conversion(plan: Plan, task: ConvertModel, log: Path, should_stop: Callable[[], bool]) -> Iterator[Event]:
    """Converts a model in another process, and yields the events of that process as they come.

    If `should_stop` says so, the process is killed. If it ends without an event `end` or `refused`, the last event says
    how it ended. Its output is added to the file `log`.
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
            process.stdin.flush()  # it stays open: the process ends when this one does
            reader, last = EventReader(child.events), None
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
    """Returns the plan of a process that converts a model, on the CPU of this machine."""
    none = dict.fromkeys(("hardware.tpu", "hardware.devices", "hardware.memory_limit_mb", "dataset.augment"))
    one: dict[str, Any] = {"hardware.logical_devices": 1, "dataset.shards": 1, "training.accumulate": 1}
    cpu: dict[str, Any] = {"strategy": {"name": "one_device"}, "hardware.name": "cpu", "hardware.remat": False}
    batch = {"training.global_batch_size": None, "training.batch_size": 32}
    alone = set_values(plan, {**none, **one, **cpu, **batch, "cluster": {}, "profiler": {}})
    return replace(alone, task=None, tf_config=None, resume=None)


def report_formats(trainer: Trainer, step: int) -> None:
    """Exports the formats of the trained model, reports them and their metrics, and writes their table."""
    spec = trainer.spec
    emit = trainer.emit
    try:
        formats = export_formats(spec.plan, spec.files.model, emit, log=spec.log, should_stop=trainer.should_stop)
    except ConfigError as error:  # the data is gone; the trained model stays
        formats = [FormatExported(name, "", error=str(error)) for name in spec.plan.export.formats or ()]
    for each in formats:
        emit(each)
        if each.values:
            emit(MetricsLogged(step, {f"export/{each.name}/{key}": value for key, value in each.values.items()}))
    spec.files.formats.write_text(json.dumps(make_format_table(formats), indent=1))
    emit(ArtifactWritten(str(spec.files.formats), "export"))


def make_format_table(formats: Sequence[FormatExported]) -> dict[str, list[object]]:
    """Returns a table as MLflow's UI shows it: the names of the columns, and rows."""
    keys = list(dict.fromkeys(key for each in formats for key in each.values))
    rows = [[each.name, each.error or "good", *(each.values.get(key) for key in keys), each.split] for each in formats]
    return {"columns": ["format", "result", *keys, "split"], "data": list(rows)}
