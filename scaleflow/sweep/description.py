"""Describes a sweep in the store, in Markdown: its best job with its model, the report's table, and its command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scaleflow.config.words import quote_override
from scaleflow.launcher.answer import FAILED, REFUSED, TERMINATED
from scaleflow.launcher.launch import describe_outcome
from scaleflow.launcher.recording.description import (
    LONGEST,
    cut_text,
    describe_command,
    describe_loading,
    format_code_block,
    format_table,
    join_parts,
    pad_cells,
)
from scaleflow.runs import RunFolder
from scaleflow.sweep.ledger import Ledger
from scaleflow.sweep.report import MARKDOWN, MAX_ROWS, Report

#: The most jobs whose reasons are named, and the most characters of a reason.
MOST_REASONS, LONGEST_REASON = 5, 200

#: The most characters of the line about rows that do not fit.
LONGEST_END = 60

#: Lines of a Markdown table before its first row.
HEAD_LINES = 2

#: The exit code of a job by its status; none of a job that has not ended.
EXIT_CODES = {"FINISHED": 0, "PRUNED": 0, "FAILED": FAILED, "REFUSED": REFUSED, "KILLED": TERMINATED}


def describe_sweep(report: Report, folder: Path) -> str:
    """Returns the description of a sweep.

    Args:
        report: the report of the sweep.
        folder: the folder of the sweep.
    """
    store, model_uri = (report.best[1].store, report.best[1].model_uri) if report.best else (None, None)
    repeated = format_code_block("sh", quote_override("hydra.sweep.dir", folder))
    head = join_parts(
        [
            cut_text(f"**Best:** {report.describe_best()}" if report.best else report.ranking, MARKDOWN),
            describe_loading(store, model_uri, "the model of the best job"),
            f"To run what is missing, or more values, repeat the command below with\n\n{repeated}",
        ]
    )
    rest = join_parts([list_reasons(report), describe_command(RunFolder(folder))])
    cells = report.cells(report.shown, MAX_ROWS)
    table = cut_table(format_table(pad_cells(cells)), len(report.rows), LONGEST - len(head) - len(rest) - 4)
    return "\n\n".join(filter(None, (head, table, rest)))


def list_reasons(report: Report) -> str:
    """Returns a line for each of the first jobs that did not finish."""
    rows = [row for row in report.rows if row.get("reason")]
    lines = [f"- #{row['job']} {row['status']}: {str(row['reason'])[:LONGEST_REASON]}" for row in rows[:MOST_REASONS]]
    if len(rows) > MOST_REASONS:
        lines.append(f"- {len(rows) - MOST_REASONS} more, in {MARKDOWN}")
    return "\n".join(lines)


def cut_table(table: str, total: int, longest: int) -> str:
    """Cuts the last rows of a table that is longer than `longest`, and says how many of `total` rows it lacks."""
    lines = table.split("\n")
    if len(table) > longest - LONGEST_END:
        lines = lines[: table[: longest - LONGEST_END].count("\n")]
    missing = total + HEAD_LINES - len(lines)
    return "\n".join([*lines, *(["", f"{missing:,} more rows are in {MARKDOWN}."] if missing else [])])


def describe_jobs(folder: Path) -> dict[str, Any]:
    """Returns what `--json` says of a sweep: what it says of the parent run, and of each job."""
    jobs = []
    for entry in Ledger.load(RunFolder(folder)).entries:
        outcome = describe_outcome(folder / entry.folder)
        words = {"job": entry.number, "overrides": entry.overrides, "status": entry.status}
        code = EXIT_CODES.get(entry.status)
        jobs.append({**outcome, **words, "exit_code": code, "error": (entry.reason or None) if code else None})
    return {**describe_outcome(folder), "jobs": jobs}
