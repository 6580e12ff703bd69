"""Makes the records of a pipeline: tables, descriptions, `stages.yaml`, and a picture of its stages."""

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from scaleflow.features.pipelines.decisions import REUSE, RUN, StageProgress
from scaleflow.features.pipelines.definition import Stage
from scaleflow.features.pipelines.ledger import PipelineLedger, StageRecord
from scaleflow.features.pipelines.references import RARE
from scaleflow.interfaces.events import DatasetDescribed
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.recording.description import format_code_block, format_long_table, join_parts
from scaleflow.pages.charts import shorten_name, text, to_file, wrap_svg
from scaleflow.runs import EventReader, RunFolder

#: Colour of a stage's box, by its state.
COLOURS = {"FINISHED": "#cfe8cf", "reused": "#e4efe4", "RUNNING": "#fdf3c4", "FAILED": "#f4c7c3", "KILLED": "#f4c7c3"}

#: Colour of a stage that has not begun.
WAITING_COLOUR = "#eeeeee"

ARROW_HEAD = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0L8 4L0 8z" style="fill:#777777"/></marker></defs>'
)

#: Pixels: width and height of a box, and the space between boxes.
WIDTH = 170
HEIGHT = 50
GAP = 44


def lay_out_stages(needs: Mapping[str, frozenset[str]]) -> dict[str, tuple[int, int]]:
    """Returns column and row of each stage. A stage is to the right of all stages it needs."""
    columns: dict[str, int] = {}
    for name, before in needs.items():  # in running order
        columns[name] = 1 + max((columns[other] for other in before), default=-1)
    rows: dict[int, int] = {}
    cells = {}
    for name, column in columns.items():
        cells[name] = (column, rows.get(column, 0))
        rows[column] = rows.get(column, 0) + 1
    return cells


def draw_stages(needs: Mapping[str, frozenset[str]], stages: Mapping[str, StageProgress]) -> str:
    """Draws stages as boxes with state and time, with arrows from the stages they need. Returns an SVG file's content.

    `needs` lists the stages in running order.
    """
    corners = {}
    for name, (column, row) in lay_out_stages(needs).items():
        corners[name] = (GAP / 2 + column * (WIDTH + GAP), GAP / 2 + row * (HEIGHT + GAP))
    parts = [ARROW_HEAD]
    for name, (x, y) in corners.items():
        state = stages[name].state
        note = f"{state or 'waiting'} {format_seconds(stages[name].record)}".strip()
        style = f'style="fill:{COLOURS.get(state, WAITING_COLOUR)};stroke:#555555"'
        parts.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="7" {style}/>')
        middle = x + WIDTH / 2
        for words, line, weight in ((shorten_name(name), 21, "bold"), (note, 39, "normal")):
            style = f' style="fill:#1f2328;font-weight:{weight}"'  # boxes are light even on a dark page
            parts.append(text(middle, y + line, words, anchor="middle", more=style))
        for other in sorted(needs[name]):
            start = corners[other][0] + WIDTH, corners[other][1] + HEIGHT / 2
            course = f'd="M{start[0]} {start[1]}L{x - 2} {y + HEIGHT / 2}"'
            parts.append(f'<path {course} style="fill:none;stroke:#777777" marker-end="url(#arrow)"/>')
    width = max(x for x, _ in corners.values()) + WIDTH + GAP / 2
    height = max(y for _, y in corners.values()) + HEIGHT + GAP / 2
    return to_file(wrap_svg("the stages of the pipeline", width, height, parts))


#: Tag of a run: the name of its stage.
STAGE_TAG = "scaleflow.stage"

#: Maximum number of metrics per stage in the table, of characters in the description's table, and of characters shown
#: of an id.
MAX_SHOWN = 3
MAX_TABLE = 6000
SHORT = 8

#: Address of a version of a registered model.
VERSION = re.compile(r"models:/([^/@]+)/(\d+)")

#: A long digest. Only its first eight characters are shown.
DIGEST = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{8,}")


def format_seconds(record: StageRecord) -> str:
    return "" if record.ended is None else f"{record.ended - record.began:.1f} s"


def list_results(stages: Iterable[StageProgress], ledger: PipelineLedger) -> list[list[str]]:
    """Returns the table of results: a header, then a row per stage."""
    rows = [["stage", "command", "status", "time", "results", "run", "model", "data", "own run"]]
    for progress in stages:
        outputs = progress.outputs
        own_record = RunFolder(ledger.find_folder(progress.name, progress.record.attempt)).read_record()
        data = []
        if outputs:
            data = [f"{name} {digest}" for name, digest in list_stage_data(progress.record)]
        rows.append(
            [
                progress.name,
                progress.stage.command.name,
                progress.state or "waiting",
                format_seconds(progress.record),
                summarize_outputs(progress.stage, outputs),
                str(outputs.get("run_id") or ""),
                str(outputs.get("model") or ""),
                ", ".join(data),
                str(own_record.get("run_id") or ""),
            ]
        )
    return rows


def summarize_outputs(stage: Stage, outputs: Mapping[str, Any]) -> str:
    """Returns a stage's results in a few words: its command's summary, or its first metrics."""
    own = stage.command.summarize(outputs) if outputs else ""
    if own:
        return own
    metrics: Mapping[str, Any] = outputs.get("metrics") or {}
    names = [name for name in metrics if name.startswith("test/")]
    if not names:
        names = [name for name in metrics if "/" not in name]
    if not names:
        names = list(metrics)
    shown = [name for name in names if not name.endswith(("_low", "_high"))][:MAX_SHOWN]
    return ", ".join(f"{name} {metrics[name]:.4g}" for name in shown)


