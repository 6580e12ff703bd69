"""Runs the steps around a run, declared in one file: check, search, train, evaluate, promote, and functions of yours.

    scaleflow pipeline churn --config-dir conf             # the file conf/pipeline/churn.yaml
    scaleflow pipeline churn --config-dir conf --dry-run   # what would run again, and why
    scaleflow pipeline churn --config-dir conf fit.training.epochs=5 --jobs 2

    overrides: ["dataset=csv", "dataset.data_dir=train.csv", "dataset.target=churned"]
    stages:
      look: {command: check}
      fit:  {command: train, overrides: ["training.epochs=40"], after: look}
      week: {command: evaluate, run: "${stages.fit.run_id}", overrides: ["dataset.data_dir=week.csv"]}
      go:   {command: promote, run: "${stages.fit.run_id}", model: churn, when: "${stages.week.metrics.accuracy} > 0.9"}

A word STAGE.KEY=VALUE adds an override to a stage. A stage whose settings, code, data, packages and inputs are the same
as before is not run again: its recorded result is used. After a failure, Ctrl-C or a kill, the same command goes on.

Exit code: 0 all stages have finished; 1 one has failed, or a check has findings; 2 the pipeline cannot work; 130 or 143
interrupted.
"""

import argparse
import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaleflow.commands.frame import CommandParser, make_main
from scaleflow.config.compose import Folders, to_folders
from scaleflow.config.typed_folder import in_typed_folder
from scaleflow.config.words import split_overrides
from scaleflow.dataset.launch_check import check_source_files
from scaleflow.errors import ConfigError
from scaleflow.features.pipelines.decisions import (
    REUSE,
    RUN,
    SKIP,
    Decider,
    StageComposer,
    StageDecision,
    expand_sweep,
    is_open,
    is_swept,
    read_tracking,
    refuse_own_keys,
)
from scaleflow.features.pipelines.definition import DeclaredPipeline, Stage, load_pipeline, name_line
from scaleflow.features.pipelines.ledger import PIPELINES, PipelineLedger, StoredRuns
from scaleflow.features.pipelines.runner import PipelineRunner
from scaleflow.features.pipelines.stage_commands import SWEEP
from scaleflow.interfaces import Target, Tracking
from scaleflow.interfaces.stages import UNKNOWN
from scaleflow.launcher.command_exit import Outcome, raise_interruption
from scaleflow.launcher.display import Display, display_for, hidden_display
from scaleflow.launcher.processes.stop import StopRequest, catch_stop_signals
from scaleflow.runs.run import locate_run
from scaleflow.tracking.store import import_client
from scaleflow.tracking.uri import resolve_store

#: Stand-ins for outputs with a known form, used to check stages before any has run.
STAND_INS = {"run_id": "0" * 32, "model": f"models:/m-{'0' * 32}", "promoted": True, "version": "1"}


def check_stages(pipeline: DeclaredPipeline, composer: StageComposer, folder: Path) -> Tracking:
    """Checks the configs, functions and options of all stages and returns the options of the store.

    These are the options of the first training or sweep, or else of the first check.

    Raises ConfigError for the first stage that cannot work. The message names the stage's line.
    """
    tracked: dict[str, list[str]] = {}
    best: dict[str, list[str]] = {}

    def stand_in(name: str, path: Sequence[str]) -> Any:
        if path[0] == "best" and path[1:2] == ["overrides"]:
            return best.get(name, [])
        known = {**STAND_INS, "folder": str(folder / name / "1")}
        return UNKNOWN if path[0] == "result" else known.get(path[-1], UNKNOWN)

    for stage in pipeline.stages.values():
        values = pipeline.resolve(stage, stand_in)
        with name_line(stage.line):
            words = [f"{UNKNOWN}={UNKNOWN}" if word == UNKNOWN else word for word in values.get("overrides", [])]
            refuse_own_keys([word for word in words if UNKNOWN not in word])
            if stage.command is SWEEP:
                first = next(expand_sweep(words))
                best[stage.name] = [new for new, word in zip(first, words, strict=True) if is_swept(word)]
            check_stage(pipeline, stage, composer, values={**values, "overrides": words})
            if stage.command.composes:
                tracked.setdefault("run" if stage.command.has_own_run else "check", words)
    chosen = tracked.get("run") or tracked.get("check")
    return Tracking() if chosen is None else read_tracking(chosen, pipeline.config_dirs)


def check_stage(pipeline: DeclaredPipeline, stage: Stage, composer: StageComposer, values: Mapping[str, Any]) -> None:
    command = stage.command
    words = values["overrides"]
    if command.composes and not is_open(words, composer.config_dirs):
        composition = composer.compose(stage, words)
        if composition.source and UNKNOWN not in str(composition.source) and not find_writers(pipeline, stage):
            check_source_files(Target("dataset", **composition.source))
    if command.takes_run and UNKNOWN not in str(values["run"]):
        locate_run(str(values["run"]), Tracking())
    command.check(values, pipeline.config_dirs)


def find_writers(pipeline: DeclaredPipeline, stage: Stage) -> set[str]:
    """Returns the stages that run before this one and may write its data."""
    before = {name for name in pipeline.stages if stage.name in pipeline.find_dependents(name)}
    return {name for name in before if pipeline.stages[name].command.writes_data}


