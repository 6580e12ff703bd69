"""The event about the model in a format of `export.formats`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from scaleflow.interfaces.events import MASKED, ModelVariant
from scaleflow.interfaces.formatting import format_number


class FormatExported(ModelVariant, event="format"):
    """The model was exported in a format of `export.formats`, and tried in the format's own runtime."""

    name: str
    path: str
    #: Metrics of the split, `difference` (the largest, relative to the largest output), `mb`, and `ms` per example
    values: Mapping[str, float] = field(default_factory=dict)
    split: str = ""
    examples: int = 0
    error: str = field(default="", metadata=MASKED)  # why the format was removed; empty if it is good

    def list_tags(self) -> Mapping[str, str]:
        return {f"scaleflow.export.{self.name}": self.error or "good"}

    def find_name(self) -> str:
        return self.name

    def list_rows(self) -> list[tuple[str, str]]:
        """Returns a row with the measurements of the format, or why there is none."""
        if self.error:
            return [(self.name, f"not exported: {self.error}")]
        shown = {name: format_number(value) for name, value in self.values.items()}
        parts = []
        for name in ("accuracy", "mae", "loss"):
            if name in shown:
                parts.append(f"{self.split} {name} {shown[name]}")
                break
        if "mb" in shown:
            parts.append(f"{shown['mb']} MB")
        if "ms" in shown:
            parts.append(f"{shown['ms']} ms an example")
        if "difference" in shown:
            parts.append(f"largest difference {shown['difference']}")
        return [(self.name, ", ".join(parts))]

    def describe(self) -> tuple[str, Mapping[str, float]]:
        return f"{self.name}: {self.error}" if self.error else self.name, self.values
