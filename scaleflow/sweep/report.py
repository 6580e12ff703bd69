"""What compares the jobs of a sweep: a table in three forms, and pictures."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from scaleflow.config.hydra_errors import override_key
from scaleflow.sweep.ledger import LedgerEntry, is_under
from scaleflow.sweep.loss_check import LossCheck
from scaleflow.sweep.repeats import RepeatedJob, group_repeats
from scaleflow.sweep.run_summary import RunSummary

if TYPE_CHECKING:
    from collections.abc import Callable

Cell = str | int | float | None

#: The files that a report is written to, in the sweep's folder.
MARKDOWN, CSV, TABLE = "report.md", "report.csv", "report.json"

#: Where MLflow's UI looks for the tables of a run.
TABLES = "mlflow.loggedArtifacts"

#: Sections that say on how much hardware a job ran: without them two jobs do the same work.
OF_SCALE = ("strategy", "hardware", "cluster")

#: What a job is measured by: a column's name, and the metric behind it.
MEASURED = {
    "examples/s": "perf/examples_per_second",
    "step ms": "perf/step_ms",
    "step ms p50": "perf/step_ms_p50",
    "step ms p95": "perf/step_ms_p95",
    "first step s": "perf/seconds_to_first_step",
    "host MB": "perf/peak_host_mb",
    "device MB": "perf/peak_device_mb",
}

#: Columns of words.
WORDS = ("status", "first losses")

#: Columns that a terminal has no room for.
HIDDEN = ("run", "reason", "host MB", "device MB", "replicas")

#: Further metrics of a job's results that a terminal has no room for.
MOST_RESULTS = 4


class Report:
    """The jobs that there are, side by side; repeats of one are a row, with their medians.

    Args:
        jobs: each with what its folder tells.
        swept: the keys and groups that vary.
        same_losses: whether those that do the same work have to begin with the same losses.

    Attributes:
        differences: a line for each job that does not.
        reason: why there is no efficiency.
    """

    def __init__(
        self, jobs: Sequence[tuple[LedgerEntry, RunSummary]], swept: Sequence[str], same_losses: bool = False
    ) -> None:
        self._jobs = group_repeats(jobs)
        self._choices = choose_columns([told for _, told in jobs], swept)
        self._swept = swept
        self._are_repeated = any(len(each.jobs) > 1 for each in self._jobs)
        self._losses = LossCheck(jobs, lambda entry: make_label(entry, swept)) if same_losses else None
        self.differences = self._losses.differences if self._losses else []
        self._base, self.reason = self._one_replica()
        self.rows = [self._row(each) for each in self._jobs]
        self.columns = [key for key in dict.fromkeys(k for row in self.rows for k in row) if self._has_values(key)]

    def _has_values(self, column: str) -> bool:
        """Whether a column says anything; the efficiency is there to say why it can't be told."""
        return column == "efficiency" or any(row.get(column) is not None for row in self.rows)

    def _row(self, jobs: RepeatedJob) -> dict[str, Cell]:
        numbers = [entry.number for entry, _ in jobs.jobs]
        row: dict[str, Cell] = {"job": numbers[0] if len(numbers) == 1 else " ".join(map(str, numbers))}
        row |= {key: jobs.params.get(key, find_typed_value(jobs.entry, key)) for key in self._choices}
        row["status"] = jobs.status
        if self._losses is not None:
            row["first losses"] = self._losses.worst_verdict([entry for entry, _ in jobs.jobs])
        row |= dict(list(jobs.results.items())[:MOST_RESULTS])
        last = jobs.last
        for column, key in MEASURED.items():
            row[column] = jobs.rate if column == "examples/s" else last.get(key)
            if column == "examples/s" and self._are_repeated:
                row |= {"least": min(jobs.rates, default=None), "most": max(jobs.rates, default=None)}
                row["counted"] = len(jobs.rates)
        row["replicas"] = int(replicas) if (replicas := jobs.params.get("resolved.replicas")) else None
        row["efficiency"] = self._efficiency(jobs)
        row["run"] = jobs.runs
        row["reason"] = jobs.reason
        return row

    def _one_replica(self) -> tuple[dict[tuple[str, ...], float], str]:
        """The examples a second of the jobs with one replica, by what else they do; and why there are none."""
        found: dict[tuple[str, ...], float] = {}
        for jobs in self._jobs:
            if jobs.params.get("resolved.replicas") == "1" and jobs.rate and jobs.is_finished:
                key = self._work(jobs)
                found[key] = max(jobs.rate, found.get(key, 0.0))
        return found, "" if found else "no finished job of the sweep has one replica"

    def _work(self, jobs: RepeatedJob) -> tuple[str, ...]:
        """What a job does, but for the hardware that it does it on."""
        return tuple(jobs.params.get(key, "") for key in self._choices if not is_under(key, OF_SCALE))

    def _efficiency(self, jobs: RepeatedJob) -> float | None:
        """Their examples a second for each replica, over those of the same work on one."""
        one = self._base.get(self._work(jobs))
        replicas = jobs.params.get("resolved.replicas")
        return jobs.rate / (int(replicas) * one) if jobs.rate and replicas and one else None

    # -----------------------------------------------------------------------------------------
    # Its forms
    # -----------------------------------------------------------------------------------------

    def write(self, folder: Path) -> list[Path]:
        """Writes the table as Markdown, as CSV, and as MLflow's UI shows tables; gives the files."""
        forms = {MARKDOWN: self.markdown(), CSV: self.csv(), TABLE: self.table()}
        for name, text in forms.items():
            (folder / name).write_text(text)
        return [folder / name for name in forms]

    def draw(self, folder: Path) -> list[Path]:
        """Draws the pictures; gives the files."""
        from scaleflow.sweep.plots import draw_plots

        return draw_plots(self, [(make_label(jobs.entry, self._swept), jobs) for jobs in self._jobs], folder)

    def tags(self) -> Mapping[str, str]:
        """What makes MLflow's UI show the table."""
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
        note = ["", *self._notes(), *(f"THE FIRST LOSSES DIFFER: {line}" for line in self.differences)]
        return "\n".join([*head, *rows, *note]) + "\n"

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
        """JSON as `mlflow.log_table` writes it, its figures as MLflow's UI has room for; the CSV has all digits."""
        data = [[format_figure(row.get(key)) for key in self.columns] for row in self.rows]
        columns = [key.replace(".", "/") for key in self.columns]  # a column with a dot is blank in MLflow's UI
        return json.dumps({"columns": columns, "data": data})

    def show(self, stream: TextIO) -> None:
        """Prints it; in colour on a terminal."""
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