@dataclass(frozen=True)
class PipelineResult:
    """The result of a pipeline.

    Attributes:
        status: FINISHED, FAILED or KILLED.
        folder: the pipeline's folder.
        stages: by name: `status`, `reason`, and the outputs if the stage has finished.
    """

    status: str
    folder: Path
    stages: Mapping[str, Mapping[str, Any]]


@make_main
def main(words: list[str]) -> Outcome:
    parser = CommandParser("pipeline", __doc__)
    parser.add_argument("name", metavar="NAME", help="the file pipeline/NAME.yaml in a folder of --config-dir")
    parser.add_overrides("STAGE.KEY=VALUE adds an override to a stage; KEY=VALUE sets a key of yours in the file")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help=f"what it does is kept there (default: {PIPELINES}/NAME)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many stages run at a time (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="say which stages would run and why, and run nothing")
    parser.add_repeated("--force", "STAGE", "run it again")
    parser.add_repeated("--from", "STAGE", "run it and all that depends on it again", dest="begin")
    parser.add_repeated("--only", "STAGE", "run no other stage")
    typed = parser.parse_intermixed_args(split_overrides(words))
    pipeline = load_pipeline(typed.name, typed.config_dir, typed.overrides)
    with display_for() as display, catch_stop_signals() as stop:
        return run_stages(pipeline, typed, display=display, stop=stop)


def run_stages(
    pipeline: DeclaredPipeline, options: argparse.Namespace, *, display: Display, stop: StopRequest
) -> Outcome:
    """Runs a pipeline with the options of the command. Raises ConfigError if it cannot work."""
    if options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs}: expected at least 1")
    forced = pipeline.select(options.force, "--force")
    for name in pipeline.select(options.begin, "--from"):
        forced += [name, *pipeline.find_dependents(name)]
    only = pipeline.select(options.only, "--only")
    folder = options.folder or Path(PIPELINES, pipeline.name)
    threading.Thread(target=import_client, daemon=True).start()
    ledger = PipelineLedger(folder)
    composer = StageComposer(pipeline.config_dirs, ledger.composed)
    tracking = check_stages(pipeline, composer, folder)
    if tracking.name != "none":
        tracking = resolve_store(tracking)
        composer.store = tracking.uri
    with ledger.lock(may_create=not options.dry_run):
        ledger = PipelineLedger(folder)  # another command may have written it meanwhile
        decider = Decider(pipeline, ledger, composer, stored=StoredRuns(tracking), forced=forced, only=only)
        if options.dry_run:
            decisions = show_decisions(decider)
            return Outcome(read=lambda: decisions)
        runner = PipelineRunner(decider, tracking, display, stop=stop, count=options.jobs)
        code = runner.run()
        ledger.composed = composer.used
        ledger.save()
        answer = {**runner.describe(), "error": runner.find_error()}
        display.print_summary(runner.list_rows())
        return Outcome(code, lambda: answer)


def show_decisions(decider: Decider) -> Mapping[str, Any]:
    """Prints one line per stage: `NAME  reuse`, or `NAME  run  WHY`."""
    decisions: dict[str, StageDecision] = {}
    for name, stage in decider.pipeline.stages.items():
        before = [other for other in decider.pipeline.needs[name] if decisions[other].action != REUSE]
        if not before:
            decisions[name] = decider.decide(stage)
        elif all(decisions[other].action == SKIP for other in before):
            decisions[name] = StageDecision(SKIP, f"{before[0]} is skipped")
        else:
            decisions[name] = StageDecision(RUN, f"{before[0]} runs")
    width = max(map(len, decisions))
    stages = {}
    for name, decision in decisions.items():
        reason = f"  {decision.why}" if decision.why else ""
        print(f"{name:<{width}}  {decision.action}{reason}")
        stages[name] = {"action": decision.action, "reason": decision.why or None}
    decider.ledger.composed = decider.composer.used
    with contextlib.suppress(OSError):
        decider.ledger.save()
    return {"stages": stages}


@in_typed_folder
def run_pipeline(
    name: str,
    *words: str,
    config_dir: Folders = (),
    folder: str | Path | None = None,
    jobs: int = 1,
    force: Sequence[str] = (),
) -> PipelineResult:
    """Runs a pipeline, as `scaleflow pipeline` does, and returns when all stages have ended.

    Args:
        name: name of its file, without `.yaml`.
        words: such as "fit.training.epochs=5".
        config_dir: one or more folders with your own config options, as `--config-dir`.
        folder: folder for its records and results; None: `pipelines/NAME`.
        jobs: how many stages run in parallel.
        force: stages that run again although nothing has changed.

    Raises:
        ConfigError: if the pipeline cannot work.
        KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM, when the stages have ended.
    """
    pipeline = load_pipeline(name, to_folders(config_dir), words)
    path = None if folder is None else Path(folder)
    options = argparse.Namespace(folder=path, jobs=jobs, force=force, begin=(), only=(), dry_run=False)
    with hidden_display() as display, catch_stop_signals() as stop:
        answer = run_stages(pipeline, options, display=display, stop=stop).read()
    if stop.is_set():
        raise_interruption(stop.exit_code, f"the pipeline was stopped; its folder is {answer['folder']}")
    return PipelineResult(answer["status"], Path(answer["folder"]), answer["stages"])
