"""Compares the best jobs of a sweep on the same test examples, from the predictions that they kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.runs import RunFolder
from scaleflow.sweep.ledger import LedgerEntry

#: The most jobs that are compared.
MOST_COMPARED = 5

#: The files, in the folder `evaluation` of the sweep.
PAGE, TABLE = "comparison.html", "comparison.csv"


def write_comparison(folder: Path, jobs: Sequence[tuple[str, LedgerEntry]]) -> tuple[list[Path], str]:
    """Compares jobs, the best first, and writes a page and a table.

    Args:
        folder: of the sweep.
        jobs: with their labels.

    Returns:
        The files, and a line about the two best jobs; nothing if fewer than two have kept predictions.
    """
    from scaleflow.evaluation.comparison import list_differences
    from scaleflow.evaluation.page import compose_section, make_page, make_table
    from scaleflow.evaluation.predictions import PREDICTIONS, load_predictions
    from scaleflow.evaluation.report import to_csv

    named = []
    for label, entry in jobs[:MOST_COMPARED]:
        path = RunFolder(folder / entry.folder).evaluation / PREDICTIONS
        try:
            named.append((f"#{entry.number} {label}", load_predictions(path)))
        except ConfigError:  # it kept none
            continue
    if len(named) < 2:
        return [], ""
    rows = list_differences(named)
    about = f"The {len(named)} best jobs with predictions, on the same examples; differences are from the first."
    target = RunFolder(folder).evaluation
    target.mkdir(exist_ok=True)
    contents = {PAGE: make_page("Best jobs of the sweep", about, [compose_section("Differences", make_table(rows))])}
    contents[TABLE] = to_csv(rows)
    for name, content in contents.items():
        (target / name).write_text(content)
    return [target / name for name in contents], describe_second(rows, named[1][0])


def describe_second(rows: Sequence[dict[str, Any]], label: str) -> str:
    """Returns a line about the second best job; empty if it is not compared."""
    from scaleflow.evaluation.findings import describe_figure

    row = next((row for row in rows if row["model"] == label and "difference" in row), None)
    if row is None:
        return ""
    verdict = "not more than noise" if row["more than noise"] == "no" else "more than noise"
    return f"{label} differs from the best by {row['metric']} {describe_figure(row['difference'])}: {verdict}"
