"""The report of a sweep: a table of its jobs as Markdown, CSV and JSON, on the terminal, and as plots.

It also checks that jobs that do the same work start with the same losses, as every synchronous strategy must. A
strategy can look fast because it trains on other data. The check compares `train/loss`, the mean over the first epoch
so far, at the steps at which both jobs logged it: at least the first step and the end of the epoch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TextIO

from scaleflow.config.parse import is_under
from scaleflow.interfaces import Mode
from scaleflow.interfaces.formatting import format_csv, format_number
from scaleflow.launcher.lines import lay_out_table, measure_width, wrap_line
from scaleflow.launcher.recording.description import format_table
from scaleflow.runs import RunFolder
from scaleflow.runs.identity import IGNORED_KEYS
from scaleflow.runs.state import INTERVAL, RATE, RunState, drop_intervals
from scaleflow.sweep.ledger import LedgerEntry, select_swept
from scaleflow.sweep.ranking import RepeatedJob, group_repeats, rank_jobs
from scaleflow.tracking.connection import is_default_store
from scaleflow.tracking.uri import drop_credentials

LOSS = "train/loss"

#: The largest difference of two losses, relative to the loss if that is above 1. In float32 the order of summation
#: makes small differences, which updates amplify. The significands of bfloat16 and float16 have 8 and 11 bits.
FLOAT32_TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 5e-2

GLOBAL_BATCH = "resolved.global_batch_size"

#: Params that do not affect the losses.
LOSS_NEUTRAL_PARAMS = (
    *("strategy", "hardware", "cluster", "precision", *IGNORED_KEYS, "resolved", "experiment"),
    *("training.batch_size", "training.global_batch_size", "training.accumulate", "training.steps_per_loop"),
)

Jobs = Sequence[tuple[LedgerEntry, RunState]]


def check_first_losses(jobs: Jobs, swept: Sequence[str]) -> tuple[dict[int, str], list[str]]:
    """Compares the first losses of the jobs of a sweep, warm-ups included: those that do the same work with the first
    of them that has one replica, or with the first one if none has.

    Returns:
        By the number of a job `same`, `DIFFER`, or `not compared` if no other job does the same work or has losses at
        the same steps; nothing about jobs without losses. And a line for each job that differs.
    """
    verdicts: dict[int, str] = {}
    differences: list[str] = []
    alike: dict[frozenset[tuple[str, str]], list[tuple[LedgerEntry, RunState]]] = {}
    for entry, run in jobs:
        if list_first_losses(run):
            alike.setdefault(describe_work(run), []).append((entry, run))
    for group in alike.values():
        single_replica_jobs = (job for job in group if job[1].params.get("resolved.replicas") == "1")
        first, reference = next(single_replica_jobs, group[0])
        verdicts |= dict.fromkeys((entry.number for entry, _ in group), "not compared")
        for entry, run in group:
            if entry is first or not list_first_losses(run).keys() & list_first_losses(reference).keys():
                continue
            difference = find_difference(run, reference)
            verdicts |= {first.number: "same", entry.number: "DIFFER" if difference else "same"}
            if difference:
                names = [f"#{each.number} {make_label(each, swept)}" for each in (entry, first)]
                differences.append(f"{names[0]} has {difference} of {names[1]}")
    return verdicts, differences


def describe_work(run: RunState) -> frozenset[tuple[str, str]]:
    """Returns the params that decide a job's losses: all except `LOSS_NEUTRAL_PARAMS`, and the global batch size."""
    params = {key: value for key, value in run.params.items() if not is_under(key, LOSS_NEUTRAL_PARAMS)}
    return frozenset({**params, GLOBAL_BATCH: run.params.get(GLOBAL_BATCH, "")}.items())


def find_difference(run: RunState, other: RunState) -> str:
    """Describes the first step at which the losses of two runs differ; empty if they do not."""
    losses, others = list_first_losses(run), list_first_losses(other)
    is_full = all(each.params.get("precision", "float32") == "float32" for each in (run, other))
    allowed = FLOAT32_TOLERANCE if is_full else HALF_PRECISION_TOLERANCE
    for step in sorted(losses.keys() & others.keys()):
        loss, other_loss = losses[step], others[step]
        if not abs(loss - other_loss) <= allowed * max(1.0, abs(other_loss)):  # also true for NaN
            return (
                f"a loss of {loss:.6g} at step {step}, which differs by more than {allowed:g} from the {other_loss:.6g}"
            )
    return ""