def list_stage_data(record: StageRecord) -> list[tuple[str, str]]:
    """Returns (name, digest) of the splits that a stage trained with, or else of the files it read."""
    folder = (record.outputs.get("best") or record.outputs).get("folder")
    events = EventReader(RunFolder(Path(folder)).events).read() if folder else ()
    for event in events:
        if isinstance(event, DatasetDescribed):
            return [(f"{event.name} {split}", str(facts["digest"])) for split, facts in event.splits.items()]
    return list(record.key["data"].items())


def describe_pipeline(status: str, rows: Sequence[Sequence[str]], command: str) -> str:
    """Returns the Markdown description of a pipeline's run: its results with links to runs and models."""
    head, *rest = rows
    table = [head[:-1]]
    states: Counter[str] = Counter()
    for stage, command_name, state, seconds, results, run_id, model, data, own_run_id in rest:
        states[state] += 1
        links = [link_run(run_id), link_model(model)]
        table.append(
            [link_run(own_run_id, stage), command_name, state, seconds, results, *links, shorten_digests(data)]
        )
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    parts = [
        f"**{status}.** Stages: {counts}",
        format_long_table(table, MAX_TABLE, "and {} more stages, in the artifact results.csv"),
        "The artifact stages.yaml has the command, the data, the code and the packages of each stage.",
        f"The command:\n\n{format_code_block('sh', command)}",
    ]
    return join_parts(parts)


def shorten_digests(text: str) -> str:
    """Returns a text with the first eight characters of each digest."""
    return DIGEST.sub(r"\1", text)


def describe_stage_run(name: str, status: str, text: str, *, outputs: Mapping[str, Any], command: str) -> str:
    """Returns the description of a stage's run if its command records none. `text`: its results, or why it failed."""
    links = [link_run(str(outputs.get("run_id") or "")), link_model(str(outputs.get("model") or ""))]
    about = " ".join(filter(None, links))
    first = f"**{status}**: stage {name}"
    if text:
        first += f": {text}"
    return join_parts([first, f"About {about}" if about else "", f"The command:\n\n{format_code_block('sh', command)}"])


def link_run(run_id: str, text: str = "") -> str:
    """Returns a Markdown link to a run's page, relative to the store's pages; only the text without a run."""
    if not run_id:
        return text
    return f"[{text or run_id[:SHORT]}](#/runs/{run_id})"


def link_model(uri: str) -> str:
    """Returns a link to the page of a registered version. For a logged model, returns its short id without a link."""
    version = VERSION.fullmatch(uri)
    if version:
        name, number = version.groups()
        return f"[{name} v{number}](#/models/{name}/versions/{number})"
    return uri.removeprefix("models:/")[: SHORT + 2]


def write_stages(stages: Iterable[StageProgress], ledger: PipelineLedger, config_dirs: tuple[str, ...]) -> Path:
    """Writes `stages.yaml`: each stage's resolved keys, command line, results and ingredients."""
    written: dict[str, Any] = {}
    for progress in stages:
        command = progress.stage.command
        decision = progress.decision
        record = progress.record
        entry: dict[str, Any] = {"command": command.name, "state": progress.state or "not run"}
        entry |= {"why": decision.why, **decision.values}
        if decision.action in (REUSE, RUN):
            folder = ledger.find_folder(progress.name, record.attempt)
            words = command.make_words(decision.values, folder, config_dirs)
            entry["line"] = shlex.join(["scaleflow", *words])
            entry["outputs"] = drop_rare(record.outputs)
            entry["seconds"] = round((record.ended or record.began) - record.began, 1)
            entry["made_of"] = {part: dict(facts) for part, facts in record.key.items() if part != "settings"}
            entry["splits"] = dict(list_stage_data(record)) if command.has_own_run else {}
        written[progress.name] = {key: value for key, value in entry.items() if value not in ("", {}, [])}
    path = ledger.run_folder / "stages.yaml"
    path.write_text(yaml.safe_dump(mask_secrets(written), sort_keys=False, width=120))
    return path


def drop_rare(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns outputs without rare metrics (speed, baselines) and without a second copy of a sweep's metrics."""
    kept: dict[str, Any] = {key: value for key, value in outputs.items() if key not in ("metrics", "best")}
    metrics = outputs.get("metrics") or {}
    best = outputs.get("best") or {}
    kept["metrics"] = {name: value for name, value in metrics.items() if not name.startswith(RARE)}
    kept["best"] = {key: value for key, value in best.items() if key != "metrics"}
    return {key: value for key, value in kept.items() if value not in (None, {})}


def write_picture(stages: Iterable[StageProgress], needs: Mapping[str, frozenset[str]], folder: Path) -> Path:
    """Writes `graph.svg`, the graph of stages with states and times."""
    path = folder / "graph.svg"
    partial = folder / f".{os.getpid()}.svg"
    by_name = {progress.name: progress for progress in stages}
    partial.write_text(draw_stages(needs, by_name), encoding="utf-8")
    partial.replace(path)
    return path
