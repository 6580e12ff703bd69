"""The report: gpu.json for programs, gpu.md to read."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Value
from benchmarks.gpu.device import Device, describe_machine

NO_GPU = "there is no NVIDIA GPU: nvidia-smi lists none that may be used"

HEAD = ("check", "result", "values", "tolerance", "seconds")


@dataclass(frozen=True)
class Result:
    """What came of a check.

    Attributes:
        name, group: its own, and its file's.
        status: `passed`, `failed`, `skipped` or `not run`.
        reason: why it did not pass.
        values: what it measured.
        tolerance: what is allowed.
        seconds: how long it took.
        remarks: rules of scaleflow's that the values contradict.
    """

    name: str
    group: str
    status: str
    reason: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)
    tolerance: str = ""
    seconds: float = 0.0
    remarks: Sequence[str] = ()


class Report:
    """Both files, in a folder that is created if it is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: list[Result] = []
        self._begin = time.monotonic()
        self._machine: dict[str, Any] = {}

    def add(self, result: Result, device: Device | None) -> None:
        """Writes the report of all results, with a new one."""
        self.results.append(result)
        self._begin = min(self._begin, time.monotonic() - result.seconds)
        self._machine = self._machine or describe_machine(device)
        seconds = time.monotonic() - self._begin
        checks = [{"result" if k == "status" else k: v for k, v in asdict(each).items()} for each in self.results]
        found = {"machine": self._machine, "seconds": round(seconds, 1), "checks": checks}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
        text = to_markdown(self._machine, self.results, seconds)
        (self.folder / "gpu.md").write_text(text, encoding="utf-8")


def to_markdown(machine: Mapping[str, Any], results: Sequence[Result], seconds: float) -> str:
    lines = ["# Checks on a GPU", "", f"{summarize(results)}, in {seconds / 60:.1f} minutes.", ""]
    lines += ["| machine | |", "|---|---|"]
    lines += [f"| {name} | {format_fact(value)} |" for name, value in machine.items() if value]
    for group, members in groupby(results, lambda result: result.group):
        lines += ["", f"## {group.capitalize()}", "", f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
        lines += [to_row(result) for result in members]
    if remarks := [f"- `{result.name}`: {remark}" for result in results for remark in result.remarks]:
        lines += ["", "## Rules to look at", "", *remarks]
    return "\n".join(lines) + "\n"


def summarize(results: Sequence[Result]) -> str:
    """Returns how many checks had which result. Says so if all were skipped because there is no GPU."""
    counts = Counter(result.status for result in results)
    text = ", ".join(f"{count} {status}" for status, count in counts.items())
    is_without_gpu = bool(results) and all(result.reason == NO_GPU for result in results)
    return f"{text} ({NO_GPU})" if is_without_gpu else text


def to_row(result: Result) -> str:
    status = f"**{result.status}**" if result.status in ("failed", "not run") else result.status
    outcome = f"{status}: {escape(result.reason)}" if result.reason else status
    values = "; ".join(f"{escape(name)} {format_value(value)}" for name, value in result.values.items())
    cells = (f"`{result.name}`", outcome, values, escape(result.tolerance), f"{result.seconds:.0f}")
    return f"| {' | '.join(cells)} |"


def format_fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return "; ".join(value) if isinstance(value, list) else str(value)


def format_value(value: Value) -> str:
    if isinstance(value, str):
        return escape(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def escape(text: str) -> str:
    """Returns text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
