"""Reads a profile, in a process of its own and with the lowest priority: `python -m scaleflow.profiler.analyze`.

Standard input has the event `profile`; what is made of it is left beside the trace.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaleflow.profiler.paths import PICTURE, SUMMARY, TRACE, WORDS, find_xplanes, worker_name
from scaleflow.profiler.plot import draw_profile
from scaleflow.profiler.step_breakdown import OF_STEP, Timeline, divide_steps, parse_timeline
from scaleflow.profiler.summary import Summary, summarise, to_markdown

MIB = 1 << 20
PARTIAL = ".partial"


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(19)
    event = json.loads(sys.stdin.read())
    analyze_profile(event, Path(event["folder"]).parent / event["artifacts"])


def analyze_profile(event: Mapping[str, Any], into: Path) -> Summary:
    """Makes a trace for Perfetto, words, picture and summary of a window; the last says that all is there."""
    into.mkdir(parents=True, exist_ok=True)
    found = find_xplanes(Path(event["folder"]), (event["first"], event["last"]))
    chief, *others = found
    trace, line = chrome_trace(chief)
    write_trace(into / TRACE, trace)
    is_hidden = event["facts"].get("hardware") == "gpu" and not line.has_device
    summary = summarise(event, divide_steps(line), list_longest_operations(chief))
    summary["memory"] = {**event["facts"].get("memory", {}), **read_peak_memory(chief)}
    summary["workers"] = [to_figures(worker_name(chief), summary)]
    for other in others:
        trace, line = chrome_trace(other)
        write_trace(into / TRACE.replace(".json", f"-{worker_name(other)}.json"), trace)
        summary["workers"].append(to_figures(worker_name(other), summarise(event, divide_steps(line), [])))
    if is_hidden:
        summary["advice"].insert(
            0,
            "The trace has none of the GPU's own events, so that the host's operations stand for them: the driver "
            "keeps them to administrators (NVreg_RestrictProfilingToAdminUsers=0 lets others have them).",
        )
    (into / WORDS).write_text(to_markdown(summary), encoding="utf-8")
    draw_profile(summary, into / PICTURE)
    partial = into / (SUMMARY + PARTIAL)
    partial.write_text(json.dumps(summary, indent=1))
    partial.replace(into / SUMMARY)
    return summary


def to_figures(name: str, summary: Summary) -> dict[str, Any]:
    """What is compared between processes."""
    return {"name": name, "step_ms": summary["step_ms"]["p50"], "percent": summary["percent"]}


def chrome_trace(xplane: Path) -> tuple[dict[str, Any], Timeline]:
    """A trace in Chrome's format, and what there is of steps in it."""
    trace = json.loads(run_xprof_tool(xplane, "trace_viewer"))
    return trace, parse_timeline(trace)


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    with gzip.open(path, "wt", compresslevel=5, encoding="utf-8") as file:
        json.dump(trace, file)


def list_longest_operations(xplane: Path) -> list[dict[str, Any]]:
    """Operations by their self time, the longest first; without the iterators of tf.data, which mostly wait."""
    tables = json.loads(run_xprof_tool(xplane, "framework_op_stats"))
    columns = [column["id"] for column in tables[-1]["cols"]]
    rows = [dict(zip(columns, (cell.get("v") for cell in row["c"]), strict=True)) for row in tables[-1]["rows"]]
    rows = [row for row in rows if row["type"] not in ("Dataset", "IDLE")]
    whole = sum(row["total_self_time"] for row in rows) or 1.0
    ops = [
        {
            "type": row["type"],
            "name": row["operation"],
            "where": row["host_or_device"].lower(),
            "count": int(row["occurrences"]),
            "self_ms": round(row["total_self_time"] / 1000, 4),
            "percent": round(100 * row["total_self_time"] / whole, 2),
            "in_step": bool(OF_STEP.search(row["operation"] + "/")),
        }
        for row in rows
    ]
    return sorted(ops, key=lambda op: -op["self_ms"])


def read_peak_memory(xplane: Path) -> dict[str, float]:
    """The peak of each allocator of a device in the window, in MiB; a CPU's is no memory of a device."""
    found = json.loads(run_xprof_tool(xplane, "memory_profile")).get("memoryProfilePerAllocator", {})
    summaries = {name: each.get("profileSummary", {}) for name, each in found.items()}
    peaks = {name: each.get("peakStats", {}).get("peakBytesInUse") for name, each in summaries.items()}
    return {name: int(peak) / MIB for name, peak in peaks.items() if peak and "cpu" not in name.lower()}


def run_xprof_tool(xplane: Path, tool: str) -> str:
    """What one of xprof's tools gives; what it keeps beside what it reads goes with a temporary folder."""
    from xprof.convert import raw_to_tool_data

    with tempfile.TemporaryDirectory(prefix="scaleflow-profile-") as folder:
        link = Path(folder) / xplane.name
        link.symlink_to(xplane.absolute())
        data, _ = raw_to_tool_data.xspace_to_tool_data([str(link)], tool, {})
    if not data:
        raise ValueError(f"xprof's {tool} gives nothing of {xplane.name}")
    return data.decode() if isinstance(data, bytes) else str(data)


if __name__ == "__main__":
    main()
