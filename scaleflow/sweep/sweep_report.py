"""The report of a sweep: a table of its jobs as Markdown, CSV and JSON, on the terminal, and as plots."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, TextIO

from scaleflow.config.parse import is_under
from scaleflow.interfaces import Mode
from scaleflow.interfaces.formatting import format_csv, format_number
from scaleflow.launcher.lines import lay_out_table, measure_width, wrap_line
from scaleflow.launcher.recording.description import format_table
from scaleflow.runs import RunFolder
from scaleflow.runs.state import INTERVAL, RATE, RunState, drop_intervals
from scaleflow.sweep.first_losses import LossCheck, check_first_losses
from scaleflow.sweep.ledger import LedgerEntry
from scaleflow.sweep.ranking import RepeatedJob, group_repeats, rank_jobs
from scaleflow.tracking.connection import is_default_store
from scaleflow.tracking.uri import drop_credentials

if TYPE_CHECKING:
    from rich.console import Console

Cell = str | int | float | None
Row = dict[str, Cell]

#: The files of a report, in the sweep's folder.
MARKDOWN = "report.md"
CSV = "report.csv"
TABLE = "report.json"

#: MLflow's UI reads the paths of a run's tables from this tag.
TABLES_TAG = "mlflow.loggedArtifacts"

#: Sections that decide how much hardware a job uses, but not what work it does.
SCALE_SECTIONS = ("strategy", "hardware", "cluster")

#: The metric of each column of measurements.
METRIC_COLUMNS = {
    "examples/s": RATE,
    "step ms": "perf/step_ms",
    "step ms p50": "perf/step_ms_p50",
    "step ms p95": "perf/step_ms_p95",
    "first step s": "perf/seconds_to_first_step",
    "host MB": "perf/peak_host_mb",
    "device MB": "perf/peak_device_mb",
}

#: Columns of text, which a terminal aligns on the left.
TEXT_COLUMNS = ("best", "status", "first losses")

#: Columns of examples/s, which have no decimals.
RATE_COLUMNS = ("examples/s", "least", "most")

#: Columns that are not shown on a terminal.
HIDDEN_COLUMNS = ("run", "reason", "step ms p50", "step ms p95", "host MB", "device MB", "replicas")

#: Columns that a narrow terminal leaves out, in this order.
LESS_IMPORTANT = ("first step s", "step ms", "examples/s")

#: Metrics that the report of a rare class adds to a run. Its accuracy says little.
RARE_CLASS_METRICS = ("roc_auc", "average_precision")

#: The maximum number of metrics of a split in the table.
MAX_RESULTS = 4

#: The maximum number of metrics of a split on a terminal.
MAX_SHOWN = 2

#: The maximum number of jobs on a terminal, and in the description of the sweep's run.
MAX_ROWS = 50

#: The mark of the best job.
BEST_MARK = "*"

SEED = "seed"


class SweepReport:
    """A table with a row for each job, the best first. Repeats of a job share a row with their medians.

    Args:
        metric: ranks the jobs. Jobs that did not finish are last.
        mode: whether smaller or larger values of the metric are better; None if unknown.
        same_losses: whether jobs that do the same work must start with the same losses.

    Attributes:
        best: the best run with its job; None if no job has the metric.
        choices: the keys that vary, whose values are columns.
        finished: the number of jobs with nothing left to do.
        differences: a line for each job that starts with different losses.
        rows: the cells of each row by column.
        seeds: the mean and the deviation of each configuration, if the seed varies.
    """

    def __init__(
        self,
        jobs: Sequence[tuple[LedgerEntry, RunState]],
        swept: Sequence[str],
        metric: str = "val/loss",
        mode: Mode | None = "min",
        same_losses: bool = False,
    ) -> None:
        self.metric = metric
        self._mode = mode
        self._swept = swept
        self.finished = sum(entry.is_finished for entry, _ in jobs)
        self._ranked = rank_jobs(group_repeats(jobs), metric, mode)
        self._are_repeated = False
        self._have_folds = False
        for job in self._ranked:
            self._are_repeated |= len(job.runs) > 1
            self._have_folds |= job.are_folds
        self.best = self._find_best()
        self.choices = choose_report_columns([run for _, run in jobs], swept)
        loss_check = check_first_losses(jobs, swept) if same_losses else LossCheck()
        self.differences = loss_check.differences
        self._scaling = ScalingEfficiency(self._ranked, self.choices)
        self.rows = [self._make_row(job, loss_check) for job in self._ranked]
        self.columns = self._list_columns()
        self.seeds = summarize_seeds(self._ranked, self.choices, choose_results(self.columns, metric, MAX_SHOWN))

    def _find_best(self) -> tuple[LedgerEntry, RunState] | None:
        if self._mode is None or not self._ranked:
            return None
        first = self._ranked[0]
        if first.score(self.metric) is None:
            return None
        return first.find_best(self.metric, self._mode == "max")

    def _list_columns(self) -> list[str]:
        """Lists the columns that have values, in the order of the rows."""
        return [column for column in list_columns(self.rows) if self._has_values(column)]

    def _has_values(self, column: str) -> bool:
        if column == "efficiency":  # it may be blank: a note says why
            return self._scaling.has_replicas
        return any(row.get(column) not in (None, "") for row in self.rows)

    def _make_row(self, job: RepeatedJob, loss_check: LossCheck) -> Row:
        """Returns the cells of a job by column."""
        numbers = job.numbers
        row: Row = {}
        row["best"] = BEST_MARK if job is self.best_job else ""  # MLflow's table shows None as null
        row["job"] = numbers[0] if len(numbers) == 1 else " ".join(map(str, numbers))
        for key in self.choices:
            row[key] = job.find_value(key)
        row["status"] = job.status
        row["first losses"] = choose_verdict(job, loss_check)
        metrics = job.metrics
        for key in choose_results(metrics, self.metric, MAX_RESULTS):
            row[key] = metrics[key]
        deviation = job.spread(self.metric)
        if deviation is not None:
            row["deviation"] = deviation
        self._add_measurements(row, job)
        row["replicas"] = count_replicas(job)
        row["efficiency"] = self._scaling.measure(job)
        row["run"] = job.run_ids
        row["reason"] = job.reason
        return row

    def _add_measurements(self, row: Row, job: RepeatedJob) -> None:
        """Adds the columns of `METRIC_COLUMNS`. With repeats the speed has its range as well."""
        metrics = job.metrics
        for column, metric in METRIC_COLUMNS.items():
            if column != "examples/s":
                row[column] = metrics.get(metric)
                continue
            rates = job.rates
            row[column] = job.rate
            if self._are_repeated:
                row["least"] = min(rates, default=None)
                row["most"] = max(rates, default=None)
                row["counted"] = len(rates)

    def write(self, folder: Path) -> list[Path]:
        """Writes the table as Markdown, as CSV and as JSON for MLflow's UI; returns the files."""
        texts = {MARKDOWN: self.markdown(), CSV: self.csv(), TABLE: self.table()}
        paths = []
        for name, text in texts.items():
            path = folder / name
            path.write_text(text)
            paths.append(path)
        return paths

    def draw(self, folder: Path) -> list[Path]:
        """Draws plots of the jobs as SVG files in a folder, and returns the files."""
        from scaleflow.sweep.plots import draw_plots

        return draw_plots(self.labelled, self.choices, folder)

    def tags(self) -> Mapping[str, str]:
        """Returns the tags that make MLflow's UI show the table."""
        return {TABLES_TAG: json.dumps([{"path": TABLE, "type": "table"}])}

    @property
    def shown(self) -> list[str]:
        """The columns for a terminal, and for the description of the sweep's run."""
        results = choose_results(self.columns, self.metric, MAX_SHOWN)
        shown = []
        for column in self.columns:
            is_hidden = column in HIDDEN_COLUMNS or column.startswith(("train/", "val/", "test/"))
            if column in results or not is_hidden:
                shown.append(column)
        return shown

    def markdown(self) -> str:
        lines = [format_table(format_cells(self.rows, self.columns)), ""]
        if self.seeds:
            lines += [format_table(format_cells(self.seeds)), ""]
        lines += self._notes()
        for line in self.differences:
            lines.append(f"THE FIRST LOSSES DIFFER: {line}")
        return "\n".join(lines) + "\n"

    @property
    def best_job(self) -> RepeatedJob | None:
        """All runs of the best job."""
        return self._ranked[0] if self.best is not None else None

    @property
    def labelled(self) -> list[tuple[str, RepeatedJob]]:
        """All jobs with their labels, the best first."""
        return [(job.entry.label(self._swept), job) for job in self._ranked]

    def _notes(self) -> list[str]:
        notes = [self.ranking]
        if self._scaling.has_replicas:
            reason = self._scaling.reason
            blank = f"; blank: {reason}" if reason else ""
            notes.append(f"efficiency: examples/s of each replica, divided by those of a single replica{blank}")
        if self._have_folds:
            notes.append("with folds: means, the deviation over the folds, and the lowest and highest examples/s")
        elif self._are_repeated:
            notes.append("with repeats: medians, and the lowest and highest examples/s")
        return notes + self._compare_validation()

    def _compare_validation(self) -> list[str]:
        """Returns a note if the metric that ranks the jobs is measured on different examples."""
        if not self.metric.startswith("val/"):
            return []
        counts = set()
        for job in self._ranked:
            if job.params:  # an interrupted sweep has jobs that have not begun
                counts.add(int(job.params.get("resolved.examples.validation", 0)))
        if len(counts) < 2:
            return []
        listed = " and ".join(f"{count:,}" for count in sorted(counts))
        return [f"{self.metric} is not of the same examples in all jobs ({listed}); dataset.validation=0.1 makes it so"]

    @property
    def ranking(self) -> str:
        """Describes the best job, or why there is none."""
        if self.best is not None:
            order = "largest" if self._mode == "max" else "smallest"
            return f"best job ({BEST_MARK}): the one with the {order} {self.metric} (sweep.metric)"
        if self._mode is None:
            why = f"scaleflow does not know whether larger values of sweep.metric={self.metric} are better"
            return f"no best job: {why}; set sweep.mode=max or min"
        names = choose_results(self.columns, "", MAX_RESULTS)
        hint = f"; the metrics are {', '.join(names)}" if names else ""
        return f"no best job: no finished job has sweep.metric={self.metric}{hint}"

    def describe_best(self) -> str:
        """Names the best job with its metric: `#2 model.units=256, val/loss 0.3837`. Returns "" if no job is best."""
        if self.best is None:
            return ""
        entry, run = self.best
        title = f"#{entry.number} {entry.label(self._swept)}, {self.metric}"
        job = self._ranked[0]
        deviation = job.spread(self.metric)
        if deviation is None:
            return f"{title} {format_number(run.metrics[self.metric])}"
        score = job.score(self.metric)
        value = run.metrics[self.metric] if score is None else score
        return f"{title} {format_number(value)} (deviation {format_number(deviation)} over {len(job.runs)} folds)"

    def _list_cells(self) -> list[list[Cell]]:
        """Returns the cells of each row in the order of the columns."""
        cells = []
        for row in self.rows:
            cells.append(list(map(row.get, self.columns)))
        return cells

    def csv(self) -> str:
        return format_csv(self.columns, self._list_cells())

    def table(self) -> str:
        """Returns JSON as `mlflow.log_table` writes it, with five digits to fit MLflow's UI. The CSV has all digits."""
        data = [list(map(round_number, cells)) for cells in self._list_cells()]
        columns = [column.replace(".", "/") for column in self.columns]  # MLflow's UI leaves a column with a dot blank
        return json.dumps({"columns": columns, "data": data})

    def show(self, stream: TextIO) -> None:
        """Prints the tables and the notes, in colour on a terminal."""
        from rich.console import Console

        console = Console(file=stream, highlight=False)
        width = measure_width(stream)
        rows = self.rows[:MAX_ROWS]
        self._show_table(console, format_cells(rows, self.shown), [choose_style(row) for row in rows], width)
        if len(self.rows) > MAX_ROWS:
            console.print(f"and {len(self.rows) - MAX_ROWS:,} more rows in {MARKDOWN}")
        if self.seeds:
            console.print("over the seeds")
            self._show_table(console, format_cells(self.seeds), [None] * len(self.seeds), width)
        for note in self._list_shown_notes():
            console.print("\n".join(wrap_line(note, width)), markup=False, soft_wrap=True)

    def _show_table(
        self, console: Console, cells: Sequence[Sequence[str]], styles: Sequence[str | None], width: int | None
    ) -> None:
        """Prints a table, with a style for each of its rows."""
        left_aligned = [name for name in cells[0] if name in TEXT_COLUMNS or name in self.choices]
        head, rows = lay_out_table(cells, left_aligned, width, less=LESS_IMPORTANT)
        for lines, style in zip([head, *rows], ["bold", *styles], strict=True):
            if lines:
                console.print("\n".join(lines), style=style, markup=False, soft_wrap=True)

    def _list_shown_notes(self) -> list[str]:
        """Lists the notes for a terminal."""
        notes = []
        if self._scaling.reason and self._scaling.has_replicas and len(self.rows) > 1:
            notes.append(f"efficiency: {self._scaling.reason}")
        notes += self._compare_validation()
        if self.best is None:
            notes.append(self.ranking)
        return notes


