"""The event with the result of a trial."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaleflow.interfaces.events import TaskResult


class SettingFound(TaskResult, event="found"):
    """A trial has found the value of a key. Its measurements are in a CSV file."""

    key: str
    value: float
    reason: str  # why this value was chosen
    path: str

    @property
    def word(self) -> str:
        """The override to type."""
        return f"{self.key}={int(self.value) if float(self.value).is_integer() else self.value}"

    def list_tags(self) -> Mapping[str, str]:
        return {"scaleflow.found": self.word, "scaleflow.found.reason": self.reason}

    def describe(self) -> str:
        return f"Use `{self.word}`: {self.reason}."

    def list_rows(self) -> list[tuple[str, str]]:
        return [("use", self.word), ("because", self.reason)]

    def to_values(self) -> dict[str, Any]:
        return {"found": {"word": self.word, "reason": self.reason}}

    def find_table(self) -> str:
        return self.path

    def draw(self, table: Path) -> Path:
        from scaleflow.features.search.picture import draw_trial

        return draw_trial(table, self.word, self.value)
