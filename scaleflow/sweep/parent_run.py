"""Records the sweep's own run in the store: the parent of the runs of its jobs. It holds the report."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from scaleflow.config.interpolations import keep_values
from scaleflow.config.parse import is_under
from scaleflow.config.targets import bind_metrics
from scaleflow.config.words import quote_override
from scaleflow.errors import ConfigError
from scaleflow.interfaces import EvaluationOptions, Plan, Status
from scaleflow.interfaces.extras import guard_extra
from scaleflow.interfaces.figure import describe_figure
from scaleflow.launcher.command_exit import FAILED, REFUSED, TERMINATED
from scaleflow.launcher.display import Display
from scaleflow.launcher.launch import answer_run
from scaleflow.launcher.prepare import read_stage_tags
from scaleflow.launcher.recording.description import (
    LONGEST,
    cut_text,
    describe_command,
    describe_loading,
    format_code_block,
    format_long_table,
    join_parts,
)
from scaleflow.launcher.recording.recorder import CommandRun
from scaleflow.pages.files import to_csv, write_files
from scaleflow.pages.html import compose_section, make_page, make_table
from scaleflow.runs import RunFolder
from scaleflow.runs.provenance.collect import LaunchFacts
from scaleflow.runs.provenance.tags import make_run_tags, write_run_tags
from scaleflow.runs.run_name import name_sweep
from scaleflow.sweep.ledger import Ledger
from scaleflow.sweep.ranking import RepeatedJob
from scaleflow.sweep.sweep_report import MARKDOWN, MAX_ROWS, SweepReport, format_cells
from scaleflow.tracking.store import SWEPT
from scaleflow.tracking.tracked_runs import BEST, BEST_FOLDER, BEST_METRIC, BEST_OVERRIDES, BEST_STEPS

if TYPE_CHECKING:
    from scaleflow.evaluation.predictions import Predictions

#: The most jobs that are compared.
MOST_COMPARED = 5

#: The files, in the folder `evaluation` of the sweep.
PAGE, TABLE = "comparison.html", "comparison.csv"


def write_comparison(folder: Path, jobs: Sequence[tuple[str, RepeatedJob]]) -> tuple[list[Path], str]:
    """Compares the first of the finished jobs, which are sorted the best first, and writes a page and a table.

    Returns:
        The files, and a line about the two best jobs; nothing if fewer than two have kept predictions.
    """
    from scaleflow.evaluation.comparison import list_differences

    named = []
    for label, job in [each for each in jobs if each[1].is_finished][:MOST_COMPARED]:
        with contextlib.suppress(ConfigError):  # it kept none
            named.append((f"#{job.entry.number} {label}", load_job_predictions(folder, job)))
    if len(named) < 2:
        return [], ""
    rows = list_differences(named)
    about = f"The {len(named)} best jobs with predictions, on the same examples; differences are from the first."
    target = RunFolder(folder).evaluation
    target.mkdir(exist_ok=True)
    page = make_page("Best jobs of the sweep", about, [compose_section("Differences", make_table(rows))])
    contents = {PAGE: page, TABLE: to_csv(rows)}
    write_files(target, contents)
    return [target / name for name in contents], describe_second(rows, named[1][0])


def load_job_predictions(folder: Path, job: RepeatedJob) -> Predictions:
    """Reads the predictions that the first run of a job has kept, or those of all folds, each by the model that has not
    seen its rows. Raises ConfigError if there are none.
    """
    import numpy as np
    import pyarrow

    from scaleflow.evaluation.collector import EXAMPLE
    from scaleflow.evaluation.predictions import PREDICTIONS, load_predictions

    counted = [entry for entry, _ in job.without_warm_ups]
    used = counted if job.are_folds else counted[:1]
    parts = [load_predictions(RunFolder(folder / each.folder).evaluation / PREDICTIONS) for each in used]
    if len(parts) == 1:
        return parts[0]
    table = pyarrow.concat_tables([each.table for each in parts], promote_options="permissive")
    places = pyarrow.array(np.arange(len(table)))
    table = table.set_column(table.column_names.index(EXAMPLE), EXAMPLE, places)
    digest = hashlib.sha256(" ".join(each.digest for each in parts).encode()).hexdigest()[:16]
    examples = sum(each.examples for each in parts)
    return replace(parts[0], table=table, examples=examples, digest=digest, positions={})


class NoInputs:
    """An `InputReader` of predictions whose inputs are those of several runs."""

    def read_columns(self, examples: Any) -> Mapping[str, Any]:
        return {}

    def read_pictures(self, examples: Any) -> None:
        return None


def write_pooled(folder: Path, job: RepeatedJob, options: EvaluationOptions) -> list[Path]:
    """Writes the predictions of all folds of a job, and a report of them; returns the files.

    There are none if the folds have kept no predictions.
    """
    from scaleflow.evaluation.model_report import make_report
    from scaleflow.evaluation.predictions import PREDICTIONS, save_predictions

    target = RunFolder(folder).evaluation
    try:
        pooled = load_job_predictions(folder, job)
    except ConfigError:
        return []
    target.mkdir(exist_ok=True)
    save_predictions(target / PREDICTIONS, pooled)
    title, metrics = f"All {len(job.runs)} folds of the best job", bind_metrics(options.metrics or ())
    made = make_report(pooled, options, None, reader=NoInputs(), folder=target, title=title, metrics=metrics)
    return [target / PREDICTIONS, *(target / each for each in made.files)]


def describe_second(rows: Sequence[dict[str, Any]], label: str) -> str:
    """Returns a line about the second best job; empty if it is not compared."""
    row = next((row for row in rows if row["model"] == label and "difference" in row), None)
    if row is None:
        return ""
    verdict = "not more than noise" if row["more than noise"] == "no" else "more than noise"
    return f"{label} differs from the best by {row['metric']} {describe_figure(row['difference'])}: {verdict}"


#: The most jobs whose reasons are named, and the most characters of a reason.
MOST_REASONS, LONGEST_REASON = 5, 200

#: The exit code of a job by its status; none of a job that has not ended.
EXIT_CODES = {"FINISHED": 0, "PRUNED": 0, "FAILED": FAILED, "REFUSED": REFUSED, "KILLED": TERMINATED}


def describe_sweep(report: SweepReport, folder: Path) -> str:
    """Returns the description of a sweep."""
    store, model_uri = (report.best[1].record.get("uri"), report.best[1].model_uri) if report.best else (None, None)
    repeated = format_code_block("sh", quote_override("hydra.sweep.dir", folder))
    head = join_parts(
        [
            cut_text(f"**Best:** {report.describe_best()}" if report.best else report.ranking, MARKDOWN),
            describe_loading(store, model_uri, "the model of the best job"),
            f"To run what is missing, or more values, repeat the command below with\n\n{repeated}",
        ]
    )
    rest = join_parts([list_reasons(report), describe_command(RunFolder(folder))])
    cells = format_cells(report.rows[:MAX_ROWS], report.shown)
    room = LONGEST - len(head) - len(rest) - 4
    table = format_long_table(cells, room, f"{{:,}} more rows are in {MARKDOWN}.", total=len(report.rows))
    return "\n\n".join(filter(None, (head, table, rest)))


def list_reasons(report: SweepReport) -> str:
    """Returns a line for each of the first jobs that did not finish."""
    rows = [row for row in report.rows if row.get("reason")]
    lines = [f"- #{row['job']} {row['status']}: {str(row['reason'])[:LONGEST_REASON]}" for row in rows[:MOST_REASONS]]
    if len(rows) > MOST_REASONS:
        lines.append(f"- {len(rows) - MOST_REASONS} more, in {MARKDOWN}")
    return "\n".join(lines)


def describe_jobs(folder: Path) -> dict[str, Any]:
    """Returns what `--json` says of a sweep: what it says of the parent run, if there is one, and of each job."""
    jobs = []
    for entry in Ledger.load(RunFolder(folder)).entries:
        found = answer_run(folder / entry.folder)
        words = {"job": entry.number, "overrides": entry.overrides, "status": entry.status}
        code = EXIT_CODES.get(entry.status)
        jobs.append({**found, **words, "exit_code": code, "error": (entry.reason or None) if code else None})
    return {**answer_run(folder), "jobs": jobs}


def count_best_steps(job: RepeatedJob | None) -> int:
    """Returns the updates after which the models of a job were the best: the median over its runs; 0 if unknown."""
    counted = [run.model_step for _, run in (job.without_warm_ups if job else ()) if run.model_step]
    return round(median(counted or [0]))


class ParentRun(CommandRun):
    """The run of a sweep, which an earlier command may have begun.

    Attributes:
        plan: of the first job that was ready; None until then. Its options of tracking and evaluation are the sweep's.
        tags: further tags of the run.
        comparison: a line about the two best jobs.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "the sweep's own run")
        self.plan: Plan | None = None
        self.tags: dict[str, str] = {}
        self.comparison = ""

    def begin(self, plan: Plan, config: DictConfig, ledger: Ledger, *, began: float, facts: LaunchFacts) -> None:
        """Opens the run and starts to record it.

        Args:
            config: the config of the command, with Hydra's own part.
            began: when the command began, in seconds since the epoch.
            facts: what all jobs are made of.
        """
        self.plan = plan
        own_config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        plain, _ = keep_values(OmegaConf.to_container(own_config, resolve=False), plan.config)
        write_run_tags(self.files.path, make_run_tags(facts.read_git(), facts.packages) | read_stage_tags())
        swept = ", ".join(ledger.swept)
        params = {key: value for key, value in plan.choices.items() if not is_under(key, ledger.swept)}
        params |= {key: str(value) for key, value in ledger.base.items() if key not in params}
        raw: Any = OmegaConf.to_container(own_config, resolve=False)
        name = name_sweep(raw["tracking"].get("run_name"), ledger.swept, plan.config)
        tags = {**(plan.tracking.tags or {}), SWEPT: swept}
        self.open(name, plan.tracking, tags=tags, params=params, config=plain, began=began)

    def update(self, report: SweepReport) -> None:
        """Writes the current report, and records it. The metrics of the best job are at the number of finished jobs."""
        values, tags = dict[str, float](), dict(report.tags())
        if report.best is not None:
            entry, run = report.best
            values = run.metrics_of("val") | run.metrics_of("test") or run.metrics_of("train")
            values |= {report.metric: run.metrics[report.metric]}
            tags |= {
                BEST: str(entry.number),
                BEST_FOLDER: str((self.files.path / entry.folder).absolute()),
                BEST_METRIC: report.metric,
                BEST_OVERRIDES: shlex.join(entry.overrides),
                BEST_STEPS: str(count_best_steps(report.best_job)),
            }
        text = describe_sweep(report, self.files.path)
        files = report.write(self.files.path)
        self.add(values, files, tags={**tags, **self.tags}, text=text, step=report.finished)

    def conclude(self, report: SweepReport, status: Status, error: str) -> None:
        """Writes the final report, its plots and the comparison of the best jobs, and records the end of the run."""
        self.update(report)
        tell = Display(sys.stdout).print_line
        with guard_extra("note: the plots of the sweep", tell):
            self.add_files(report.draw(self.files.path), self.files.plots.name)
        compared: list[Path] = []
        with guard_extra("note: the comparison of the best jobs", tell):
            compared, self.comparison = write_comparison(self.files.path, report.labelled)
        if report.best_job is not None and report.best_job.are_folds:
            options = self.plan.evaluation if self.plan else EvaluationOptions()
            with guard_extra("note: the report of all folds", tell):
                compared += write_pooled(self.files.path, report.best_job, options)
        self.add_files(compared, self.files.evaluation.name)
        self.end(status, error)
