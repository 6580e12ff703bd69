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

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaleflow.commands.frame import run_command
from scaleflow.commands.parser import CommandParser
from scaleflow.config.words import split_overrides
from scaleflow.errors import ConfigError
from scaleflow.launcher.answer import ANSWER, FINISHED
from scaleflow.launcher.display import Display, display_for
from scaleflow.launcher.processes.stop import StopRequest, catch_stop_signals
from scaleflow.pipeline.checks import check_stages
from scaleflow.pipeline.composition import Composer
from scaleflow.pipeline.decisions import REUSE, RUN, Choice, Decider
from scaleflow.pipeline.definition import DeclaredPipeline, load_pipeline
from scaleflow.pipeline.runner import PipelineRunner
from scaleflow.pipeline.state import PIPELINES, PipelineState
from scaleflow.pipeline.stored import StoredRuns
from scaleflow.tracking.store import import_client
from scaleflow.tracking.uri import resolve_store


@dataclass(frozen=True)
class PipelineResult:
    """What came of a pipeline.

    Attributes:
        status: FINISHED, FAILED or KILLED.
        folder: the pipeline's folder.
        stages: by name: `status`, `reason`, and the outputs of those that have finished.
    """

    status: str
    folder: Path
    stages: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    folder: Path | None = None
    jobs: int = 1
    is_dry: bool = False
    force: Sequence[str] = ()
    begin: Sequence[str] = ()
    only: Sequence[str] = ()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 finished, 1 failed, 2 refused, 130 or 143 interrupted.
    """
    return run_command(pipeline_words, argv)


def pipeline_words(words: list[str]) -> int:
    parser = CommandParser("pipeline", __doc__)
    parser.add_argument("name", metavar="NAME", help="the file pipeline/NAME.yaml in a folder of --config-dir")
    parser.add_overrides("STAGE.KEY=VALUE adds an override to a stage; KEY=VALUE sets a key of yours in the file")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help=f"what it does is kept there (default: {PIPELINES}/NAME)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many stages run at a time (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="say which stages would run and why, and run nothing")
    parser.add_repeated("--force", "STAGE", "run it again")
    parser.add_repeated("--from", "STAGE", "run it and all that depends on it again")
    parser.add_repeated("--only", "STAGE", "run no other stage")
    typed = parser.parse_intermixed_args(split_overrides(words))
    pipeline = load_pipeline(typed.name, typed.config_dir, typed.overrides)
    options = Options(typed.folder, typed.jobs, typed.dry_run, typed.force, vars(typed)["from"], typed.only)
    with contextlib.closing(display_for()) as display, catch_stop_signals() as stop:
        return run_stages(pipeline, options, display, stop)[0]


def run_stages(
    pipeline: DeclaredPipeline, options: Options, display: Display, stop: StopRequest
) -> tuple[int, Mapping[str, Any]]:
    """Runs a pipeline; returns the exit code, and what `--json` says. Raises ConfigError if it cannot work."""
    if options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs}: expected at least 1")
    forced = pipeline.select(options.force, "--force")
    for name in pipeline.select(options.begin, "--from"):
        forced += [name, *pipeline.find_dependents(name)]
    choice = Choice(frozenset(forced), frozenset(pipeline.select(options.only, "--only")))
    folder = options.folder or Path(PIPELINES, pipeline.name)
    threading.Thread(target=import_client, daemon=True).start()
    state = PipelineState(folder)
    composer = Composer(pipeline.config_dirs, state.composed)
    tracking = check_stages(pipeline, composer, folder)
    if tracking.name != "none":
        tracking = resolve_store(tracking)
        composer.store = tracking.uri
    with state.lock(may_create=not options.is_dry):
        state = PipelineState(folder)  # another command may have written it
        decider = Decider(pipeline, state, composer, choice, StoredRuns(tracking))
        if options.is_dry:
            return FINISHED, show_decisions(pipeline, decider, state, composer)
        runner = PipelineRunner(pipeline, state, decider, tracking, display, stop, options.jobs)
        code = runner.run()
        state.composed = composer.used
        state.save()
        answer = runner.describe()
        ANSWER.read = lambda: answer
        ANSWER.error = runner.find_error()
        rows = [(name, runner.describe_stage(stage)) for name, stage in pipeline.stages.items()]
        rows += [("output", os.path.relpath(folder)), *runner.describe_links()]
        if code != FINISHED:
            rows.append(("go on", "the same command again"))
        display.print_summary(rows)
        return code, answer


def show_decisions(
    pipeline: DeclaredPipeline, decider: Decider, state: PipelineState, composer: Composer
) -> Mapping[str, Any]:
    """Prints a line for each stage: `NAME  reuse`, or `NAME  run  WHY`."""
    actions: dict[str, tuple[str, str]] = {}
    for name, stage in pipeline.stages.items():
        before = [each for each in pipeline.needs[name] if actions[each][0] != REUSE]
        if before:
            is_skipped = all(actions[each][0] == "skip" for each in before)
            actions[name] = ("skip", f"{before[0]} is skipped") if is_skipped else (RUN, f"{before[0]} runs")
            continue
        decision = decider.decide(stage)
        actions[name] = (decision.action, decision.why)
    width = max(map(len, actions))
    for name, (action, why) in actions.items():
        print(f"{name:<{width}}  {action}{f'  {why}' if why else ''}")
    state.composed = composer.used
    with contextlib.suppress(OSError):
        state.save()
    answer = {"stages": {name: {"action": action, "reason": why or None} for name, (action, why) in actions.items()}}
    ANSWER.read = lambda: answer
    return answer


def run_pipeline(
    name: str,
    *words: str,
    config_dir: str | Path | Sequence[str | Path] = (),
    folder: str | Path | None = None,
    jobs: int = 1,
    force: Sequence[str] = (),
) -> PipelineResult:
    """Runs a pipeline, as `scaleflow pipeline` does, and returns when all stages are over.

    Args:
        name: of its file, without `.yaml`.
        words: such as "fit.training.epochs=5".
        config_dir: one or more folders with your own config options, as `--config-dir`.
        folder: what it does is kept there; None: `pipelines/NAME`.
        jobs: how many stages run at a time.
        force: the stages that run again, whatever they are made of.

    Raises:
        ConfigError: if the pipeline cannot work.
        KeyboardInterrupt, SystemExit: after Ctrl-C or SIGTERM, when the stages have ended.
    """
    dirs = [config_dir] if isinstance(config_dir, str | Path) else list(config_dir)
    pipeline = load_pipeline(name, [str(each) for each in dirs], words)
    options = Options(None if folder is None else Path(folder), jobs, force=force)
    with (
        contextlib.closing(display_for(io.StringIO(), is_plain=True, is_chief=False)) as display,
        catch_stop_signals() as stop,
    ):
        _, answer = run_stages(pipeline, options, display, stop)
    if stop.is_set():
        raise KeyboardInterrupt if stop.signal_name == "SIGINT" else SystemExit(stop.exit_code)
    return PipelineResult(answer["status"], Path(answer["folder"]), answer["stages"])
