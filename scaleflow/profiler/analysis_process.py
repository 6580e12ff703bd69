"""The launcher's part of profiling: runs the analysis of a trace in a child process and collects its files.

The files of a profile have the paths that TensorBoard expects.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scaleflow.interfaces.events import ReportMade, StepsProfiled, to_fields
from scaleflow.profiler.summary import to_line, to_metrics

SUFFIX = ".xplane.pb"
SUMMARY = "summary.json"
MARKDOWN = "summary.md"
PICTURE = "profile.svg"
TRACE = "trace.json.gz"


def window_name(steps: tuple[int, int]) -> str:
    return f"steps_{steps[0]}-{steps[1]}"


def xplane_path(folder: Path, steps: tuple[int, int], worker: str) -> Path:
    return folder / "plugins" / "profile" / window_name(steps) / f"{worker}{SUFFIX}"


def find_xplanes(folder: Path, steps: tuple[int, int]) -> Sequence[Path]:
    """Returns the traces of a window: the chief's trace first, then the other workers' by their numbers."""
    traces = xplane_path(folder, steps, "x").parent.glob(f"*{SUFFIX}")

    def order(path: Path) -> tuple[bool, int, Path]:
        return worker_name(path) not in ("worker-0", "coordinator"), len(path.name), path  # worker-2 before worker-10

    return sorted(traces, key=order)


def worker_name(path: Path) -> str:
    return path.name.removesuffix(SUFFIX)


#: Time limit of the analysis. A trace of a few hundred MiB takes about a minute.
ANALYSIS_SECONDS = 600.0

INSTALL = "pip install 'scaleflow[profile]'"


def is_readable() -> bool:
    """Returns whether xprof is installed, which is needed to read traces."""
    return importlib.util.find_spec("xprof") is not None


def analyze_window(event: StepsProfiled, at: int = 0) -> ReportMade:
    """Analyzes the traced window of an event, unless an up-to-date summary exists. Keeps the trace if that fails.

    Returns:
        A report on the event at offset `at` of the event file. It has a line for the user, and metrics if the analysis
        succeeded.
    """
    folder = Path(event.folder)
    artifacts = event.artifacts
    traces = find_xplanes(folder, (event.first, event.last))
    files = [(str(path), f"profile/{path.parent.relative_to(folder)}") for path in traces]
    target = folder.parent / artifacts
    values = dict[str, float]()
    line = f"steps {event.first} to {event.last}: the trace "
    if not is_readable():
        line += f"is not analyzed, because xprof is not installed: {INSTALL}"
    elif not is_summary_of(target / SUMMARY, event) and (reason := run_analysis(event)):
        line += f"could not be analyzed: {reason}"
    else:
        summary = json.loads((target / SUMMARY).read_text())
        values = to_metrics(summary)
        line = to_line(summary)
        results = [target / SUMMARY, target / MARKDOWN, *sorted(target.glob("trace*.json.gz")), target / PICTURE]
        files += [(str(path), artifacts) for path in results if path.is_file()]
    return ReportMade(at, files, values, step=event.last, line=line, time=event.time)


def is_summary_of(summary: Path, event: StepsProfiled) -> bool:
    """Returns whether a summary belongs to the event's window and is at least as new as its traces."""
    try:
        contents = json.loads(summary.read_text())
    except (OSError, ValueError):  # it does not exist, or its writer died
        return False
    traces = find_xplanes(Path(event.folder), (event.first, event.last))
    is_newer = all(summary.stat().st_mtime >= trace.stat().st_mtime for trace in traces)
    return is_newer and (contents["first_step"], contents["last_step"]) == (event.first, event.last)


def run_analysis(event: StepsProfiled) -> str:
    """Analyzes a trace in a child process, so that training does not wait. Returns the error, or "" on success."""
    try:
        process = subprocess.run(
            [sys.executable, "-m", "scaleflow.profiler.analyze"],
            input=json.dumps(to_fields(event)),
            capture_output=True,
            text=True,
            timeout=ANALYSIS_SECONDS,
            check=False,
            process_group=0,  # keeps Ctrl-C from the child
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    last_line = [line for line in process.stderr.strip().splitlines() if line][-1:]
    return "" if not process.returncode else "".join(last_line) or f"exit status {process.returncode}"