def list_first_losses(run: RunState) -> dict[int, float]:
    """Returns the losses of the first epoch by step."""
    last = run.epoch_steps
    return {step: loss for step, loss in run.curves.get(LOSS, ()) if last is None or step <= last}


SEED = "seed"

Row = dict[str, str | int | float | None]


def summarize_seeds(jobs: Sequence[RepeatedJob], choices: Sequence[str], metrics: Sequence[str]) -> list[Row]:
    """Returns a row for each configuration that finished with several seeds, in the order of the jobs.

    Args:
        jobs: the jobs, the best first.
        metrics: whose means and deviations are of interest.

    Returns:
        Rows with the values of the keys, the number of `seeds`, and `METRIC mean` and `METRIC deviation` (of a sample,
        with n - 1). Empty if the seed does not vary.
    """
    if SEED not in choices:
        return []
    keys = [key for key in choices if key != SEED]
    groups: dict[tuple[str, ...], list[RepeatedJob]] = {}
    for job in jobs:
        if job.is_finished:
            groups.setdefault(tuple(job.find_value(key) or "" for key in keys), []).append(job)
    rows = []
    for values, members in groups.items():
        if len({job.params.get(SEED) for job in members}) < 2:
            continue
        row: Row = {**dict(zip(keys, values, strict=True)), "seeds": len(members)}
        for metric in metrics:
            found = [value for job in members if (value := drop_intervals(job.metrics).get(metric)) is not None]
            if len(found) > 1:
                row |= {f"{metric} mean": mean(found), f"{metric} deviation": stdev(found)}
        rows.append(row)
    return rows


Cell = str | int | float | None

#: The files that a report is written to, in the sweep's folder.
MARKDOWN, CSV, TABLE = "report.md", "report.csv", "report.json"

#: The tag in which MLflow's UI looks for the tables of a run.
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

#: Columns of text.
TEXT_COLUMNS = ("best", "status", "first losses")

#: Columns of examples/s, which have no decimals.
RATE_COLUMNS = ("examples/s", "least", "most")

#: Columns that a terminal has no room for.
HIDDEN_COLUMNS = ("run", "reason", "step ms p50", "step ms p95", "host MB", "device MB", "replicas")

#: Columns that a narrow terminal leaves out, the first one first.
LESS_IMPORTANT = ("first step s", "step ms", "examples/s")

#: Metrics that the report of a rare class adds to a run. Its accuracy says little.
RARE_CLASS_METRICS = ("roc_auc", "average_precision")

#: The most metrics of a split in the table, and on a terminal.
MAX_RESULTS, MAX_SHOWN = 4, 2

#: The most jobs on a terminal, and in the description of the sweep's run.
MAX_ROWS = 50

#: The mark of the best job.
BEST_MARK = "*"


