"""Decides which stages run again, and says why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaleflow.pipeline.composition import Composer
from scaleflow.pipeline.definition import DeclaredPipeline, Stage
from scaleflow.pipeline.keys import explain_change, make_key
from scaleflow.pipeline.references import select_output
from scaleflow.pipeline.state import Key, PipelineState, StageRecord
from scaleflow.pipeline.stored import StoredRuns
from scaleflow.runs import RunFolder

#: What becomes of a stage: its recorded outputs are used; it runs; its condition is false; `--only` leaves it out.
REUSE, RUN, SKIP, LEAVE = "reuse", "run", "skip", "leave"


@dataclass(frozen=True)
class StageDecision:
    """What becomes of a stage.

    Attributes:
        action: `reuse`, `run`, `skip` or `leave`.
        why: the reason; empty if it is reused.
        key: what it is made of; None if that is not known yet.
        values: its keys, resolved.
        continues: whether it goes on where an earlier command was interrupted.
    """

    action: str
    why: str = ""
    key: Key | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False


@dataclass(frozen=True)
class Choice:
    """The stages that flags name.

    Attributes:
        forced: those that run again, whatever they are made of.
        only: those that may run; empty: all.
    """

    forced: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()


class Decider:
    """Decides about the stages of one command.

    Args:
        pipeline: the pipeline.
        state: what earlier commands did.
        composer: composes configs.
        choice: the stages that flags name.
        stored: tells whether the run of a finished stage still exists, and what an alias names now.
    """

    def __init__(
        self,
        pipeline: DeclaredPipeline,
        state: PipelineState,
        composer: Composer,
        choice: Choice,
        stored: StoredRuns,
    ) -> None:
        self._pipeline, self._state, self._composer, self._choice = pipeline, state, composer, choice
        self._stored = stored

    def decide(self, stage: Stage) -> StageDecision:
        """Decides about a stage whose needs are over. Raises ConfigError if a reference has no value."""
        if not self._pipeline.holds(stage, self._read):
            return StageDecision(SKIP, "its condition is false")
        values = self._pipeline.resolve(stage, self._read)
        key = self._make_key(stage, values)
        record = self._state.records.get(stage.name)
        why = self._find_reason(stage, record, key)
        if not why:
            return StageDecision(REUSE, "", key, values)
        if not self.is_wanted(stage.name):
            return StageDecision(LEAVE, f"--only leaves it out ({why})", key, values)
        is_begun = record is not None and record.status != "FINISHED" and record.key == key
        return StageDecision(RUN, why, key, values, is_begun and not self._is_forced(stage, record))

    def is_wanted(self, name: str) -> bool:
        """Whether a stage may run: without `--only`, or if that names it."""
        return not self._choice.only or name in self._choice.only

    def _find_reason(self, stage: Stage, record: StageRecord | None, key: Key) -> str:
        """Returns why a stage runs; empty if its recorded result is used."""
        if record is None:
            return "has not run"
        if self._is_forced(stage, record):
            return "is forced"
        if change := explain_change(record.key, key):
            return change
        if record.status != "FINISHED":
            return {"FAILED": "failed before", "KILLED": "was interrupted"}.get(record.status, "was interrupted")
        return self._stored.find_loss(record)

    def _is_forced(self, stage: Stage, record: StageRecord | None) -> bool:
        """A forced stage that an interrupted command has begun is not forced twice."""
        is_done = record is not None and record.is_forced and record.execution == self._state.execution
        return self.is_named(stage.name) and not (is_done and self._state.status != "FINISHED")

    def is_named(self, name: str) -> bool:
        """Whether a flag says that a stage runs, whatever it is made of."""
        return name in self._choice.forced

    def _make_key(self, stage: Stage, values: Mapping[str, Any]) -> Key:
        composition = None
        if stage.command.composes:
            composition = self._composer.compose(stage, values["overrides"])
        elif stage.command.takes_run:
            run = self._stored.fix_aliases(str(values["run"]))
            composition = self._composer.compose(stage, values.get("overrides", []), run, self.find_run_folder(run))
        key = make_key(stage, values, composition, self._pipeline.config_dirs)
        settings = {name: self._stored.fix_aliases(text) for name, text in key["settings"].items()}
        return {**key, "settings": settings}

    def find_run_folder(self, run: str) -> Path | None:
        """Returns the folder of a run that a stage of this pipeline made, by its id or its model; None of another."""
        for record in self._state.records.values():
            for outputs in (record.outputs, record.outputs.get("best") or {}):
                if run in (outputs.get("run_id"), outputs.get("model")) and outputs.get("folder"):
                    folder = Path(outputs["folder"])
                    if RunFolder(folder).config.is_file() and RunFolder(folder).events.is_file():
                        return folder
        return None

    def _read(self, name: str, path: Sequence[str]) -> Any:
        return select_output(self._state.records[name].outputs, name, path)
