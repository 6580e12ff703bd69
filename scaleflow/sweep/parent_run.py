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
from scaleflow.config.words import quote_override, show_keys
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan, Status
from scaleflow.interfaces.estimate import describe_estimate
from scaleflow.interfaces.events import Event
from scaleflow.interfaces.extras import guard_extra
from scaleflow.interfaces.features import list_task_groups
from scaleflow.interfaces.hooks import KeptPredictions
from scaleflow.launcher.command_exit import FAILED, REFUSED, TERMINATED
from scaleflow.launcher.display import Display
from scaleflow.launcher.feature_hooks import FeatureHooks
from scaleflow.launcher.launch import answer_run
from scaleflow.launcher.prepare import read_stage_tags
from scaleflow.launcher.recording.description import (
    MAX_LENGTH,
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
from scaleflow.sweep.composer import drop_hydra
from scaleflow.sweep.ledger import Ledger
from scaleflow.sweep.ranking import RepeatedJob
from scaleflow.sweep.sweep_report import MARKDOWN, MAX_ROWS, SweepReport, format_cells
from scaleflow.tracking.store import SWEPT
from scaleflow.tracking.tracked_runs import BEST, BEST_FOLDER, BEST_METRIC, BEST_OVERRIDES, BEST_STEPS

if TYPE_CHECKING:
    from scaleflow.evaluation.predictions import Predictions

#: The maximum number of jobs that are compared.
MAX_COMPARED = 5

#: The files of the comparison, in the folder `evaluation` of the sweep.
PAGE = "comparison.html"
TABLE = "comparison.csv"

#: The maximum number of jobs whose reasons are listed, and the maximum length of a reason in characters.
MAX_REASONS = 5
MAX_REASON_LENGTH = 200

#: The exit code of a job by its status. A job that has not ended has no code.
EXIT_CODES = {"FINISHED": 0, "PRUNED": 0, "FAILED": FAILED, "REFUSED": REFUSED, "KILLED": TERMINATED}


def write_comparison(folder: Path, jobs: Sequence[tuple[str, RepeatedJob]]) -> tuple[list[Path], str]:
    """Compares the best jobs that have kept predictions, and writes a page and a table.

    Args:
        folder: the folder of the sweep.
        jobs: the jobs with their labels, the best first.

    Returns:
        The files, and a line about the two best jobs. No files and "" if fewer than two jobs have kept predictions.
    """
    from scaleflow.evaluation.comparison import list_differences

    compared = load_best_predictions(folder, jobs)
    if len(compared) < 2:
        return [], ""
    rows = list_differences(compared)
    about = f"The {len(compared)} best jobs with predictions, on the same examples; differences are from the first."
    target = RunFolder(folder).evaluation
    target.mkdir(exist_ok=True)
    page = make_page("Best jobs of the sweep", about, [compose_section("Differences", make_table(rows))])
    contents = {PAGE: page, TABLE: to_csv(rows)}
    write_files(target, contents)
    second_label = compared[1][0]
    return [target / name for name in contents], describe_second(rows, second_label)


def load_best_predictions(folder: Path, jobs: Sequence[tuple[str, RepeatedJob]]) -> list[tuple[str, Predictions]]:
    """Loads the predictions of the first `MAX_COMPARED` finished jobs, with labels. Skips jobs without predictions."""
    finished = [(label, job) for label, job in jobs if job.is_finished]
    predictions = []
    for label, job in finished[:MAX_COMPARED]:
        with contextlib.suppress(ConfigError):  # the job kept no predictions
            predictions.append((f"#{job.entry.number} {label}", load_job_predictions(folder, job)))
    return predictions


def load_job_predictions(folder: Path, job: RepeatedJob) -> Predictions:
    """Loads the predictions of the first run of a job, or of all folds. Raises ConfigError if a run has kept none.

    With folds, the model that has not seen a row predicts it.
    """
    from scaleflow.evaluation.predictions import PREDICTIONS, load_predictions

    entries = [entry for entry, _ in job.without_warm_ups]
    if not job.are_folds:
        entries = entries[:1]
    parts = []
    for entry in entries:
        parts.append(load_predictions(RunFolder(folder / entry.folder).evaluation / PREDICTIONS))
    return parts[0] if len(parts) == 1 else pool_predictions(parts)


def pool_predictions(parts: Sequence[Predictions]) -> Predictions:
    """Joins the predictions of folds, and numbers their examples again."""
    import numpy as np
    import pyarrow

    from scaleflow.evaluation.collector import EXAMPLE

    table = pyarrow.concat_tables([part.table for part in parts], promote_options="permissive")
    places = pyarrow.array(np.arange(len(table)))
    table = table.set_column(table.column_names.index(EXAMPLE), EXAMPLE, places)
    digests = " ".join(part.digest for part in parts)
    digest = hashlib.sha256(digests.encode()).hexdigest()[:16]
    examples = sum(part.examples for part in parts)
    return replace(parts[0], table=table, examples=examples, digest=digest, positions={})


class NoInputs:
    """An `ExampleReader` without inputs, for predictions of several runs."""

    inputs: Mapping[str, Any] = {}

    def read_examples(self, examples: Any) -> tuple[Any, Any]:
        return {}, {}

    def preprocess(self, inputs: Any) -> Any:
        return inputs

    def add_columns(self, read: Any) -> NoInputs:
        return self

    def read_columns(self, examples: Any) -> Mapping[str, Any]:
        return {}

    def read_pictures(self, examples: Any) -> None:
        return None


def write_pooled(folder: Path, job: RepeatedJob, plan: Plan, hooks: FeatureHooks) -> list[Path]:
    """Writes the predictions of all folds of a job, their figures and the features' results.

    Returns the files. Writes nothing if the folds have kept no predictions.
    """
    from scaleflow.evaluation.analysis import METRICS, analyse_predictions, write_metrics
    from scaleflow.evaluation.predictions import PREDICTIONS, save_predictions

    target = RunFolder(folder).evaluation
    try:
        pooled = load_job_predictions(folder, job)
    except ConfigError:
        return []
    target.mkdir(exist_ok=True)
    save_predictions(target / PREDICTIONS, pooled)
    analysis = analyse_predictions(pooled, plan.evaluation, bind_metrics(plan.evaluation.metrics or ()))
    (target / METRICS).write_text(write_metrics(pooled, analysis), encoding="utf-8")
    kept = KeptPredictions(
        plan=plan,
        folder=folder,
        title=f"All {len(job.runs)} folds of the best job",
        predictions=pooled,
        analyse=lambda: analysis,
        reader=NoInputs(),
        emit=ignore_event,
    )
    return [target / PREDICTIONS, target / METRICS, *hooks.after_folds(kept)]


def ignore_event(event: Event) -> None:
    """Drops an event, because a sweep has no events."""


def describe_second(rows: Sequence[dict[str, Any]], label: str) -> str:
    """Returns a line about the second best job; empty if it is not compared.

    Args:
        rows: the rows of the comparison.
        label: the label of the second best job.
    """
    for row in rows:
        if row["model"] == label and "difference" in row:
            verdict = "not more than noise" if row["more than noise"] == "no" else "more than noise"
            return f"{label} differs from the best by {row['metric']} {describe_estimate(row['difference'])}: {verdict}"
    return ""


def describe_sweep(report: SweepReport, folder: Path) -> str:
    """Returns the description of a sweep in Markdown. Its table is cut to the length that the store allows."""
    store = None
    model_uri = None
    summary = report.ranking
    if report.best is not None:
        _, run = report.best
        store = run.record.get("uri")
        model_uri = run.model_uri
        summary = f"**Best:** {report.describe_best()}"
    loading = describe_loading(store, model_uri, "the model of the best job")
    folder_word = format_code_block("sh", quote_override("hydra.sweep.dir", folder))
    repeat = f"To run what is missing, or more values, repeat the command below with\n\n{folder_word}"
    head = join_parts([cut_text(summary, MARKDOWN), loading, repeat])
    rest = join_parts([list_reasons(report), describe_command(RunFolder(folder))])
    cells = format_cells(report.rows[:MAX_ROWS], report.shown)
    room = MAX_LENGTH - len(head) - len(rest) - 4
    table = format_long_table(cells, room, f"{{:,}} more rows are in {MARKDOWN}.", total=len(report.rows))
    return "\n\n".join(filter(None, (head, table, rest)))


def list_reasons(report: SweepReport) -> str:
    """Returns a line for each of the first jobs that did not finish."""
    rows = [row for row in report.rows if row.get("reason")]
    lines = []
    for row in rows[:MAX_REASONS]:
        reason = str(row["reason"])[:MAX_REASON_LENGTH]
        lines.append(f"- #{row['job']} {row['status']}: {reason}")
    if len(rows) > MAX_REASONS:
        lines.append(f"- {len(rows) - MAX_REASONS} more, in {MARKDOWN}")
    return "\n".join(lines)


def describe_jobs(folder: Path) -> dict[str, Any]:
    """Returns the answer of `--json` for a sweep: the answer for the parent run, if it exists, and for each job."""
    jobs = []
    for entry in Ledger.load(RunFolder(folder)).entries:
        answer = answer_run(folder / entry.folder)
        answer["job"] = entry.number
        answer["overrides"] = entry.overrides
        answer["status"] = entry.status
        code = EXIT_CODES.get(entry.status)
        answer["exit_code"] = code
        answer["error"] = (entry.reason or None) if code else None
        jobs.append(answer)
    return {**answer_run(folder), "jobs": jobs}


def count_best_steps(job: RepeatedJob | None) -> int:
    """Returns the number of updates of a job's best model: the median over its runs; 0 if unknown."""
    if job is None:
        return 0
    steps = [run.model.step for _, run in job.without_warm_ups if run.model.step]
    return round(median(steps)) if steps else 0


class ParentRun(CommandRun):
    """The sweep's own run. An earlier command may have begun it.

    Attributes:
        plan: the plan of the first job that was ready; None until then. The sweep uses its options of tracking and
            evaluation.
        tags: additional tags of the run.
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
            facts: the code, packages and machine of all jobs.
        """
        self.plan = plan
        own_config = drop_hydra(config)
        plain, _ = keep_values(OmegaConf.to_container(own_config, resolve=False), plan.config)
        write_run_tags(self.files.path, make_run_tags(facts.read_git(), facts.packages) | read_stage_tags())
        swept = ", ".join(ledger.typed_keys)
        hidden = [*ledger.swept, *list_task_groups()]
        params = {key: value for key, value in plan.choices.items() if not is_under(key, hidden)}
        for key, value in ledger.base.items():
            params.setdefault(show_keys(key), str(value))
        raw: Any = OmegaConf.to_container(own_config, resolve=False)
        name = name_sweep(raw["tracking"].get("run_name"), ledger.typed_keys, plan.config)
        tags = {**(plan.tracking.tags or {}), SWEPT: swept}
        self.open(name, plan.tracking, tags=tags, params=params, config=plain, began=began)

    def update(self, report: SweepReport) -> None:
        """Writes the current report, and records it with the metrics of the best job.

        The step of these metrics is the number of finished jobs.
        """
        values: dict[str, float] = {}
        tags = {**report.tags(), **self._make_best_tags(report)}
        if report.best is not None:
            _, run = report.best
            values = run.metrics_of("val") | run.metrics_of("test") or run.metrics_of("train")
            values[report.metric] = run.metrics[report.metric]
        text = describe_sweep(report, self.files.path)
        files = report.write(self.files.path)
        self.add(values, files, tags={**tags, **self.tags}, text=text, step=report.finished)

    def _make_best_tags(self, report: SweepReport) -> dict[str, str]:
        """Returns the tags that name the best job; empty if no job is best."""
        if report.best is None:
            return {}
        entry, _ = report.best
        return {
            BEST: str(entry.number),
            BEST_FOLDER: str((self.files.path / entry.folder).absolute()),
            BEST_METRIC: report.metric,
            BEST_OVERRIDES: shlex.join(entry.overrides),
            BEST_STEPS: str(count_best_steps(report.best_job)),
        }

    def conclude(self, report: SweepReport, status: Status, error: str, hooks: FeatureHooks | None) -> None:
        """Writes the final report, its plots and the comparison of the best jobs, and records the end of the run.

        Without `hooks` no job ran in this command, so nothing is added about the folds of the best job.
        """
        self.update(report)
        print_line = Display(sys.stdout).print_line
        with guard_extra("note: the plots of the sweep", print_line):
            self.add_files(report.draw(self.files.path), self.files.plots.name)
        compared: list[Path] = []
        with guard_extra("note: the comparison of the best jobs", print_line):
            compared, self.comparison = write_comparison(self.files.path, report.labelled)
        if report.best_job is not None and report.best_job.are_folds and self.plan is not None and hooks is not None:
            with guard_extra("note: the figures of all folds", print_line):
                compared += write_pooled(self.files.path, report.best_job, self.plan, hooks)
        self.add_files(compared, self.files.evaluation.name)
        self.end(status, error)