def choose_columns(jobs: Sequence[RunSummary], swept: Sequence[str]) -> list[str]:
    """The parameters that vary: what was asked to, then what else differs in a recipe that was."""
    asked = [key for key in swept if key not in ("experiment", "seed")]
    if "experiment" in swept:
        asked += find_varying_keys(
            jobs, lambda key: "." in key and not key.startswith(("resolved.", "tracking.", "sweep."))
        )
    return [*dict.fromkeys([*asked, *(["seed"] if "seed" in swept else [])])]


def find_varying_keys(jobs: Sequence[RunSummary], wanted: Callable[[str], bool]) -> list[str]:
    ready = [told.params for told in jobs if told.params]
    keys = dict.fromkeys(key for params in ready for key in params if wanted(key))
    return [key for key in keys if len({params.get(key) for params in ready}) > 1]


def find_typed_value(entry: LedgerEntry, key: str) -> str | None:
    """The value that a job's overrides give a key: for one that never was ready."""
    found = [o.partition("=")[2] for o in entry.overrides if override_key(o) == key]
    return found[-1] if found else None


def make_label(entry: LedgerEntry, swept: Sequence[str]) -> str:
    """A job in a picture."""
    words = [o for o in entry.overrides if is_under(override_key(o), swept)]
    return " ".join(words) or f"job {entry.number}"


def format_cell(value: Any, column: str = "") -> str:
    """A cell: figures with as many digits as are worth reading."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if column == "efficiency":
        return f"{value:.2f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_figure(value: Cell) -> Cell:
    """A figure with five digits; none for what JSON has no word for."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


def escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
