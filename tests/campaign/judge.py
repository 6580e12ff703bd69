"""Whether a run is what it would have been had nothing befallen it, and whether what is said of it is true."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaign.cases import STEPS, Case
from tests.event_log import events_in

#: (step, value) of each metric.
History = dict[str, list[tuple[int, float]]]

CODES = {"FINISHED": 0, "FAILED": 1, "KILLED": 143}


def last_end(folder: Path) -> dict[str, Any]:
    """The last word of a run on how it ended; a command that went on with it in vain does not change that."""
    found = [event for event in events_in(folder / "events.jsonl") if event["event"] in ("end", "ready")]
    return found[-1] if found and found[-1]["event"] == "end" else {}


def was_refused(folder: Path) -> bool:
    """Whether the last command came to nothing."""
    events = events_in(folder / "events.jsonl")
    return bool(events) and events[-1]["event"] == "refused"


def was_ready(folder: Path) -> bool:
    return any(event["event"] == "ready" for event in events_in(folder / "events.jsonl"))


def written(folder: Path) -> Counter[tuple[str, int, float, int]]:
    """The points that the chief wrote: (metric, step, value, milliseconds)."""
    points: Counter[tuple[str, int, float, int]] = Counter()
    for event in events_in(folder / "events.jsonl"):
        if event["event"] == "metrics":
            points.update((key, event["step"], value, event["time"]) for key, value in event["values"].items())
    return points


@dataclass
class Stored:
    """A run in the store."""

    status: str
    tags: dict[str, str]
    points: Counter[tuple[str, int, float, int]] = field(default_factory=Counter)


def stored(store: Path, experiment: str = "scaleflow") -> list[Stored]:
    """All runs of an experiment, read past MLflow."""
    asked = "SELECT run_uuid, status FROM runs JOIN experiments USING (experiment_id) WHERE experiments.name = ?"
    with contextlib.closing(sqlite3.connect(store, timeout=20)) as database:  # able to write: what was begun is undone
        return [
            Stored(
                status,
                dict(database.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (run,))),
                Counter(database.execute("SELECT key, step, value, timestamp FROM metrics WHERE run_uuid = ?", (run,))),
            )
            for run, status in database.execute(asked, (experiment,)).fetchall()
        ]


@dataclass(frozen=True)
class Whole:
    """What is compared of a finished run: its points but for those of speed, the weights, the last checkpoint."""

    history: History
    weights: dict[str, int]
    tensors: int
    steps: int
    updates: int


def whole(folder: Path) -> Whole:
    history: History = {}
    for key, step, value, _ in written(folder):
        if not key.startswith("perf/"):
            history.setdefault(key, []).append((step, value))
    newest = max((folder / "checkpoints").glob("step-*/checkpoint.json"))
    host = json.loads(newest.read_text())
    (data,) = newest.parent.glob("tensors.data*")
    return Whole(
        {key: sorted(points) for key, points in history.items()},
        weights(folder / "model" / "model.keras"),
        zlib.crc32(data.read_bytes()),
        host["step"],
        host["host"]["updates"],
    )


def weights(model: Path) -> dict[str, int]:
    """The CRC-32 of each array of an exported model, by its name."""
    import io

    import h5py
    import numpy as np

    with zipfile.ZipFile(model) as archive:
        data = io.BytesIO(archive.read("model.weights.h5"))
    found: dict[str, int] = {}
    with h5py.File(data) as file:
        file.visititems(
            lambda name, item: (
                found.__setitem__(name, zlib.crc32(np.asarray(item).tobytes()))
                if isinstance(item, h5py.Dataset)
                else None
            )
        )
    return found


def wrong_status(code: int, folder: Path, runs: Sequence[Stored], is_recorded: bool) -> Iterator[str]:
    """What is not true of a command that has ended by itself: its exit code, the run's last word, and the store's."""
    if not was_ready(folder):
        if code == 0:
            yield "exit code 0 of a run that never was"
        if runs:
            yield f"{len(runs)} run(s) in the store of a command that was never ready"
        return
    status = last_end(folder).get("status")
    yield from wrong_code(code, status, was_refused(folder))
    if not is_recorded:
        return
    if len(runs) != 1:
        yield f"{len(runs)} runs in the store"
    for run in runs[:1]:
        if (run.status, run.tags.get("scaleflow.status")) != (status, status):
            yield f"the store says {run.status}, its tag {run.tags.get('scaleflow.status')}, and it is {status}"


def wrong_code(code: int, status: str | None, came_to_nothing: bool) -> Iterator[str]:
    if status is None:
        yield f"the run's last word is missing; exit code {code}"
    elif came_to_nothing:
        if code not in (1, 2, 143):
            yield f"exit code {code} of a command that came to nothing"
    elif CODES[status] != code:
        yield f"exit code {code} of a run that is {status}"


def lost_points(folder: Path, runs: Sequence[Stored]) -> Iterator[str]:
    """What of the points that the chief wrote is not in the store exactly once.

    Those of the machine and of a profile are the recorder's own.
    """
    there: Counter[tuple[str, int, float, int]] = Counter()
    for run in runs:
        there.update({point: n for point, n in run.points.items() if not point[0].startswith(("system/", "profile/"))})
    told = written(folder)
    if missing := told - there:
        yield f"{missing.total()} of {told.total()} points are not in the store, for one {next(iter(missing))}"
    if more := there - told:
        yield f"{more.total()} points in the store were not written, or are there twice, for one {next(iter(more))}"


def twice(folder: Path) -> Iterator[str]:
    """The steps at which a metric has more than one point."""
    steps = Counter((key, step) for key, step, _, _ in written(folder).elements())
    for (key, step), times in steps.items():
        if times > 1:
            yield f"{key} has {times} points at step {step}"
            return


def differences(case: Case, found: Whole, undisturbed: Whole) -> Iterator[str]:
    """In what a finished run is not what the undisturbed one was."""
    if case.strategy == "parameter_server":
        yield from differences_in_steps(found, undisturbed)
        return
    if found.weights != undisturbed.weights:
        yield "the weights differ from the undisturbed run's"
    if found.tensors != undisturbed.tensors:
        yield "what the last checkpoint holds differs from the undisturbed run's"
    for key in sorted({*found.history, *undisturbed.history}):
        mine, theirs = found.history.get(key, []), undisturbed.history.get(key, [])
        if mine != theirs:
            missing, more = sorted(set(theirs) - set(mine)), sorted(set(mine) - set(theirs))
            yield f"{key}: missing {missing[:3]}, too many {more[:3]}, of {len(theirs)} points"
            return


def differences_in_steps(found: Whole, undisturbed: Whole) -> Iterator[str]:
    """Steps are as many as in the undisturbed run; of updates there may be one more to each worker that was lost."""
    if found.steps != STEPS:
        yield f"{found.steps} steps of {STEPS}"
    if not 0 <= found.updates - undisturbed.updates <= 2:
        yield f"{found.updates} updates, and {undisturbed.updates} in the undisturbed run"
    for key, points in undisturbed.history.items():
        mine = found.history.get(key, [])
        if len(mine) != len(points):
            yield f"{key}: {len(mine)} points, and {len(points)} in the undisturbed run"