class ScalingEfficiency:
    """Compares the speed of jobs with the speed of the same work on one replica.

    Args:
        jobs: the jobs of the sweep.
        choices: the keys that vary. Without the keys of `SCALE_SECTIONS` they identify the work of a job.

    Attributes:
        has_replicas: whether a job has several replicas. Otherwise the efficiency is meaningless.
        reason: why no job has an efficiency; empty if one may have it.
    """

    def __init__(self, jobs: Sequence[RepeatedJob], choices: Sequence[str]) -> None:
        self._keys = [key for key in choices if not is_under(key, SCALE_SECTIONS)]
        self._single_rates: dict[tuple[str, ...], float] = {}  # the highest rate on one replica, by work
        self.has_replicas = False
        for job in jobs:
            if job.params.get("resolved.replicas", "1") != "1":
                self.has_replicas = True
            if count_replicas(job) == 1 and job.rate and job.is_finished:
                work = self._identify_work(job)
                self._single_rates[work] = max(job.rate, self._single_rates.get(work, 0.0))
        self.reason = "" if self._single_rates else "no finished job of the sweep has one replica"

    def _identify_work(self, job: RepeatedJob) -> tuple[str, ...]:
        """Returns the values that identify the work of a job."""
        return job.find_values(self._keys)

    def measure(self, job: RepeatedJob) -> float | None:
        """Returns examples/s per replica, divided by the rate of the same work on one replica; None if unknown."""
        single_rate = self._single_rates.get(self._identify_work(job))
        replicas = count_replicas(job)
        if not job.rate or not replicas or not single_rate:
            return None
        return job.rate / (replicas * single_rate)


