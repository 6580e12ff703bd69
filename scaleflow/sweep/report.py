"""What compares the jobs of a sweep: a table in three forms, and pictures."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from scaleflow.sweep.ledger import Entry, is_under
from scaleflow.sweep.told import Told

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

#: Further metrics of a job's results that a terminal has no room for.
MOST_RESULTS = 4


class Report:
    """The jobs that there are, side by side.

    Args:
        jobs: each with what its folder tells.
        swept: the keys and groups that vary.
    """

    def __init__(self, jobs: Sequence[tuple[Entry, Told]], swept: Sequence[str]) -> None:
        self._jobs = list(jobs)
        self._choices = columns_of([told for _, told in jobs], swept)
        self._swept = swept
        self._base, self.reason = self._one_replica()
        self.rows = [self._row(entry, told) for entry, told in jobs]
        self.columns = [key for key in dict.fromkeys(k for row in self.rows for k in row) if self._has(key)]

    def _has(self, column: str) -> bool:
        """Whether a column says anything; the efficiency is there to say why it can't be told."""
        return column == "efficiency" or any(row.get(column) is not None for row in self.rows)

    def _row(self, entry: Entry, told: Told) -> dict[str, Cell]:
        row: dict[str, Cell] = {"job": entry.number}
        row |= {key: told.params.get(key, typed(entry, key)) for key in self._choices}
        row["status"] = entry.status
        row |= dict(list(told.results.items())[:MOST_RESULTS])
        for column, key in MEASURED.items():
            row[column] = told.rate if column == "examples/s" else told.last.get(key)
        row["replicas"] = int(replicas) if (replicas := told.params.get("resolved.replicas")) else None
        row["efficiency"] = self._efficiency(told)
        row["run"] = told.run_id
        row["reason"] = entry.reason or None
        return row

    def _one_replica(self) -> tuple[dict[tuple[str, ...], float], str]:
        """The examples a second of the jobs with one replica, by what else they do; and why there are none."""
        found: dict[tuple[str, ...], float] = {}
        for _, told in self._jobs:
            if told.params.get("resolved.replicas") == "1" and told.rate and told.status == "FINISHED":
                key = self._work(told)
                found[key] = max(told.rate, found.get(key, 0.0))
        return found, "" if found else "no finished job of the sweep has one replica"

    def _work(self, told: Told) -> tuple[str, ...]:
        """What a job does, but for the hardware that it does it on."""
        return tuple(told.params.get(key, "") for key in self._choices if not is_under(key, OF_SCALE))

    def _efficiency(self, told: Told) -> float | None:
        """Its examples a second for each replica, over those of the same work on one."""
        one = self._base.get(self._work(told))
        replicas = told.params.get("resolved.replicas")
        return told.rate / (int(replicas) * one) if told.rate and replicas and one else None

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
        from scaleflow.sweep.picture import draw

        return draw(self, [(label(entry, self._swept), told) for entry, told in self._jobs], folder)

    def tags(self) -> Mapping[str, str]:
        """What makes MLflow's UI show the table."""
        return {TABLES: json.dumps([{"path": TABLE, "type": "table"}])}

    @property
    def choices(self) -> Sequence[str]:
        """The keys whose values vary."""
        return self._choices

    def markdown(self) -> str:
        head = [f"| {' | '.join(self.columns)} |", f"|{'---|' * len(self.columns)}"]
        rows = [f"| {' | '.join(escaped(shown(row.get(key), key)) for key in self.columns)} |" for row in self.rows]
        note = ["", f"efficiency: examples/s of a replica, over those of one alone{self._why()}"]
        return "\n".join([*head, *rows, *note]) + "\n"

    def _why(self) -> str:
        return f"; blank: {self.reason}" if self.reason else ""

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([["" if row.get(key) is None else row[key] for key in self.columns] for row in self.rows])
        return text.getvalue()

    def table(self) -> str:
        """JSON as `mlflow.log_table` writes it, its figures as MLflow's UI has room for; the CSV has all digits."""
        data = [[readable(row.get(key)) for key in self.columns] for row in self.rows]
        columns = [key.replace(".", "/") for key in self.columns]  # a column with a dot is blank in MLflow's UI
        return json.dumps({"columns": columns, "data": data})

    def show(self, stream: TextIO) -> None:
        """Prints it; in colour on a terminal."""
        from rich.console import Console
        from rich.table import Table

        console = Console(file=stream, highlight=False, width=None if stream.isatty() else 200)
        columns = [key for key in self.columns if key not in ("run", "reason", "host MB", "device MB", "replicas")]
        table = Table(box=None, pad_edge=False)
        for key in columns:
            table.add_column(key, justify="left" if key in (*self._choices, "status") else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(shown(row.get(key), key) for key in columns))
        console.print(table)
        if self.reason and len(self.rows) > 1:
            console.print(f"efficiency: {self.reason}")


def columns_of(jobs: Sequence[Told], swept: Sequence[str]) -> list[str]:
    """The parameters that vary: what was asked to, then what else differs in a recipe that was."""
    asked = [key for key in swept if key not in ("experiment", "seed")]
    if "experiment" in swept:
        asked += varying(jobs, lambda key: "." in key and not key.startswith(("resolved.", "tracking.", "sweep.")))
    return [*dict.fromkeys([*asked, *(["seed"] if "seed" in swept else [])])]


def varying(jobs: Sequence[Told], wanted: Callable[[str], bool]) -> list[str]:
    ready = [told.params for told in jobs if told.params]
    keys = dict.fromkeys(key for params in ready for key in params if wanted(key))
    return [key for key in keys if len({params.get(key) for params in ready}) > 1]


def typed(entry: Entry, key: str) -> str | None:
    """The value that a job's overrides give a key: for one that never was ready."""
    found = [o.partition("=")[2] for o in entry.overrides if o.lstrip("+").partition("=")[0] == key]
    return found[-1] if found else None


def label(entry: Entry, swept: Sequence[str]) -> str:
    """A job in a picture."""
    words = [o for o in entry.overrides if is_under(o.lstrip("+").partition("=")[0], swept)]
    return " ".join(words) or f"job {entry.number}"


def shown(value: Any, column: str = "") -> str:
    """A cell: figures with as many digits as are worth reading."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if column == "efficiency":
        return f"{value:.2f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def readable(value: Cell) -> Cell:
    """A figure with five digits; none for what JSON has no word for."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
