"""What is wrong with a command that has ended, and whether two runs had the same losses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.campaign.judge import Stored, last_end, lost_points, written
from tests.event_log import events_in

#: What only a programmer would say: the class of an exception, or that a traceback is to be read.
NOT_IN_WORDS = re.compile(r"\b\w*[a-z](?:Error|Exception)\b|[Tt]raceback")

#: How far losses may be from each other (relative; absolute) where their runs differ in how they are computed.
TOLERANCE = {
    "float32": (2e-3, 2e-4),
    "mixed": (0.08, 0.02),
    "mixed_bfloat16": (0.08, 0.02),
    "mixed_float16": (0.02, 5e-3),
}

#: And where they are computed alike.
SAME = (1e-4, 1e-5)

#: Longest refusal, in lines.
MAX_LINES = 3

Points = dict[tuple[str, int], float]


def refusal_lines(said: str) -> list[str]:
    """The lines of a refusal, without those before it, which say what the command was doing."""
    lines = [line for line in said.splitlines() if line.strip()]
    first = next((index for index, line in enumerate(lines) if line.startswith("scaleflow: ")), 0)
    return lines[first:]


def refusal_of(said: str) -> str:
    """What a command says that it refuses, in one line."""
    return " ".join(refusal_lines(said))


def wrong_refusal(said: str) -> Iterator[str]:
    """What is wrong with the words of a refusal."""
    text = refusal_of(said)
    if not text.startswith("scaleflow: "):
        yield f"refused without a word of ours: {text[-300:]}"
    elif found := NOT_IN_WORDS.search(text):
        yield f"not refused in words ({found[0]}): {text}"
    elif len(refusal_lines(said)) > MAX_LINES:
        yield f"refused in {len(refusal_lines(said))} lines: {text}"


def wrong_end(folder: Path, said: str) -> Iterator[str]:
    """What is wrong with a run whose command says by its exit code that it is finished."""
    end = last_end(folder)
    if end.get("status") != "FINISHED":
        yield f"exit code 0, and the run's last word is {end or 'missing'}"
    if "Traceback" in said:
        yield "a traceback on the terminal"
    for (key, step), value in points(folder).items():
        if not math.isfinite(value):
            yield f"{key} is {value} at step {step}"
            return


def wrong_record(folder: Path, runs: Sequence[Stored]) -> Iterator[str]:
    """What is wrong with the record of the one run in the store."""
    if [run.status for run in runs] != ["FINISHED"]:
        yield f"the store says {[run.status for run in runs]}"
    yield from lost_points(folder, runs)


def points(folder: Path) -> Points:
    """What a run reported, without what is of its speed or its machine."""
    return {
        (key, step): value
        for key, step, value, _ in written(folder)
        if not key.startswith(("perf/", "system/", "profile/"))
    }


def steps_of(folder: Path) -> int:
    """How many steps a run is to take."""
    return max((event["steps"] for event in events_in(folder / "events.jsonl") if event["event"] == "ready"), default=0)


def differences(mine: Points, theirs: Points, tolerance: tuple[float, float], only_losses: bool) -> Iterator[str]:
    """In what two runs differ: which values an evaluation gave, and their losses where both have them."""
    for split in ("val/", "test/"):
        one, other = ({point for point in run if point[0].startswith(split)} for run in (mine, theirs))
        if one != other:
            yield f"values of {split[:-1]} at other steps: {sorted(one ^ other)[:4]}"
            return
    relative, absolute = tolerance
    for key, step in sorted(mine.keys() & theirs.keys(), key=lambda point: (point[1], point[0])):
        if only_losses and not key.endswith("/loss"):
            continue
        value, wanted = mine[key, step], theirs[key, step]
        if not abs(value - wanted) <= absolute + relative * abs(wanted):  # nor is NaN as it should be
            yield f"{key} at step {step} is {value:.7g}, and should be {wanted:.7g}"
            return