def count_replicas(job: RepeatedJob) -> int | None:
    """Returns the number of replicas of a job; None if it never became ready."""
    replicas = job.params.get("resolved.replicas")
    return int(replicas) if replicas else None


def choose_verdict(job: RepeatedJob, check: LossCheck) -> str | None:
    """Returns the worst verdict on the first losses of the runs of a job; None if none of them has one."""
    verdicts = list(map(check.verdicts.get, job.numbers))
    for verdict in ("DIFFER", "same", "not compared"):
        if verdict in verdicts:
            return verdict
    return None


def summarize_seeds(jobs: Sequence[RepeatedJob], choices: Sequence[str], metrics: Sequence[str]) -> list[Row]:
    """Returns a row for each configuration that finished with several seeds, in the order of the jobs.

    Args:
        jobs: the jobs, the best first.
        metrics: the metrics to summarize.

    Returns:
        Rows with the values of the keys, the number of `seeds`, and `METRIC mean` and `METRIC deviation` (of a sample,
        with n - 1). Empty if the seed does not vary.
    """
    if SEED not in choices:
        return []
    keys = list(choices)
    keys.remove(SEED)
    groups: dict[tuple[str, ...], list[RepeatedJob]] = {}
    for job in jobs:
        if job.is_finished:
            groups.setdefault(job.find_values(keys), []).append(job)
    rows = []
    for configuration, members in groups.items():
        seeds = {job.params.get(SEED) for job in members}
        if len(seeds) > 1:
            row: Row = {**dict(zip(keys, configuration, strict=True)), "seeds": len(members)}
            rows.append(row | summarize_metrics(members, metrics))
    return rows


