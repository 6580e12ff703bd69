"""The launcher's part: has a profile read beside the training, and says what there is to keep."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaleflow.profiler.paths import PICTURE, SUMMARY, WORDS, find_xplanes
from scaleflow.profiler.summary import to_line, to_metrics

#: A trace of a few hundred MiB is read in a minute; what takes longer than this is not going to end.
SECONDS_TO_READ = 600.0

INSTALL = "pip install 'scaleflow[profile]'"


@dataclass(frozen=True)
class Profile:
    """What there is of a window.

    Attributes:
        files: (path, folder among the run's artifacts).
        values: metrics, at its last step.
        line: what to tell the user.
    """

    files: Sequence[tuple[Path, str]]
    values: Mapping[str, float]
    line: str


def is_readable() -> bool:
    """Whether there is what reads a trace."""
    return importlib.util.find_spec("xprof") is not None


def analyze_window(event: Mapping[str, Any]) -> Profile:
    """Reads the window that an event tells of, once; the trace is kept in any case.

    Args:
        event: `profile`, with `folder`, `first`, `last` and `artifacts`, the folder of what is made of it.
    """
    folder, own = Path(event["folder"]), event["artifacts"]
    traces = find_xplanes(folder, (event["first"], event["last"]))
    files = [(path, f"profile/{path.parent.relative_to(folder)}") for path in traces]
    into = folder.parent / own
    steps = f"steps {event['first']} to {event['last']}"
    if not is_readable():
        return Profile(files, {}, f"{steps}: the trace is not read, which takes xprof: {INSTALL}")
    reason = "" if (into / SUMMARY).is_file() and is_summary_of(into / SUMMARY, event) else run_analysis(event)
    if reason:
        return Profile(files, {}, f"{steps}: the trace could not be read: {reason}")
    summary = json.loads((into / SUMMARY).read_text())
    made = [into / SUMMARY, into / WORDS, *sorted(into.glob("trace*.json.gz"))]
    made += [into / PICTURE] if (into / PICTURE).is_file() else []
    return Profile([*files, *((path, own) for path in made)], to_metrics(summary), to_line(summary))


def is_summary_of(summary: Path, event: Mapping[str, Any]) -> bool:
    """Whether a summary is of the window that an event tells of, and no older than its trace."""
    found = json.loads(summary.read_text())
    traces = find_xplanes(Path(event["folder"]), (event["first"], event["last"]))
    is_newer = all(summary.stat().st_mtime >= trace.stat().st_mtime for trace in traces)
    return is_newer and (found["first_step"], found["last_step"]) == (event["first"], event["last"])


def run_analysis(event: Mapping[str, Any]) -> str:
    """Reads it in a process of its own, so that the training does not wait; gives what went wrong, if something did."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "scaleflow.profiler.analyze"],
            input=json.dumps(event),
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_READ,
            check=False,
            process_group=0,  # Ctrl-C is for the launcher
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    last = [line for line in done.stderr.strip().splitlines() if line][-1:]
    return "" if not done.returncode else "".join(last) or f"exit status {done.returncode}"
