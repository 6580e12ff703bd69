"""Writes a run's events to a TensorBoard event file, in the launcher, without TensorFlow.

A resumed run replaces the file, so it never contains a point twice. `events.jsonl` still has all earlier events.
"""

import importlib.util
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.interfaces.events import Event, MetricsLogged, WeightHistograms


def check_tensorboard(wanted: bool) -> None:
    """Raises ConfigError if `tracking.tensorboard` is set and the package tensorboard is not installed."""
    if wanted and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "tracking.tensorboard=true: tensorboard is not installed; pip install 'scaleflow[tensorboard]', "
            "or leave it false"
        )


class TensorBoardWriter:
    """Writes one event file to a run's folder `tensorboard`.

    It creates the file with the first event, and then deletes older event files of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records: Any = None

    def write_events(self, events: Iterable[Event]) -> None:
        """Writes the events that TensorBoard can show: metrics, and histograms of weights."""
        for event in events:
            if isinstance(event, MetricsLogged) and event.values:
                self._write(event, [{"tag": key, "simple_value": value} for key, value in event.values.items()])
            elif isinstance(event, WeightHistograms):
                self._write(
                    event, [{"tag": key, "histo": to_tensorboard_histogram(bins)} for key, bins in event.values.items()]
                )
        if self._records is not None:
            self._records.flush()

    def close(self) -> None:
        if self._records is not None:
            self._records.close()
            self._records = None

    def _write(self, event: MetricsLogged | WeightHistograms, values: list[dict[str, Any]]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._records is None:
            self._records = open_event_file(self.folder)
        record = Record(wall_time=event.time / 1000, step=event.step)
        record.summary.CopyFrom(Summary(value=[Summary.Value(**value) for value in values]))
        self._records.write(record.SerializeToString())


def open_event_file(folder: Path) -> Any:
    """Deletes the event files in a folder and opens a new one."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(exist_ok=True)
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    file = folder / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
    records = RecordWriter(file.open("wb"))
    records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
    return records


def to_tensorboard_histogram(histogram: Mapping[str, Any]) -> Any:
    """Converts a worker's histogram to TensorBoard's message. `limits` are the upper limits of the buckets."""
    from tensorboard.compat.proto.histogram_pb2 import HistogramProto

    return HistogramProto(
        min=histogram["min"],
        max=histogram["max"],
        num=sum(histogram["counts"]),
        sum=histogram["sum"],
        sum_squares=histogram["sum_squares"],
        bucket_limit=histogram["limits"],
        bucket=histogram["counts"],
    )
