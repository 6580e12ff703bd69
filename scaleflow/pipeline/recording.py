"""Records a pipeline in the store: its own run, the parent of the runs of its stages, and those of other commands."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from scaleflow.interfaces import Status, Tracking
from scaleflow.interfaces.events import (
    ArtifactWritten,
    DescriptionSet,
    MetricsLogged,
    RunEnded,
    RunReady,
    TagsSet,
)
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.recording.command_run import CommandRun
from scaleflow.launcher.recording.description import format_table, pad_cells
from scaleflow.pipeline.definition import DeclaredPipeline, Stage
from scaleflow.pipeline.picture import draw_stages
from scaleflow.pipeline.state import StageRecord
from scaleflow.runs import RunFolder, RunState

#: The tag with the name of the stage that a run is of.
STAGE_TAG = "scaleflow.stage"

#: The most metrics of a stage that the table shows.
MOST_SHOWN = 3


class RecordedRun:
    """The run of a pipeline, or of a stage whose command records none.

    Args:
        folder: of the run; an earlier command may have begun it.
        what: the run in messages.
        tracking: the options of the store.
    """

    def __init__(self, folder: Path, what: str, tracking: Tracking) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.files = RunFolder(folder)
        self._is_resumed = RunState.read(folder).is_ready
        self._tracking = tracking
        self._lock = self.files.lock_recording()
        self._lock.__enter__()
        self._run = CommandRun(self.files, self._is_resumed, what)

    def open(self, name: str, tags: Mapping[str, str], params: Mapping[str, str], parent: Path | None) -> None:
        """Opens the run in the store; `parent` is the folder of the pipeline's own run."""
        section = {"name": self._tracking.name, "uri": self._tracking.uri, "experiment": self._tracking.experiment}
        self.files.config.write_text(OmegaConf.to_yaml(OmegaConf.create(mask_secrets({"tracking": section}))))
        began = int(time.time() * 1000)
        resumed = 0 if self._is_resumed else None
        self._run.open(
            RunReady(name, tags, params, began, parent=None if parent is None else str(parent), resumed=resumed),
            self._tracking,
        )

    @property
    def refusal(self) -> Exception | None:
        """Why the store cannot be used; it waits until that is known."""
        recorder = self._run.recorder
        assert recorder is not None
        recorder.is_settled.wait()
        return recorder.refusal

    def add(self, metrics: Mapping[str, Any], files: Sequence[Path], tags: Mapping[str, str], text: str = "") -> None:
        """Records values, files that exist, and the description."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        if numbers:
            self._run.emit(MetricsLogged(0, numbers))
        for path in files:
            if path.is_file():
                self._run.emit(ArtifactWritten(str(path)))
        if tags:
            self._run.emit(TagsSet(dict(tags)))
        if text:
            self._run.emit(DescriptionSet(text))

    def end(self, status: Status, error: str = "") -> None:
        self._run.emit(RunEnded(status, error))

    def close(self, should_stop: Any) -> bool:
        """Waits until everything is recorded; returns whether it is."""
        try:
            return self._run.finish(should_stop)
        finally:
            self._lock.__exit__(None, None, None)

    def describe_links(self) -> Sequence[tuple[str, str]]:
        return self._run.describe_links()


def format_seconds(record: StageRecord | None) -> str:
    if record is None or record.ended is None:
        return ""
    return f"{record.ended - record.began:.1f} s"


def list_results(
    pipeline: DeclaredPipeline, states: Mapping[str, str], records: Mapping[str, StageRecord]
) -> list[list[str]]:
    """Returns the table of results: a row for each stage, with a head."""
    rows = [["stage", "command", "status", "time", "results", "run", "model"]]
    for name, stage in pipeline.stages.items():
        record = records.get(name)
        outputs = record.outputs if record is not None and states.get(name) in ("FINISHED", "reused") else {}
        rows.append(
            [
                *(name, stage.command.name, states.get(name, "waiting"), format_seconds(record)),
                *(summarize_outputs(stage, outputs), str(outputs.get("run_id") or ""), str(outputs.get("model") or "")),
            ]
        )
    return rows


def summarize_outputs(stage: Stage, outputs: Mapping[str, Any]) -> str:
    """Returns the results of a stage in a few words."""
    if stage.command.name == "promote" and outputs:
        return "promoted" if outputs["promoted"] else "not promoted"
    if stage.command.name == "python" and outputs:
        return str(outputs.get("result"))[:60]
    metrics: Mapping[str, Any] = outputs.get("metrics") or {}
    first = [name for name in metrics if name.startswith("test/")] or [*metrics]
    chosen = [name for name in first if not name.endswith(("_low", "_high"))][:MOST_SHOWN]
    return ", ".join(f"{name} {metrics[name]:.4g}" for name in chosen)


def write_results(folder: Path, rows: Sequence[Sequence[str]]) -> Path:
    """Writes the table as `results.csv`."""
    path = folder / "results.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def describe_pipeline(rows: Sequence[Sequence[str]], links: Mapping[str, str], command: str) -> str:
    """Returns the description of a pipeline's run, in Markdown: its results with links to the runs of the stages.

    Args:
        rows: of `list_results`.
        links: the address of each run's page, by the run's id.
        command: what was typed.
    """
    head, *rest = rows
    linked = [[*row[:5], f"[{row[5][:8]}]({links[row[5]]})" if row[5] in links else row[5], row[6]] for row in rest]
    return f"{format_table(pad_cells([head, *linked]))}\n\n```sh\n{command}\n```"


def write_picture(
    pipeline: DeclaredPipeline, states: Mapping[str, str], records: Mapping[str, StageRecord], folder: Path
) -> Path:
    """Draws the graph of the stages with their states and times as `graph.png`."""
    notes = {
        name: " ".join(filter(None, (states.get(name, "waiting"), format_seconds(records.get(name)))))
        for name in pipeline.stages
    }
    path = folder / "graph.png"
    partial = folder / f".{os.getpid()}.png"
    draw_stages(pipeline.needs, notes, states, partial)
    partial.replace(path)
    return path