def summarize_metrics(jobs: Sequence[RepeatedJob], metrics: Sequence[str]) -> Row:
    """Returns the mean and the deviation of each metric that several jobs have."""
    values: dict[str, list[float]] = {metric: [] for metric in metrics}
    for job in jobs:
        results = drop_intervals(job.metrics)
        for metric in metrics:
            if metric in results:
                values[metric].append(results[metric])
    cells: Row = {}
    for metric in metrics:
        if len(values[metric]) > 1:
            cells[f"{metric} mean"] = mean(values[metric])
            cells[f"{metric} deviation"] = stdev(values[metric])
    return cells


def choose_results(metrics: Iterable[str], metric: str, most: int) -> list[str]:
    """Chooses metrics to show: the metric that ranks the jobs, then metrics of validation and test, or of training.

    A run has the metrics of `RARE_CLASS_METRICS` if a class is rare, or if the user asks for them. So they come before
    the others of their split.

    Args:
        metric: the metric that ranks the jobs. It is left out if it has a column of `METRIC_COLUMNS` anyway. The speed
            is never left out, because the column examples/s has other values: without the first epoch.
        most: the maximum number of metrics of a split.
    """
    names = list(metrics)
    chosen = []
    has_column = metric != RATE and metric in METRIC_COLUMNS.values()
    if metric in names and not has_column:
        chosen.append(metric)
    held_out = choose_split_results(names, "val", most) + choose_split_results(names, "test", most)
    chosen += held_out or choose_split_results(names, "train", most)
    return list(dict.fromkeys(chosen))


