"""The report of a sweep: a table of its jobs as Markdown, CSV and JSON, on the terminal, and as plots."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from scaleflow.config.hydra_errors import override_key
from scaleflow.runs.state import RunHistory
from scaleflow.sweep.ledger import LedgerEntry, is_under
from scaleflow.sweep.loss_check import LossCheck
from scaleflow.sweep.repeats import RepeatedJob, group_repeats

if TYPE_CHECKING:
    from collections.abc import Callable

Cell = str | int | float | None

#: The files that a report is written to, in the sweep's folder.
MARKDOWN, CSV, TABLE = "report.md", "report.csv", "report.json"

#: The tag in which MLflow's UI looks for the tables of a run.
TABLES = "mlflow.loggedArtifacts"

#: Sections that decide how much hardware a job uses, but not what work it does.
OF_SCALE = ("strategy", "hardware", "cluster")

#: The metric of each column of measurements.
MEASURED = {
    "examples/s": "perf/examples_per_second",
    "step ms": "perf/step_ms",
    "step ms p50": "perf/step_ms_p50",
    "step ms p95": "perf/step_ms_p95",
    "first step s": "perf/seconds_to_first_step",
    "host MB": "perf/peak_host_mb",
    "device MB": "perf/peak_device_mb",
}

#: Columns of text.
WORDS = ("status", "first losses")

#: Columns that a terminal has no room for.
HIDDEN = ("run", "reason", "host MB", "device MB", "replicas")

#: The most metrics of a job's results in the table, so that it fits a terminal.
MOST_RESULTS = 4


class Report:
    """A table with a row for each job. The repeats of a job share a row with their medians.

    Args:
        jobs: the jobs with their runs.
        swept: the keys and groups that vary.
        same_losses: whether jobs that do the same work must start with the same losses.

    Attributes:
        differences: a line for each job that starts with different losses.
        reason: why there is no efficiency; empty if there is one.
        rows: the cells of each row by column.
        columns: the columns that have values.
    """

    def __init__(
        self, jobs: Sequence[tuple[LedgerEntry, RunHistory]], swept: Sequence[str], same_losses: bool = False
    ) -> None:
        self._jobs = group_repeats(jobs)
        self._choices = choose_columns([run for _, run in jobs], swept)
        self._swept = swept
        self._are_repeated = any(len(each.jobs) > 1 for each in self._jobs)
        self._losses = LossCheck(jobs, lambda entry: make_label(entry, swept)) if same_losses else None
        self.differences = self._losses.differences if self._losses else []
        self._base, self.reason = self._one_replica()
        self.rows = [self._row(each) for each in self._jobs]
        self.columns = [key for key in dict.fromkeys(k for row in self.rows for k in row) if self._has_values(key)]

    def _has_values(self, column: str) -> bool:
        """Whether a column has values. The efficiency is always shown, since a note explains why it is blank."""
        return column == "efficiency" or any(row.get(column) is not None for row in self.rows)

    def _row(self, jobs: RepeatedJob) -> dict[str, Cell]:
        numbers = [entry.number for entry, _ in jobs.jobs]
        row: dict[str, Cell] = {"job": numbers[0] if len(numbers) == 1 else " ".join(map(str, numbers))}
        row |= {key: jobs.params.get(key, find_typed_value(jobs.entry, key)) for key in self._choices}
        row["status"] = jobs.status
        if self._losses is not None:
            row["first losses"] = self._losses.worst_verdict([entry for entry, _ in jobs.jobs])
        row |= dict(list(jobs.results.items())[:MOST_RESULTS])
        metrics = jobs.metrics
        for column, key in MEASURED.items():
            row[column] = jobs.rate if column == "examples/s" else metrics.get(key)
            if column == "examples/s" and self._are_repeated:
                row |= {"least": min(jobs.rates, default=None), "most": max(jobs.rates, default=None)}
                row["counted"] = len(jobs.rates)
        row["replicas"] = int(replicas) if (replicas := jobs.params.get("resolved.replicas")) else None
        row["efficiency"] = self._efficiency(jobs)
        row["run"] = jobs.runs
        row["reason"] = jobs.reason
        return row

    def _one_replica(self) -> tuple[dict[tuple[str, ...], float], str]:
        """Returns the highest examples/s on one replica for each kind of work, and why there are none."""
        rates: dict[tuple[str, ...], float] = {}
        for jobs in self._jobs:
            if jobs.params.get("resolved.replicas") == "1" and jobs.rate and jobs.is_finished:
                key = self._work(jobs)
                rates[key] = max(jobs.rate, rates.get(key, 0.0))
        return rates, "" if rates else "no finished job of the sweep has one replica"

    def _work(self, jobs: RepeatedJob) -> tuple[str, ...]:
        """Returns what identifies the work of a job: the values that vary, except those of `OF_SCALE`."""
        return tuple(jobs.params.get(key, "") for key in self._choices if not is_under(key, OF_SCALE))

    def _efficiency(self, jobs: RepeatedJob) -> float | None:
        """Returns examples/s per replica, divided by those of the same work on one replica; None if not known."""
        single_rate = self._base.get(self._work(jobs))
        replicas = jobs.params.get("resolved.replicas")
        return jobs.rate / (int(replicas) * single_rate) if jobs.rate and replicas and single_rate else None

    # -----------------------------------------------------------------------------------------
    # Output
    # -----------------------------------------------------------------------------------------

    def write(self, folder: Path) -> list[Path]:
        """Writes the table as Markdown, as CSV and as JSON for MLflow's UI; returns the files."""
        forms = {MARKDOWN: self.markdown(), CSV: self.csv(), TABLE: self.table()}
        for name, text in forms.items():
            (folder / name).write_text(text)
        return [folder / name for name in forms]

    def draw(self, folder: Path) -> list[Path]:
        """Draws the plots; returns the files."""
        from scaleflow.sweep.plots import draw_plots

        return draw_plots(self, [(make_label(jobs.entry, self._swept), jobs) for jobs in self._jobs], folder)

    def tags(self) -> Mapping[str, str]:
        """The tags with which MLflow's UI shows the table."""
        return {TABLES: json.dumps([{"path": TABLE, "type": "table"}])}

    @property
    def choices(self) -> Sequence[str]:
        """The keys whose values vary."""
        return self._choices

    def markdown(self) -> str:
        head = [f"| {' | '.join(self.columns)} |", f"|{'---|' * len(self.columns)}"]
        rows = [
            f"| {' | '.join(escape_cell(format_cell(row.get(key), key)) for key in self.columns)} |"
            for row in self.rows
        ]
        notes = ["", *self._notes(), *(f"THE FIRST LOSSES DIFFER: {line}" for line in self.differences)]
        return "\n".join([*head, *rows, *notes]) + "\n"

    def _notes(self) -> list[str]:
        blank = f"; blank: {self.reason}" if self.reason else ""
        notes = [f"efficiency: examples/s of a replica, over those of one alone{blank}"]
        if self._are_repeated:
            notes.append("of repeats that count: medians, and the least and the most examples/s")
        return notes

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([["" if row.get(key) is None else row[key] for key in self.columns] for row in self.rows])
        return text.getvalue()

    def table(self) -> str:
        """Returns JSON as `mlflow.log_table` writes it, with five digits to fit MLflow's UI. The CSV has all digits."""
        data = [[format_figure(row.get(key)) for key in self.columns] for row in self.rows]
        columns = [key.replace(".", "/") for key in self.columns]  # a column with a dot is blank in MLflow's UI
        return json.dumps({"columns": columns, "data": data})

    def show(self, stream: TextIO) -> None:
        """Prints the table, in colour on a terminal. Leaves out the columns of `HIDDEN`."""
        from rich.console import Console
        from rich.table import Table

        console = Console(file=stream, highlight=False, width=None if stream.isatty() else 200)
        columns = [key for key in self.columns if key not in HIDDEN]
        table = Table(box=None, pad_edge=False)
        for key in columns:
            table.add_column(key, justify="left" if key in (*self._choices, *WORDS) else "right", overflow="fold")
        for row in self.rows:
            table.add_row(
                *(format_cell(row.get(key), key) for key in columns), style="bold red" if has_failed(row) else None
            )
        console.print(table)
        if self.reason and len(self.rows) > 1:
            console.print(f"efficiency: {self.reason}")


