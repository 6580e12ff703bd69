"""Looks at a dataset before training: its schema, its faults, and how its splits, or new data, differ.

    scaleflow check dataset=csv dataset.data_dir=house.csv dataset.target=price
    scaleflow check dataset=image_folder dataset.data_dir=photos --report photos.html
    scaleflow check dataset=csv dataset.data_dir=new.csv dataset.target=price --against RUN_ID

Type the words of the run after it, as for `scaleflow`: the dataset is read as the run reads it. The last lines have the
findings, each with the rule behind it; the report is a page with these, all columns, histograms by class and examples.

fault: rows that belong together on both sides of a split, constant, duplicate and mostly missing columns, ids, a column
that tells the target, a target of nearly one class, the same examples in several splits or classes, blank pictures,
examples that cannot be read, missing columns.
drift: a split, or new data, that is distributed otherwise than the training split, or has other categories.
hint: rare classes, outliers, numbers that mean missing, columns that say the same, spellings.

With --against the data are compared with what a run has learned of its own: RUN_ID is the id of a run in MLflow, the
folder of a run, or a model: models:/NAME/VERSION, models:/NAME@ALIAS or models:/m-... The run is looked up in
`tracking.uri=...`, else in MLFLOW_TRACKING_URI, else in sqlite:///mlflow.db.

Exit code: 0 nothing was found from --level on; 1 something was found; 2 the data cannot be read; 130 or 143
interrupted.
"""

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleflow.commands.frame import CommandParser, check_page, make_main
from scaleflow.commands.tracked_run import find_run, supervise_worker
from scaleflow.config.compose import CommandWords, compose_config
from scaleflow.config.typed_folder import in_typed_folder
from scaleflow.config.words import split_overrides
from scaleflow.dataset.launch_check import check_source_files
from scaleflow.errors import ConfigError, RunError
from scaleflow.features.checks.events import DataChecked
from scaleflow.features.checks.stage import CHECK
from scaleflow.features.checks.task import CheckData
from scaleflow.interfaces import Plan, Tracking
from scaleflow.launcher.command_exit import FAILED, FINISHED, Outcome, to_printable
from scaleflow.launcher.display import Display, display_for, hidden_display
from scaleflow.launcher.prepare import make_plan
from scaleflow.launcher.processes.stop import StopRequest, catch_stop_signals
from scaleflow.runs import RunSpec
from scaleflow.runs.learned_state import find_learned_state
from scaleflow.runs.run import locate_run
from scaleflow.tracking.model_uris import FORMS

#: Levels of findings, from mild to serious. By default, findings from LEVEL on make the exit code 1.
LEVELS = ("hint", "drift", "fault")
LEVEL = "drift"

#: The default report, in the current folder, and the default maximum number of examples per split.
REPORT = "data_report.html"
EXAMPLES = 20_000

#: Reading data takes one process and no GPU.
DEVICES = ("strategy=one_device", "hardware=cpu")


@make_main
def main(words: list[str]) -> Outcome:
    parser = CommandParser("check", __doc__)
    parser.add_overrides("a word of the run")
    parser.add_argument("--against", metavar="RUN_ID", help=f"compare with what a run has learned: {FORMS}")
    parser.add_argument(
        "--level",
        choices=LEVELS,
        default=LEVEL,
        help=f"the least level of findings that make the exit code 1 (default: {LEVEL})",
    )
    parser.add_argument("--report", default=REPORT, metavar="FILE", help=f"the page to write (default: {REPORT})")
    parser.add_argument(
        "--examples", type=int, default=EXAMPLES, metavar="N", help=f"of each split, at most (default: {EXAMPLES:,})"
    )
    typed = parser.parse_intermixed_args(split_overrides(words))
    report = Path(typed.report)
    check_page("--report", report)
    with display_for() as display, catch_stop_signals() as stop:
        plan = make_check_plan(typed.overrides, typed.config_dir, typed.examples)
        schema = None if typed.against is None else read_schema_of_run(typed.against, typed.overrides, display)
        checked = look_at_data(plan, schema, typed.examples, report=report, display=display, stop=stop)
        least = LEVELS.index(typed.level)
        counted = [finding for finding in checked.findings if LEVELS.index(finding["level"]) >= least]
        values = {"findings": checked.findings, "splits": checked.splits, "report": str(report.absolute())}
        if counted:
            values["error"] = f"{len(counted)} of the findings are a {typed.level} or worse"
        display.print_summary([*describe_checked(checked), ("report", str(report))])
    return Outcome(FAILED if counted else FINISHED, lambda: values)