class SweepReport:
    """A table with a row for each job, the best first. The repeats of a job share a row with their medians.

    Args:
        metric: ranks the jobs. Those that did not finish are last.
        mode: whether smaller or larger values of it are better; None: not known.
        same_losses: whether jobs that do the same work must start with the same losses.

    Attributes:
        best: the best run with its job; None if there is none.
        choices: the keys that vary, whose values are columns.
        finished: how many jobs have nothing left to do.
        differences: a line for each job that starts with different losses.
        reason: why there is no efficiency; empty if there is one.
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
        self.finished = sum(entry.is_finished for entry, _ in jobs)
        self._jobs = group_repeats(jobs)
        self.metric = metric
        self._mode = mode
        self._ranked = ranked = rank_jobs(self._jobs, metric, mode)
        has_best = mode is not None and bool(ranked) and ranked[0].score(metric) is not None
        self.best = ranked[0].find_best(metric, mode == "max") if has_best else None
        self.choices = choose_report_columns([run for _, run in jobs], swept)
        self._swept = swept
        self._are_repeated = any(len(each.runs) > 1 for each in self._jobs)
        self._verdicts, self.differences = check_first_losses(jobs, swept) if same_losses else ({}, [])
        self._base, self.reason = self._one_replica()
        self.rows = [self._row(each, is_best=has_best and each is ranked[0]) for each in ranked]
        self.columns = [key for key in dict.fromkeys(k for row in self.rows for k in row) if self._has_values(key)]
        self.seeds = summarize_seeds(ranked, self.choices, choose_results(self.columns, metric, MAX_SHOWN))

    def _has_values(self, column: str) -> bool:
        """Whether a column has values. With several replicas a note explains why the efficiency is blank."""
        if column == "efficiency" and not self._has_replicas:
            return False
        return column == "efficiency" or any(row.get(column) not in (None, "") for row in self.rows)

    @property
    def _has_replicas(self) -> bool:
        """Whether a job has several replicas. Otherwise the efficiency says nothing."""
        return any(job.params.get("resolved.replicas", "1") != "1" for job in self._jobs)

    def _row(self, job: RepeatedJob, is_best: bool) -> dict[str, Cell]:
        numbers = [entry.number for entry, _ in job.runs]
        row: dict[str, Cell] = {"best": BEST_MARK if is_best else ""}  # MLflow's table shows None as null
        row["job"] = numbers[0] if len(numbers) == 1 else " ".join(map(str, numbers))
        row |= {key: job.find_value(key) for key in self.choices}
        row["status"] = job.status
        verdicts = {self._verdicts.get(number) for number in numbers}
        row["first losses"] = next((each for each in ("DIFFER", "same", "not compared") if each in verdicts), None)
        metrics = job.metrics
        row |= {key: metrics[key] for key in choose_results(metrics, self.metric, MAX_RESULTS)}
        if (spread := job.spread(self.metric)) is not None:
            row["deviation"] = spread
        for column, key in METRIC_COLUMNS.items():
            row[column] = job.rate if column == "examples/s" else metrics.get(key)
            if column == "examples/s" and self._are_repeated:
                row |= {"least": min(job.rates, default=None), "most": max(job.rates, default=None)}
                row["counted"] = len(job.rates)
        row["replicas"] = int(replicas) if (replicas := job.params.get("resolved.replicas")) else None
        row["efficiency"] = self._efficiency(job)
        row["run"] = job.run_ids
        row["reason"] = job.reason
        return row

    def _one_replica(self) -> tuple[dict[tuple[str, ...], float], str]:
        """Returns the highest examples/s on one replica for each kind of work, and why there are none."""
        rates: dict[tuple[str, ...], float] = {}
        for job in self._jobs:
            if job.params.get("resolved.replicas") == "1" and job.rate and job.is_finished:
                key = self._work(job)
                rates[key] = max(job.rate, rates.get(key, 0.0))
        return rates, "" if rates else "no finished job of the sweep has one replica"

    def _work(self, job: RepeatedJob) -> tuple[str, ...]:
        """Returns what identifies the work of a job: the values that vary, except those of `SCALE_SECTIONS`."""
        return tuple(job.find_value(key) or "" for key in self.choices if not is_under(key, SCALE_SECTIONS))

    def _efficiency(self, job: RepeatedJob) -> float | None:
        """Returns examples/s per replica, divided by those of the same work on one replica; None if not known."""
        single_rate = self._base.get(self._work(job))
        replicas = job.params.get("resolved.replicas")
        return job.rate / (int(replicas) * single_rate) if job.rate and replicas and single_rate else None

    def write(self, folder: Path) -> list[Path]:
        """Writes the table as Markdown, as CSV and as JSON for MLflow's UI; returns the files."""
        forms = {MARKDOWN: self.markdown(), CSV: self.csv(), TABLE: self.table()}
        for name, text in forms.items():
            (folder / name).write_text(text)
        return [folder / name for name in forms]

    def draw(self, folder: Path) -> list[Path]:
        """Draws plots of the jobs as SVG files in a folder, and returns the files."""
        from scaleflow.sweep.plots import draw_plots

        return draw_plots(self.labelled, self.choices, folder)

    def tags(self) -> Mapping[str, str]:
        """The tags with which MLflow's UI shows the table."""
        return {TABLES_TAG: json.dumps([{"path": TABLE, "type": "table"}])}

    @property
    def shown(self) -> list[str]:
        """The columns for a terminal, and for the description of the sweep's run."""
        results = choose_results(self.columns, self.metric, MAX_SHOWN)
        return [
            key
            for key in self.columns
            if key in results or not (key in HIDDEN_COLUMNS or key.startswith(("train/", "val/", "test/")))
        ]

    def markdown(self) -> str:
        notes = [*self._notes(), *(f"THE FIRST LOSSES DIFFER: {line}" for line in self.differences)]
        seeds = ["", format_table(format_cells(self.seeds)), ""] if self.seeds else [""]
        return "\n".join([format_table(format_cells(self.rows, self.columns)), *seeds, *notes]) + "\n"

    @property
    def best_job(self) -> RepeatedJob | None:
        """All runs of the best job."""
        return self._ranked[0] if self.best is not None else None

    @property
    def labelled(self) -> list[tuple[str, RepeatedJob]]:
        """All jobs with their labels, the best first."""
        return [(make_label(each.entry, self._swept), each) for each in self._ranked]

    def _notes(self) -> list[str]:
        notes = [self.ranking]
        if self._has_replicas:
            blank = f"; blank: {self.reason}" if self.reason else ""
            notes.append(f"efficiency: examples/s of each replica, divided by those of a single replica{blank}")
        if any(each.are_folds for each in self._jobs):
            notes.append("with folds: means, the deviation over the folds, and the lowest and highest examples/s")
        elif self._are_repeated:
            notes.append("with repeats: medians, and the lowest and highest examples/s")
        return [*notes, *self._compare_validation()]

    def _compare_validation(self) -> list[str]:
        """Returns a note if the metric that ranks the jobs is not of the same examples for all."""
        begun = [job for job in self._ranked if job.params]  # an interrupted sweep has jobs that have not begun
        counts = {int(job.params.get("resolved.examples.validation", 0)) for job in begun}
        if len(counts) < 2 or not self.metric.startswith("val/"):
            return []
        found = " and ".join(f"{count:,}" for count in sorted(counts))
        return [f"{self.metric} is not of the same examples in all jobs ({found}); dataset.validation=0.1 makes it so"]

    @property
    def ranking(self) -> str:
        """Which job is the best, or why there is none."""
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
        """Names the best job with its metric, such as `#2 model.units=256, val/loss 0.3837`; empty if there is none."""
        if self.best is None:
            return ""
        entry, run = self.best
        job = self._ranked[0]
        spread, score = job.spread(self.metric), job.score(self.metric)
        value = format_number(run.metrics[self.metric] if spread is None or score is None else score)
        over = "" if spread is None else f" (deviation {format_number(spread)} over {len(job.runs)} folds)"
        return f"#{entry.number} {make_label(entry, self._swept)}, {self.metric} {value}{over}"

    def csv(self) -> str:
        return format_csv(self.columns, ([row.get(key) for key in self.columns] for row in self.rows))

    def table(self) -> str:
        """Returns JSON as `mlflow.log_table` writes it, with five digits to fit MLflow's UI. The CSV has all digits."""
        data = [[format_figure(row.get(key)) for key in self.columns] for row in self.rows]
        columns = [key.replace(".", "/") for key in self.columns]  # a column with a dot is blank in MLflow's UI
        return json.dumps({"columns": columns, "data": data})

    def show(self, stream: TextIO) -> None:
        """Prints the tables, in colour on a terminal."""
        from rich.console import Console

        console = Console(file=stream, highlight=False)
        width = measure_width(stream)

        def show_table(cells: list[list[str]], styles: Sequence[str | None]) -> None:
            left = [name for name in cells[0] if name in TEXT_COLUMNS or name in self.choices]
            head, rows = lay_out_table(cells, left, width, less=LESS_IMPORTANT)
            for lines, style in zip([head, *rows], ["bold", *styles], strict=True):
                if lines:
                    console.print("\n".join(lines), style=style, markup=False, soft_wrap=True)

        show_table(format_cells(self.rows[:MAX_ROWS], self.shown), [choose_style(row) for row in self.rows[:MAX_ROWS]])
        if len(self.rows) > MAX_ROWS:
            console.print(f"and {len(self.rows) - MAX_ROWS:,} more rows in {MARKDOWN}")
        if self.seeds:
            console.print("over the seeds")
            show_table(format_cells(self.seeds), [None] * len(self.seeds))
        notes = [f"efficiency: {self.reason}"] if self.reason and self._has_replicas and len(self.rows) > 1 else []
        notes += self._compare_validation()
        for note in [*notes, *([self.ranking] if self.best is None else [])]:
            console.print("\n".join(wrap_line(note, width)), markup=False, soft_wrap=True)


