"""Draws a profile. Imports matplotlib only when it draws, and without a window system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scaleflow.profiler.step_breakdown import PARTS

COLOURS = {"input": "#d95f02", "compute": "#1b9e77", "allreduce": "#7570b3", "host": "#bdbdbd"}
OPS_SHOWN = 10
MAX_NAME = 48


def draw_profile(summary: dict[str, Any], picture: Path) -> bool:
    """Draws the parts of each traced step and the longest operations as a PNG. Returns False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 7), layout="constrained")
    steps_axes, ops_axes = figure.subplots(2, 1)
    steps = summary["each_step"]
    step_numbers = [step["number"] for step in steps]
    bottoms = [0.0] * len(steps)
    parts = PARTS if summary["percent"] is not None else ()
    for part in parts:
        heights = [step[part] for step in steps]
        label = f"{part} {summary['percent'][part]:.0f} %"
        steps_axes.bar(step_numbers, heights, bottom=bottoms, color=COLOURS[part], label=label, width=0.9)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    if parts:
        steps_axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    else:
        steps_axes.bar(step_numbers, [step["total"] for step in steps], color=COLOURS["host"], width=0.9)
    steps_axes.set_xlabel("step")
    steps_axes.set_ylabel("ms")
    steps_axes.set_title(f"a step: {summary['step_ms']['p50']:.3g} ms (p50), {summary['step_ms']['p95']:.3g} ms (p95)")
    ops = summary["ops"][:OPS_SHOWN][::-1]
    labels = [op["name"] if len(op["name"]) <= MAX_NAME else f"\u2026{op['name'][1 - MAX_NAME :]}" for op in ops]
    names = [f"{op['type']}  {label}" for op, label in zip(ops, labels, strict=True)]
    ops_axes.barh(range(len(ops)), [op["percent"] for op in ops], color="#4a7bb7")
    ops_axes.set_yticks(range(len(ops)), names, fontsize=8)
    ops_axes.set_xlabel("% of the self time of all operations")
    figure.savefig(picture)
    return True
