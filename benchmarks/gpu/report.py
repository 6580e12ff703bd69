"""The report: gpu.json for programs, gpu.md to read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Value
from benchmarks.gpu.checks import NO_GPU, Result

HEAD = ("check", "result", "values", "tolerance", "seconds")


def write_report(folder: Path, machine: Mapping[str, Any], results: Sequence[Result], seconds: float) -> None:
    """Writes both files into the folder, which is created if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(to_json(machine, results, seconds), indent=1) + "\n")
    (folder / "gpu.md").write_text(to_markdown(machine, results, seconds), encoding="utf-8")


def to_json(machine: Mapping[str, Any], results: Sequence[Result], seconds: float) -> dict[str, Any]:
    return {
        "machine": machine,
        "seconds": round(seconds, 1),
        "checks": [
            {
                "name": result.check.name,
                "group": result.check.group,
                "result": result.status,
                "reason": result.reason,
                "values": result.values,
                "tolerance": result.check.tolerance,
                "seconds": round(result.seconds, 1),
                "remarks": result.remarks,
            }
            for result in results
        ],
    }


def to_markdown(machine: Mapping[str, Any], results: Sequence[Result], seconds: float) -> str:
    lines = ["# Checks on a GPU", "", f"{summarize(results)}, in {seconds / 60:.1f} minutes.", ""]
    lines += ["| machine | |", "|---|---|"]
    lines += [f"| {name} | {format_fact(value)} |" for name, value in machine.items() if value]
    for group, members in groupby(results, lambda result: result.check.group):
        lines += ["", f"## {group.capitalize()}", "", f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
        lines += [to_row(result) for result in members]
    if remarks := [f"- `{result.check.name}`: {remark}" for result in results for remark in result.remarks]:
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
    cells = (f"`{result.check.name}`", outcome, values, escape(result.check.tolerance), f"{result.seconds:.0f}")
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