def choose_results(metrics: Iterable[str], metric: str, most: int) -> list[str]:
    """Chooses the metrics to show: the given one, and the first of validation and of the test, or of the training.

    A run has the metrics of `RARE_CLASS_METRICS` if a class is rare, or if the user asks for them. So they come before
    the others of their split.

    Args:
        metric: the one that ranks the jobs. Columns of `METRIC_COLUMNS` have other names. The column examples/s also
            has other values: it leaves out the first epoch.
    """

    def of_split(split: str) -> list[str]:
        names = [key for key in metrics if key.startswith(f"{split}/") and not key.endswith(INTERVAL)]
        of_rare = [key for key in names if key.rpartition("/")[2] in RARE_CLASS_METRICS]
        others = [key for key in names if key not in of_rare]
        chosen = [*of_rare, *others[: max(0, most - len(of_rare))]]
        return [key for key in names if key in chosen]

    has_column = metric != RATE and metric in METRIC_COLUMNS.values()
    first = [metric] if metric in metrics and not has_column else []
    return [*dict.fromkeys([*first, *((of_split("val") + of_split("test")) or of_split("train"))])]


def make_loading_row(model_uri: str | None, store: str | None, folder: Path) -> tuple[str, str]:
    """Returns a label, and a line of Python that loads the model of a run: from the store, or from its folder if it is
    not there. If it is in neither, it is the folder.
    """
    if model_uri is not None and store is not None:
        address = json.dumps(drop_credentials(store))
        first = "" if is_default_store(store) else f"mlflow.set_tracking_uri({address}); "
        return "load it", f"{first}mlflow.pyfunc.load_model({json.dumps(model_uri)})"
    model = RunFolder(folder).model
    loads = {"keras.models.load_model": model / "model.keras", "tf.saved_model.load": model / "saved_model"}
    calls = [f"{load}({json.dumps(os.path.relpath(path))})" for load, path in loads.items() if path.exists()]
    return ("load it", calls[0]) if calls else ("folder", os.path.relpath(folder))


