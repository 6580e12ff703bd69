"""Analyzes a trace in its own process with the lowest priority: `python -m scaleflow.profiler.analyze`.

Reads the event `profile` as JSON from standard input, and writes the results to the event's artifacts folder.
"""

import contextlib
import gzip
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleflow.interfaces.events import StepsProfiled, parse_event
from scaleflow.pages.charts import Chart, compose_picture, draw_legend, draw_rates
from scaleflow.profiler.analysis_process import MARKDOWN, PICTURE, SUMMARY, TRACE, find_xplanes, worker_name
from scaleflow.profiler.summary import (
    PARTS,
    STEP_OPERATION,
    Summary,
    Timeline,
    divide_steps,
    parse_timeline,
    summarise,
    to_markdown,
)

COLOURS = {"input": "#d95f02", "compute": "#1b9e77", "allreduce": "#7570b3", "host": "#bdbdbd"}
OPS_SHOWN = 10
MAX_NAME = 48


def draw_profile(summary: Summary) -> str:
    """Draws the parts of each traced step and the longest operations; returns the content of an SVG file."""
    rows = [draw_step_parts(summary)]
    ops = summary["ops"][:OPS_SHOWN]
    if ops:
        rows.append([draw_operations(ops)])
    times = summary["step_ms"]
    title = f"a step: {times['p50']:.3g} ms (p50), {times['p95']:.3g} ms (p95); operations: % of their self time"
    return compose_picture(title, rows)


def draw_step_parts(summary: Summary) -> list[str]:
    """Draws a bar for each traced step, divided into its parts. Returns the chart and its legend."""
    steps = summary["each_step"]
    edges = [steps[0]["number"] - 0.5]
    totals = []
    for step in steps:
        edges.append(step["number"] + 0.5)
        totals.append(step["total"])
    chart = Chart("steps", (edges[0], edges[-1]), (0.0, max(totals)), labels=("step", "ms"), size=(640, 290))
    if summary["percent"] is None:
        chart.add_bars(edges, totals, kind="mark", colour=COLOURS["host"])
        return [chart.to_svg()]
    bottoms = [0.0] * len(steps)
    legend = []
    for part in PARTS:
        heights = [step[part] for step in steps]
        chart.add_bars(edges, heights, kind="mark", bottoms=bottoms, colour=COLOURS[part])
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        legend.append((f"{part} {summary['percent'][part]:.0f} %", COLOURS[part]))
    return [chart.to_svg(), draw_legend(legend)]


def draw_operations(ops: Sequence[Mapping[str, Any]]) -> str:
    """Draws a bar for each operation."""
    names = []
    shares = []
    for op in ops:
        name = op["name"]
        if len(name) > MAX_NAME:
            name = f"\u2026{name[1 - MAX_NAME :]}"
        names.append(f"{op['type']}  {name}")
        shares.append((op["percent"], math.nan, math.nan))
    letters = max(map(len, names))
    limit = max(share for share, _, _ in shares)
    return draw_rates("% of the self time of all operations", names, shares, limit=limit, letters=letters)


MIB = 1 << 20
PARTIAL = ".partial"


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(19)
    event = parse_event(json.loads(sys.stdin.read()))
    assert isinstance(event, StepsProfiled)
    analyze_profile(event, Path(event.folder).parent / event.artifacts)


