"""Writes pages, and their tables as CSV files."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleflow.interfaces.estimate import Estimate
from scaleflow.interfaces.formatting import format_csv


def write_files(folder: Path, contents: Mapping[str, str | bytes]) -> None:
    """Writes files to a folder. Their names may contain one subfolder, which is created. Raises OSError."""
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats rows as CSV. An `Estimate` becomes three columns: its value and its interval. NaN is empty."""
    flat = list(map(split_estimates, rows))
    head = list(dict.fromkeys(itertools.chain.from_iterable(flat)))
    cells = []
    for row in flat:
        cells.append([row.get(name) for name in head])
    return format_csv(head, cells)


def split_estimates(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the CSV cells of a row. An `Estimate` becomes three cells, NaN becomes ""."""
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Estimate):
            cells[name] = value.value
            cells[f"{name}_low"] = value.low
            cells[f"{name}_high"] = value.high
        else:
            cells[name] = value
    for name, value in cells.items():
        if value != value:  # NaN
            cells[name] = ""
    return cells