def choose_style(row: Mapping[str, Cell]) -> str | None:
    """Returns the style of a row on a terminal."""
    if row.get("first losses") == "DIFFER":
        return "bold red"
    return "bold green" if row["best"] else None


def choose_report_columns(jobs: Sequence[RunState], swept: Sequence[str]) -> list[str]:
    """Lists the params that vary: the swept keys, and for a swept `experiment` all keys that differ."""
    keys = [key for key in swept if key not in ("experiment", "seed")]
    if "experiment" in swept:
        params_of_runs = [run.params for run in jobs if run.params]
        named = dict.fromkeys(key for params in params_of_runs for key in params if "." in key)
        settings = [key for key in named if not key.startswith(("resolved.", "tracking.", "sweep."))]
        keys += [key for key in settings if len({params.get(key) for params in params_of_runs}) > 1]
    return [*dict.fromkeys([*keys, *(["seed"] if "seed" in swept else [])])]


def make_label(entry: LedgerEntry, swept: Sequence[str]) -> str:
    return " ".join(select_swept(entry.overrides, swept)) or f"job {entry.number}"


def format_cells(rows: Sequence[Mapping[str, Cell]], columns: Sequence[str] = ()) -> list[list[str]]:
    """Returns a table as text: its head, and its rows; without columns it has those of all rows."""
    head = list(columns or dict.fromkeys(key for row in rows for key in row))
    return [head, *([format_cell(row.get(key), key) for key in head] for row in rows)]


def format_cell(value: Any, column: str = "") -> str:
    """Formats a cell for people."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if column == "efficiency":
        return f"{value:.2f}"
    return f"{value:,.0f}" if column in (*RATE_COLUMNS, RATE) and abs(value) >= 1000 else format_number(value)


def format_figure(value: Cell) -> Cell:
    """Rounds a number to five digits; None for NaN and infinity, which JSON lacks."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None
