"""What a job's events tell of it: read from its folder, so that jobs of an earlier command count alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from scaleflow.events import EVENTS, EventReader
from scaleflow.launcher.recorder import STATE, read_recorder_state

RATE = "perf/examples_per_second"


@dataclass
class RunSummary:
    """What is known of a run by its folder.

    Attributes:
        is_ready: whether there is a run: all was built once.
        status: FINISHED, FAILED or KILLED; empty where it has not ended.
        error: why it failed, in a line.
        params: as they were recorded.
        last: each metric's last value.
        curves: of each metric the (step, value) pairs.
        epoch_steps: the steps of the first epoch; None where it has not ended.
        run_id: in the store; None where it is not recorded.
    """

    is_ready: bool = False
    status: str = ""
    error: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    epoch_steps: int | None = None
    run_id: str | None = None

    @classmethod
    def read(cls, folder: Path) -> RunSummary:
        summary = cls(run_id=read_recorder_state(folder / STATE).get("run_id"))
        for event in EventReader(folder / EVENTS).read():
            getattr(summary, f"_{event['event']}", summary._ignore)(event)
        return summary

    def _ignore(self, event: Mapping[str, Any]) -> None:
        pass

    def _ready(self, event: Mapping[str, Any]) -> None:
        self.is_ready = True
        self.status = self.error = ""
        self.params = self.params or event["params"]

    def _metrics(self, event: Mapping[str, Any]) -> None:
        self.last.update(event["values"])
        for key, value in event["values"].items():
            self.curves.setdefault(key, []).append((event["step"], value))

    def _epoch(self, event: Mapping[str, Any]) -> None:
        self.epoch_steps = self.epoch_steps or event["step"]

    def _end(self, event: Mapping[str, Any]) -> None:
        self.status, self.error = event["status"], event.get("error", "")

    def _refused(self, event: Mapping[str, Any]) -> None:
        self.error = event["message"]

    @property
    def rate(self) -> float | None:
        """Examples a second: the median of the epochs behind the first, in which all is warmed up."""
        rates = [value for _, value in self.curves.get(RATE, ())]
        return median(rates[1:] or rates) if rates else None

    @property
    def results(self) -> dict[str, float]:
        """The metrics that tell how good it is: of the test, or else the last validation's, or training's."""
        for prefix in ("test/", "val/", "train/"):
            found = {key: value for key, value in self.last.items() if key.startswith(prefix)}
            if found:
                return found
        return {}
