"""Jobs that do not train: what a sweep does with them is tested without TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleflow.events import EVENTS, EventWriter
from scaleflow.interfaces import Plan
from scaleflow.launcher.supervisor import SweepContext
from scaleflow.sweep.ledger import flatten

CODES = {"FINISHED": 0, "FAILED": 1, "KILLED": 143, "REFUSED": 2}


class FakeLaunch:
    """In the place of `launch`: reports what a run would, and ends as it is told.

    Args:
        statuses: how each job ends, in the order in which they are launched; behind them all are FINISHED.
        measured: a plan's metrics.
    """

    def __init__(
        self, statuses: Sequence[str] = (), measured: Callable[[Plan], Mapping[str, float]] | None = None
    ) -> None:
        self._statuses = list(statuses)
        self._measured = measured or (lambda plan: {"val/loss": 1.0 / plan.training.epochs})
        self.plans: list[Plan] = []
        self.folders: list[Path] = []
        self.lives: list[int] = []
        self.withins: list[SweepContext] = []

    def __call__(
        self,
        plan: Plan,
        config: Any,
        overrides: Any,
        folder: Path,
        began: float,
        life: int,
        sweep_context: SweepContext,
    ) -> int:
        self.plans.append(plan)
        self.folders.append(folder)
        self.lives.append(life)
        self.withins.append(sweep_context)
        status = self._statuses.pop(0) if self._statuses else "FINISHED"
        if status == "REFUSED":
            return CODES[status]
        write = EventWriter(folder / EVENTS)
        params = {key: str(value) for key, value in flatten(plan.config).items()} | dict(plan.choices)
        params |= {"resolved.replicas": "1", "resolved.global_batch_size": "32", "resolved.cache": "none"}
        event = {
            "parent": str(sweep_context.parent),
            "name": "fake",
            "tags": {},
            "params": params,
            "began": 0,
            "steps": 1,
            "epochs": 1,
            "search": [],
        }
        write("ready", **event, **({"resumed": 0} if life else {}))
        sweep_context.on_event({"event": "ready", "time": 0, **event})
        values = dict(self._measured(plan))
        write("metrics", step=1, values=values)
        sweep_context.on_event({"event": "metrics", "time": 0, "step": 1, "values": values})
        status = "KILLED" if sweep_context.stop.is_set() else status
        write("end", status=status, **({"error": "it is told to"} if status == "FAILED" else {}))
        write.close()
        if life:
            (folder / f"resume-{life}.yaml").write_text("[]\n")
        else:
            from omegaconf import OmegaConf

            (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
        return CODES[status]
