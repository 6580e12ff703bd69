"""Makes a tracked model the champion of a registered model, if it is better than today's on the same examples.

    scaleflow promote RUN_ID --model house
    scaleflow promote RUN_ID --model house promotion.at_least={test/accuracy:0.9} promotion.environment=clean
    scaleflow promote RUN_ID --model house --on last_week.csv
    scaleflow promote RUN_ID --model house --dry-run
    scaleflow promote --rollback --model house

The model becomes a version of the registered model. It gets the alias champion if every condition holds:

- it is better than today's champion by promotion.metric on the candidate's test split, without rows that the champion
  was trained on: the lower end of the paired interval is above promotion.tolerance. With --on FILE, they
  are compared on all rows of that file or folder that neither was trained on;
- metrics of its run, and slices of its report, are at least promotion.at_least; errors and losses are at most that;
- served in a process of its own, it answers as the trained model, within promotion.most_ms and promotion.most_mb.

Without a champion the last two count. Otherwise the version gets the alias challenger. The decision is a tag of the
version and of the run, and a page among the run's artifacts. --rollback moves the alias back to the version before.
RUN_ID is the id of a run in MLflow, the folder of a run, or a model: models:/NAME/VERSION, models:/NAME@ALIAS or
models:/m-... A run stands for the model that is its result.
The run is looked up in `tracking.uri=...`, else in MLFLOW_TRACKING_URI, else in sqlite:///mlflow.db.

Exit code: 0 promoted (or with --dry-run: it would be); 3 not promoted; 1 failed; 2 the command cannot work; 130 or 143
interrupted.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scaleflow.commands.frame import make_main
from scaleflow.commands.tracked_run import answer_model, make_run_parser, parse_command
from scaleflow.config.compose import CommandWords
from scaleflow.config.typed_folder import in_typed_folder
from scaleflow.config.words import split_overrides
from scaleflow.errors import ConfigError
from scaleflow.features.promotion.decision import to_values
from scaleflow.features.promotion.steps import PromotionOutcome, open_registry, promote_if_better
from scaleflow.interfaces.formatting import Readable
from scaleflow.launcher.command_exit import FINISHED, NOT_PROMOTED, Outcome
from scaleflow.launcher.display import display_for, hidden_display
from scaleflow.launcher.processes.stop import StopRequest, catch_stop_signals


@dataclass(frozen=True)
class PromotionResult(Readable):
    """The result of a promotion.

    Attributes:
        is_promoted: whether the model is the champion; with `dry_run`, whether it would be.
        version: version of the registered model; None with `dry_run`.
        champion: version of the previous champion; None: there was no champion.
        conditions: each condition with its numbers, and whether it holds.
        comparison: comparison with the champion, from `scaleflow.features.promotion.decision.to_values`; None without a
            champion.
        smoke: measurements of the served model.
    """

    is_promoted: bool
    version: str | None
    champion: str | None
    conditions: Sequence[tuple[str, bool]]
    comparison: Mapping[str, Any] | None
    smoke: Mapping[str, float]

    def list_rows(self) -> list[tuple[str, str]]:
        rows = [("promoted", "yes" if self.is_promoted else "no")]
        if self.version is not None:
            rows.append(("version", self.version))
        if self.champion is not None:
            rows.append(("before", self.champion))
        for text, holds in self.conditions:
            rows.append(("holds" if holds else "does not hold", text))
        return rows


@make_main
def main(typed: list[str]) -> Outcome:
    parser = make_run_parser("promote", __doc__)
    parser.add_argument("--model", metavar="NAME", help="the registered model (default: promotion.model of the run)")
    parser.add_argument("--on", metavar="FILE", help="compare on all rows of this data, in place of the test split")
    parser.add_argument("--dry-run", action="store_true", help="decide, and change nothing in the store")
    parser.add_argument("--rollback", action="store_true", help="move the alias champion to the version before")
    words = split_overrides(typed)
    if "--rollback" in words:
        return roll_back(words)
    command, flags = parse_command(parser, typed)
    with display_for() as display, catch_stop_signals() as stop:
        done = promote_if_better(command, display, stop, name=flags.model, is_dry=flags.dry_run, on=flags.on)
        display.print_summary(describe_promotion(done))
    code = FINISHED if done.decision.is_promoted else NOT_PROMOTED
    return Outcome(code, lambda: {**answer_model(done.run), **asdict(to_result(done))})


def roll_back(words: list[str]) -> Outcome:
    parser = argparse.ArgumentParser("scaleflow promote", allow_abbrev=False)
    parser.add_argument("--rollback", action="store_true")
    parser.add_argument("--model")
    flags, rest = parser.parse_known_args(words)
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    if not flags.model or overrides != rest:
        raise ConfigError("--rollback: takes --model NAME, and no run; write scaleflow promote --rollback --model NAME")
    before, now = open_registry(flags.model, overrides).roll_back()
    display_for().print_summary([("champion", f"models:/{flags.model}/{now}, before it was version {before}")])
    return Outcome(read=lambda: {"registered": flags.model, "version": now, "before": before})


def describe_promotion(done: PromotionOutcome) -> list[tuple[str, str]]:
    """Returns the summary of the command."""
    name = done.name
    decision = done.decision
    if done.version is None:
        would = "would" if decision.is_promoted else "would not"
        end = f"dry run: it {would} become the champion of {name}"
    elif decision.is_promoted:
        end = f"models:/{name}/{done.version} is the champion"
    else:
        end = f"no: models:/{name}/{done.version} has the alias challenger"
    before = "none" if done.champion is None else f"models:/{name}/{done.champion}"
    rows = [("run", done.run.title), ("model", str(done.run.model_uri)), ("champion before", before)]
    for n, condition in enumerate(decision.conditions):
        answer = "yes" if condition.holds else "no"
        rows.append(("" if n else "because", f"{answer}: {condition.text}"))
    rows.append(("promoted", end))
    return rows


def to_result(done: PromotionOutcome) -> PromotionResult:
    """Returns the outcome as `scaleflow.promote_model` does."""
    decision = done.decision
    return PromotionResult(
        decision.is_promoted,
        done.version,
        done.champion,
        conditions=[(condition.text, condition.holds) for condition in decision.conditions],
        comparison=None if decision.comparison is None else to_values(decision.comparison),
        smoke=decision.smoke,
    )


@in_typed_folder
def promote_model(
    run_id: str,
    model: str | None = None,
    *overrides: str,
    dry_run: bool = False,
    trust: Sequence[str] = (),
    on: str | None = None,
) -> PromotionResult:
    """Makes a tracked model the champion of a registered model if it is better, as `scaleflow promote` does.

    Args:
        run_id: a run, its folder or a model, as on the command line.
        model: the registered model; None: `promotion.model` of the run.
        overrides: such as "promotion.environment=clean".
        dry_run: decide, but change nothing.
        trust: modules whose code may run, as `--trust`.
        on: a file or folder. The models are compared on its examples, as with `--on`.

    Raises:
        ConfigError: if the command cannot work.
        RunError: if it failed.
    """
    command = CommandWords(list(overrides), run_id=run_id, trusted=list(trust))
    with hidden_display() as display:
        done = promote_if_better(command, display, StopRequest(), name=model, is_dry=dry_run, on=on)
    return to_result(done)