def choose_split_results(metrics: Sequence[str], split: str, most: int) -> list[str]:
    """Returns the first metrics of a split, in their order. Metrics of a rare class have precedence."""
    names = []
    rare_class = []
    others = []
    for name in metrics:
        if name.startswith(f"{split}/") and not name.endswith(INTERVAL):
            names.append(name)
            is_of_rare_class = name.rpartition("/")[2] in RARE_CLASS_METRICS
            if is_of_rare_class:
                rare_class.append(name)
            else:
                others.append(name)
    room = max(0, most - len(rare_class))
    chosen = rare_class + others[:room]
    return [name for name in names if name in chosen]


def make_loading_row(model_uri: str | None, store: str | None, folder: Path) -> tuple[str, str]:
    """Returns a label and a line of Python that loads the model of a run, from the store or else from its folder.

    If the model is in neither, the line is the folder of the run.
    """
    if model_uri is not None and store is not None:
        address = json.dumps(drop_credentials(store))
        first = "" if is_default_store(store) else f"mlflow.set_tracking_uri({address}); "
        return "load it", f"{first}mlflow.pyfunc.load_model({json.dumps(model_uri)})"
    model = RunFolder(folder).model
    loads = {"keras.models.load_model": model / "model.keras", "tf.saved_model.load": model / "saved_model"}
    for load, path in loads.items():
        if path.exists():
            return "load it", f"{load}({json.dumps(os.path.relpath(path))})"
    return "folder", os.path.relpath(folder)


def choose_style(row: Mapping[str, Cell]) -> str | None:
    """Returns the style of a row on a terminal."""
    if row.get("first losses") == "DIFFER":
        return "bold red"
    return "bold green" if row["best"] else None


def choose_report_columns(runs: Sequence[RunState], swept: Sequence[str]) -> list[str]:
    """Lists the params that vary: the swept keys, and for a swept `experiment` all keys that differ. The seed is last.

    Args:
        runs: the runs of the jobs.
    """
    columns = [key for key in swept if key not in ("experiment", SEED)]
    if "experiment" in swept:
        columns += list_differing_params(runs)
    if SEED in swept:
        columns.append(SEED)
    return list(dict.fromkeys(columns))


def list_differing_params(runs: Sequence[RunState]) -> list[str]:
    """Lists the keys of the config that do not have the same value in all runs."""
    params_of_runs = [run.params for run in runs if run.params]
    differing = []
    for key in list_columns(params_of_runs):
        is_setting = "." in key and not key.startswith(("resolved.", "tracking.", "sweep."))
        if is_setting and len({params.get(key) for params in params_of_runs}) > 1:
            differing.append(key)
    return differing


def list_columns(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """Lists the keys of rows in the order of their first appearance."""
    columns: dict[str, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(row))
    return list(columns)


def format_cells(rows: Sequence[Mapping[str, Cell]], columns: Sequence[str] = ()) -> list[list[str]]:
    """Returns a table as text: its head and its rows. Without `columns` it has the columns of all rows."""
    if not columns:
        columns = list_columns(rows)
    cells = [list(columns)]
    for row in rows:
        cells.append([format_cell(row.get(column), column) for column in columns])
    return cells


def format_cell(value: Any, column: str = "") -> str:
    """Formats a cell for people."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if column == "efficiency":
        return f"{value:.2f}"
    if column in (*RATE_COLUMNS, RATE) and abs(value) >= 1000:
        return f"{value:,.0f}"
    return format_number(value)


def round_number(value: Cell) -> Cell:
    """Rounds a number to five digits; None for NaN and infinity, which JSON lacks."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None
