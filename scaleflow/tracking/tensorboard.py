"""TensorBoard as a second place to look: a run's events as an event file, written by the launcher without TensorFlow.

Everything is in `events.jsonl`, so that a run that goes on writes the file anew, and nothing is in it twice.
"""

from __future__ import annotations

import importlib.util
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError

FOLDER = "tensorboard"


def check_tensorboard(wanted: bool) -> None:
    """Refuses what takes a package that is not there, before anything is started."""
    if wanted and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "tracking.tensorboard=true: tensorboard is not installed; pip install 'scaleflow[tensorboard]', "
            "or leave it false"
        )


class TensorBoardWriter:
    """Writes one event file; opens it with the first event.

    Args:
        folder: the run's `tensorboard`; event files that are there already are of the same run, and go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records: Any = None

    def write_events(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Writes what of the events TensorBoard shows: metrics, and the distribution of weights."""
        for event in events:
            if event["event"] == "metrics" and event["values"]:
                self._write(event, [{"tag": key, "simple_value": value} for key, value in event["values"].items()])
            elif event["event"] == "weights":
                self._write(
                    event,
                    [{"tag": key, "histo": to_tensorboard_histogram(found)} for key, found in event["values"].items()],
                )
        if self._records is not None:
            self._records.flush()

    def close(self) -> None:
        if self._records is not None:
            self._records.close()
            self._records = None

    def _write(self, event: Mapping[str, Any], values: list[dict[str, Any]]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._records is None:
            self._records = open_event_file(self.folder)
        told = Event(wall_time=event["time"] / 1000, step=event["step"])
        told.summary.CopyFrom(Summary(value=[Summary.Value(**value) for value in values]))
        self._records.write(told.SerializeToString())


def open_event_file(folder: Path) -> Any:
    """A new event file in a folder that has no other."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(exist_ok=True)
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    file = folder / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
    records = RecordWriter(file.open("wb"))
    records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
    return records


def to_tensorboard_histogram(found: Mapping[str, Any]) -> Any:
    """TensorBoard's form of what a worker counted: `limits` are the upper ends of the buckets."""
    from tensorboard.compat.proto.histogram_pb2 import HistogramProto

    return HistogramProto(
        min=found["min"],
        max=found["max"],
        num=sum(found["counts"]),
        sum=found["sum"],
        sum_squares=found["sum_squares"],
        bucket_limit=found["limits"],
        bucket=found["counts"],
    )
