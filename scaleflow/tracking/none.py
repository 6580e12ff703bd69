"""No store: what a run reports stays in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Point, Status


class NoTracker:
    """Takes everything and keeps nothing."""

    run_id: str | None = None
    adopted: str | None = None
    uri: str | None = None

    def connect(self) -> None:
        """Nothing to open."""

    def find_folder(self, run_id: str) -> str:
        raise ConfigError(f"tracking=none: knows no run {run_id}")

    def adopt(self, run_id: str) -> None:
        """No run."""

    def reopen(self) -> None:
        """No run."""

    def start(self, name: str, tags: Mapping[str, str], began: int) -> None:
        """No run."""

    def log_params(self, values: Mapping[str, str]) -> None:
        """Not kept; config.yaml has them."""

    def log_metrics(self, points: Sequence[Point]) -> None:
        """Not kept; events.jsonl has them."""

    def set_tags(self, values: Mapping[str, str]) -> None:
        """Not kept."""

    def log_artifact(self, path: Path, folder: str | None) -> None:
        """Stays where it is."""

    def log_dataset(self, told: Mapping[str, Any]) -> None:
        """Not kept; events.jsonl has it."""

    def log_model(self, path: Path, step: int) -> None:
        """Stays where it is."""

    def finish(self, status: Status, ended: int) -> None:
        """Nothing to end."""

    def describe_links(self) -> Sequence[tuple[str, str]]:
        return ()
