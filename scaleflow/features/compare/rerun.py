"""Starts a new run with the config of a tracked run, in a new folder.

    scaleflow rerun RUN_ID
    scaleflow rerun RUN_ID training.epochs=40 model=cnn
    scaleflow rerun RUN_ID --config-dir my_conf --trust my_models
    scaleflow rerun RUN_ID --exact
    scaleflow rerun RUN_ID --exact --checkout DIR --trust my_models

RUN_ID is the id of a run in MLflow, the folder of a run, or a model: models:/NAME/VERSION, models:/NAME@ALIAS or
models:/m-...
The run is looked up in `tracking.uri=...`, else in MLFLOW_TRACKING_URI, else in sqlite:///mlflow.db. The new run does
not use or change the checkpoints of the tracked run. Somebody else may have written a tracked config. That is why it
may name only code of scaleflow and Keras, and files in the current folder. Use --trust to allow more.

With --exact the run is refused if its code, packages, data or machine is not what the tracked run was made of. At the
end it says whether the metrics and the weights are the same: `equal bits`, `equal to 1e-6`, or the first step that
differs.

Exit code: 0 finished; 1 training failed, or with --exact the results differ; 2 the command cannot work, nothing was
recorded; 130 or 143 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from scaleflow.api import launch_prepared
from scaleflow.commands.frame import make_main
from scaleflow.commands.tracked_run import find_run, make_run_parser, parse_command, place_objects, reuse_for_new_run
from scaleflow.config.compose import CommandWords, ComposedConfig
from scaleflow.config.policies import LOOK
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import TagsSet
from scaleflow.interfaces.formatting import join_first
from scaleflow.launcher.command_exit import FAILED, FINISHED, Outcome, to_printable
from scaleflow.launcher.display import Display
from scaleflow.launcher.prepare import make_plan, prepare_run
from scaleflow.launcher.recording.recovery import repair_quietly
from scaleflow.runs import RunFolder
from scaleflow.runs.code_digest import VERSION, find_code
from scaleflow.runs.data_digest import Repetition
from scaleflow.runs.event_log import append_event
from scaleflow.runs.identity import compare_modules
from scaleflow.runs.provenance.collect import describe_module
from scaleflow.runs.provenance.record import CodeRecord
from scaleflow.runs.run import Run

#: Tags of the new run: the id of the tracked run, and whether the results are the same.
TAG = "scaleflow.rerun_of"
REPRODUCES = "scaleflow.reproduces"


@make_main
def main(typed: list[str]) -> Outcome:
    parser = make_run_parser("rerun", __doc__)
    parser.add_argument("--exact", action="store_true", help="refuse what is not the same, and compare the results")
    parser.add_argument(
        "--despite", default="", metavar="LIST", help="run although these differ: code,packages,data,machine"
    )
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="build the code of the run in DIR, and use it")
    words, options = parse_command(parser, typed)
    if not options.exact and (options.despite or options.checkout):
        raise ConfigError(f"{'--despite' if options.despite else '--checkout'}: works with --exact only; add --exact")
    run, words = find_run(words, is_repeated=True)
    if options.checkout:
        words = replace(words, tracked_dirs=[])
    exact = ExactRerun(run, words, options) if options.exact else None
    if exact is not None:
        words = replace(words, overrides=[*exact.lengths, *words.overrides])
    composed = reuse_for_new_run(run, words, "rerun of")
    if exact is not None:
        composed = exact.prepare(composed)
    repeats = Repetition(run.splits, exact is not None and "data" not in exact.despite)
    composed, copy_objects = place_objects(run, words, composed)
    again = prepare_run(composed)
    if exact is None:
        note_changed_code(run, again.spec.plan)
    spec = replace(again.spec, tags={TAG: run.model.run_id, **again.spec.tags}, repeats=repeats)
    outcome, target = launch_prepared(replace(again, spec=spec), copy_objects)
    return outcome if exact is None or outcome.code else exact.judge(outcome, target)


def note_changed_code(run: Run, plan: Plan) -> None:
    """Prints which modules of the user differ from those of the tracked run."""
    before = run.states[0].code
    code = find_code(plan.config, plan.search)
    now = CodeRecord(version=VERSION, modules={name: describe_module(file, None) for name, file in code.items()})
    changes = [str(difference) for difference in compare_modules(before, now) if difference.matters]
    if before.version and changes:
        text = f"note: the code is not that of the tracked run: {join_first(changes)}; --exact refuses this"
        Display(sys.stdout).print_line(to_printable(text))


class ExactRerun:
    """The part of the command that proves that a new run repeats the tracked run.

    Args:
        run: the tracked run.
        words: words of the command.
        options: parsed flags.

    Raises ConfigError if the run cannot be repeated exactly.
    """

    def __init__(self, run: Run, words: CommandWords, options: argparse.Namespace) -> None:
        from scaleflow.features.compare import exact

        self.despite = exact.parse_despite(options.despite)
        self._checkout: Path | None = options.checkout
        self._run = run
        exact.check_repeatable(run, words)
        self.lengths = exact.list_lengths(run)

    def prepare(self, composed: ComposedConfig) -> ComposedConfig:
        """Compares the run's ingredients with those here and prints the differences.

        Returns the config. If the run's code was checked out, its folders come first in the search path. Raises
        ConfigError for differences that `--despite` does not allow.
        """
        from scaleflow.features.compare import checkout, exact
        from scaleflow.runs.identity import list_unknown

        display = Display(sys.stdout)
        masked: Sequence[str] = ()
        if self._checkout is not None:
            built = checkout.check_out(self._run, self._checkout)
            composed = replace(composed, search=[*built.folders, *composed.search])
            masked = built.masked
            for note in (f"the code of the run is in {self._checkout}", *built.notes):
                display.print_line(to_printable(f"note: {note}"))
        here = exact.describe_here(make_plan(composed, LOOK), self._run)
        differences = exact.compare_with_here(self._run, here, masked)
        for line in exact.describe_categories(differences, list_unknown(self._run.states[0])):
            display.print_line(to_printable(line))
        can_check_out = self._checkout is None and self._run.states[0].code.is_kept
        exact.refuse_differences(self._run, differences, self.despite, can_check_out=can_check_out)
        return composed

    def judge(self, outcome: Outcome, folder: Path) -> Outcome:
        """Compares the new run's results, records the verdict, and returns it as part of the outcome."""
        from scaleflow.features.compare import exact, results

        second = Run(folder.absolute())
        judged = results.judge_runs(self._run, second)
        lines = [("reproduces", results.describe_verdict(judged))]
        if not judged.is_equal:
            for change in exact.list_resolved_changes(self._run.settings, second.settings):
                lines.append(("resolved", change))
        Display(sys.stdout).print_summary(lines)
        append_event(RunFolder(folder).events, TagsSet({REPRODUCES: judged.text}))
        repair_quietly(folder)
        values = {"reproduces": {"run_id": self._run.run_id, **asdict(judged)}, "error": judged.text}
        return Outcome(FINISHED if judged.is_equal else FAILED, lambda: {**outcome.read(), **values})
