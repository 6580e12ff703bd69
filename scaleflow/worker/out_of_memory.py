"""What to say where a device's memory is not enough: the same global batch in smaller parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from scaleflow.interfaces import Plan

ALLOCATION = re.compile(r"allocating tensor with shape\[([\d,]*)\] and type (\w+) on (\S+)")


def explain_out_of_memory(message: str, plan: Plan, resolved: Mapping[str, Any]) -> str:
    """The error in a line, and what would work.

    Args:
        message: TensorFlow's.
        plan: what was asked.
        resolved: what it came to: `replicas` and `global_batch_size`.
    """
    found = ALLOCATION.search(message)
    device = found[3].rpartition("/")[2].removeprefix("device:") if found else "a device"
    wanted = f", for a tensor of shape [{found[1]}] and type {found[2]}" if found else ""
    replicas, whole, parts = int(resolved["replicas"]), int(resolved["global_batch_size"]), plan.training.accumulate
    size = whole // replicas // parts
    batch = (
        f"training.batch_size={size} x {replicas} replica(s) x training.accumulate={parts} is a global batch of {whole}"
    )
    return f"out of memory on {device}{wanted}: {batch}; {suggest_batch_size(plan, size, parts)}"


def suggest_batch_size(plan: Plan, size: int, parts: int) -> str:
    """The next smaller portions, where there are some."""
    if size == 1:
        return "a portion is one example already: use a smaller model, or a device with more memory"
    if plan.strategy.name == "pipeline" and size % (2 * plan.strategy.micro_batches) == 0:
        return f"strategy.micro_batches={2 * plan.strategy.micro_batches} takes less memory for the same"
    divisor = next(n for n in range(2, size + 1) if size % n == 0)
    key = "" if plan.training.global_batch_size is not None else f"training.batch_size={size // divisor} "
    engine = " training.engine=loop" if plan.training.engine == "fit" else ""
    return f"{key}training.accumulate={parts * divisor}{engine} gives the same with less memory"
