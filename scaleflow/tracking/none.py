"""Implements `tracking=none`: no store, a run's reports stay in its folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Point, Status
from scaleflow.interfaces.events import DatasetDescribed


class NoTracker:
    """A tracker that ignores every call; config.yaml and events.jsonl hold the same data."""

    run_id: str | None = None
    adopted: str | None = None
    uri: str | None = None
    model_uri: str | None = None

    def connect(self) -> None: ...

    def check_experiment(self) -> None: ...

    def find_folder(self, run_id: str) -> str:
        raise ConfigError(f"tracking=none: there is no store with the run {run_id}")

    def adopt(self, run_id: str) -> None: ...

    def reopen(self) -> None: ...

    def start(self, name: str, tags: Mapping[str, str], began: int) -> None: ...

    def log_params(self, values: Mapping[str, str]) -> None: ...

    def log_metrics(self, points: Sequence[Point]) -> None: ...

    def set_tags(self, values: Mapping[str, str]) -> None: ...

    def describe(self, text: str) -> None: ...

    def log_artifact(self, path: Path, folder: str | None) -> None: ...

    def log_dataset(self, data: DatasetDescribed) -> None: ...

    def log_model(self, path: Path, step: int) -> None: ...

    def finish(self, status: Status, ended: int) -> None: ...

    def describe_links(self) -> Sequence[tuple[str, str]]:
        return ()