def has_failed(row: Mapping[str, Cell]) -> bool:
    return row.get("first losses") == "DIFFER"


def choose_columns(jobs: Sequence[RunHistory], swept: Sequence[str]) -> list[str]:
    """Lists the params that vary: the swept keys, and for a swept `experiment` all keys that differ."""
    keys = [key for key in swept if key not in ("experiment", "seed")]
    if "experiment" in swept:
        keys += find_varying_keys(
            jobs, lambda key: "." in key and not key.startswith(("resolved.", "tracking.", "sweep."))
        )
    return [*dict.fromkeys([*keys, *(["seed"] if "seed" in swept else [])])]


def find_varying_keys(jobs: Sequence[RunHistory], wanted: Callable[[str], bool]) -> list[str]:
    params_of_runs = [run.params for run in jobs if run.params]
    keys = dict.fromkeys(key for params in params_of_runs for key in params if wanted(key))
    return [key for key in keys if len({params.get(key) for params in params_of_runs}) > 1]


def find_typed_value(entry: LedgerEntry, key: str) -> str | None:
    """Returns the value that a job's overrides give a key. A job that never became ready has no params."""
    values = [o.partition("=")[2] for o in entry.overrides if override_key(o) == key]
    return values[-1] if values else None


def make_label(entry: LedgerEntry, swept: Sequence[str]) -> str:
    """Returns the label of a job in plots and messages."""
    words = [o for o in entry.overrides if is_under(override_key(o), swept)]
    return " ".join(words) or f"job {entry.number}"


def format_cell(value: Any, column: str = "") -> str:
    """Formats a cell for people: four significant digits, or whole numbers from 1000."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if column == "efficiency":
        return f"{value:.2f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_figure(value: Cell) -> Cell:
    """Rounds a number to five digits; None for NaN and infinity, which JSON lacks."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


def escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