def analyze_profile(event: StepsProfiled, into: Path) -> None:
    """Analyzes a window and writes a trace for Perfetto, a Markdown page, a plot and `summary.json` to a folder.

    It writes `summary.json` last, with a rename. If this file exists, the analysis is complete.
    """
    into.mkdir(parents=True, exist_ok=True)
    chief, *others = find_xplanes(Path(event.folder), (event.first, event.last))
    timeline = write_trace(chief, into / TRACE)
    summary = summarise(event, divide_steps(timeline), list_longest_operations(chief))
    summary["memory"] = {**event.facts.get("memory", {}), **read_peak_memory(chief)}
    summary["workers"] = [describe_process(chief, summary)]
    for other in others:
        steps = divide_steps(write_trace(other, into / TRACE.replace(".json", f"-{worker_name(other)}.json")))
        summary["workers"].append(describe_process(other, summarise(event, steps, [])))
    if event.facts.get("hardware") == "gpu" and not timeline.has_device:
        summary["advice"].insert(
            0,
            "The trace has no events of the GPU itself, so the host's operations are shown instead. The driver gives "
            "them to administrators only; NVreg_RestrictProfilingToAdminUsers=0 allows other users.",
        )
    (into / MARKDOWN).write_text(to_markdown(summary), encoding="utf-8")
    (into / PICTURE).write_text(draw_profile(summary), encoding="utf-8")
    partial = into / (SUMMARY + PARTIAL)
    partial.write_text(json.dumps(summary, indent=1))
    partial.replace(into / SUMMARY)


def describe_process(xplane: Path, summary: Summary) -> dict[str, Any]:
    """Returns what the comparison of processes shows of one process."""
    return {"name": worker_name(xplane), "step_ms": summary["step_ms"]["p50"], "percent": summary["percent"]}


def write_trace(xplane: Path, path: Path) -> Timeline:
    """Converts an xplane file to Chrome's trace format for Perfetto. Returns the timeline of its steps."""
    trace = json.loads(run_xprof_tool(xplane, "trace_viewer"))
    with gzip.open(path, "wt", compresslevel=5, encoding="utf-8") as file:
        json.dump(trace, file)
    return parse_timeline(trace)


def list_longest_operations(xplane: Path) -> list[dict[str, Any]]:
    """Returns the operations, by descending self time. Leaves out tf.data's iterators, which mostly wait."""
    tables = json.loads(run_xprof_tool(xplane, "framework_op_stats"))
    columns = [column["id"] for column in tables[-1]["cols"]]
    rows = []
    for table_row in tables[-1]["rows"]:
        values = [cell.get("v") for cell in table_row["c"]]
        row = dict(zip(columns, values, strict=True))
        if row["type"] not in ("Dataset", "IDLE"):
            rows.append(row)
    total = sum(row["total_self_time"] for row in rows) or 1.0
    ops = []
    for row in rows:
        ops.append(
            {
                "type": row["type"],
                "name": row["operation"],
                "where": row["host_or_device"].lower(),
                "count": int(row["occurrences"]),
                "self_ms": round(row["total_self_time"] / 1000, 4),
                "percent": round(100 * row["total_self_time"] / total, 2),
                "in_step": bool(STEP_OPERATION.search(row["operation"] + "/")),
            }
        )
    return sorted(ops, key=lambda op: -op["self_ms"])


def read_peak_memory(xplane: Path) -> dict[str, float]:
    """Returns the peak memory of each device allocator in the window, in MiB. Leaves out the CPU's allocators."""
    allocators = json.loads(run_xprof_tool(xplane, "memory_profile")).get("memoryProfilePerAllocator", {})
    peaks = {}
    for name, entry in allocators.items():
        stats = entry.get("profileSummary", {}).get("peakStats", {})
        peak = stats.get("peakBytesInUse")
        if peak and "cpu" not in name.lower():
            peaks[name] = int(peak) / MIB
    return peaks


def run_xprof_tool(xplane: Path, tool: str) -> str:
    """Returns the output of one of xprof's tools. xprof writes its cache files to a temporary folder."""
    from xprof.convert import raw_to_tool_data

    with tempfile.TemporaryDirectory(prefix="scaleflow-profile-") as folder:
        link = Path(folder) / xplane.name
        link.symlink_to(xplane.absolute())
        data, _ = raw_to_tool_data.xspace_to_tool_data([str(link)], tool, {})
    if not data:
        raise ValueError(f"xprof's {tool} returned nothing for {xplane.name}")
    return data.decode() if isinstance(data, bytes) else str(data)


if __name__ == "__main__":
    main()