def make_check_plan(overrides: Sequence[str], config_dirs: Sequence[str], examples: int) -> Plan:
    """Resolves the config of the run and returns the plan for reading its data.

    Raises ConfigError if the config is wrong.
    """
    if examples < 1:
        raise ConfigError(f"--examples {examples}: expected at least 1")
    typed = CommandWords(overrides).keys
    added = [word for word in DEVICES if word.partition("=")[0] not in typed]
    plan = make_plan(compose_config([*added, *overrides], config_dirs), CHECK)
    check_source_files(plan.dataset.target, plan.dataset.split)
    return plan


def read_schema_of_run(run_id: str, overrides: Sequence[str], display: Display) -> Mapping[str, Any]:
    """Returns the schema that a run learned from its data.

    Raises ConfigError if the run does not exist or has no schema.
    """
    state = find_learned_state(Path(run_id).expanduser())  # a folder, which MLflow need not know
    if state is None:
        locate_run(run_id, Tracking())
        display.begin_phase("reading the run from MLflow")
        state = find_run(CommandWords(overrides, run_id=run_id), needs_run=False)[0].learned_state
    if not state.schema:
        raise ConfigError(
            f"--against {run_id}: the run kept no schema of its data: it was made with dataset.check=none; "
            "train it again"
        )
    return state.schema


def look_at_data(
    plan: Plan, schema: Mapping[str, Any] | None, examples: int, report: Path, display: Display, stop: StopRequest
) -> DataChecked:
    """Checks a plan's dataset in a worker process and writes the report.

    Raises ConfigError if the data cannot be read, and Stopped after a signal.
    """
    with tempfile.TemporaryDirectory(prefix="scaleflow-check-") as folder:
        page = Path(folder) / REPORT
        spec = RunSpec(plan, Path(folder), time.time(), CheckData(str(page), examples, schema))
        try:
            events = supervise_worker(spec, stop, display)
        except RunError as error:
            raise ConfigError(f"the data cannot be read: {error}") from error
        try:
            shutil.copyfile(page, report)
        except OSError as error:
            raise ConfigError(f"--report {report}: cannot be written ({error.strerror})") from error
    return next(event for event in events if isinstance(event, DataChecked))


def describe_checked(checked: DataChecked) -> list[tuple[str, str]]:
    """Returns the summary at the end of the command, as (label, text)."""
    rows = []
    for split, counts in checked.splits.items():
        examples = f"{counts['examples']:,} examples"
        if counts["looked_at"] < counts["examples"]:
            examples = f"{counts['looked_at']:,} of {examples}"
        rows.append((split, examples))
    for finding in checked.findings:
        rows.append((finding["level"], to_printable(f"{finding['text']} ({finding['because']})")))
    if not checked.findings:
        rows.append(("findings", "none"))
    return rows


@in_typed_folder
def check_data(
    *overrides: str,
    config_dir: Sequence[str] = (),
    against: str | None = None,
    examples: int = EXAMPLES,
    report: str | Path | None = None,
) -> dict[str, Any]:
    """Checks a dataset, as `scaleflow check` does.

    Args:
        overrides: the words of the run, such as "dataset=csv".
        config_dir: folders with your own options.
        against: a run, its folder or a model. The data are compared with its schema.
        examples: maximum number of examples to check per split.
        report: the page to write; None: none.

    Returns:
        `findings`, a list of dicts with `rule`, `level`, `text`, `because` and `columns`, and `splits`.

    Raises:
        ConfigError: if the data cannot be read.
    """
    plan = make_check_plan(overrides, config_dir, examples)
    with hidden_display() as display, tempfile.TemporaryDirectory(prefix="scaleflow-check-") as folder:
        schema = None if against is None else read_schema_of_run(against, overrides, display)
        page = Path(folder) / REPORT if report is None else Path(report)
        check_page("report", page)
        checked = look_at_data(plan, schema, examples, report=page, display=display, stop=StopRequest())
    return {"findings": checked.findings, "splits": checked.splits}
