"""Explains that a device is out of memory, and suggests how the same run needs less."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from scaleflow.interfaces import Plan

ALLOCATION = re.compile(r"allocating tensor with shape\[([\d,]*)\] and type (\w+) on (\S+)")


def explain_out_of_memory(message: str, plan: Plan, resolved: Mapping[str, Any]) -> str:
    """Formats TensorFlow's message as one line, with advice. `resolved` has `replicas` and `global_batch_size`."""
    allocation = ALLOCATION.search(message)
    device = allocation[3].rpartition("/")[2].removeprefix("device:") if allocation else "a device"
    tensor = f", for a tensor of shape [{allocation[1]}] and type {allocation[2]}" if allocation else ""
    replicas, total, parts = int(resolved["replicas"]), int(resolved["global_batch_size"]), plan.training.accumulate
    size = total // replicas // parts
    batch = (
        f"training.batch_size={size} x {replicas} replica(s) x training.accumulate={parts} is a global batch of {total}"
    )
    changes = [change for change in (suggest_batch_size(plan, size, parts), suggest_remat(plan)) if change]
    if changes:
        advice = f"{' or '.join(changes)} gives the same with less memory"
    else:
        advice = "a micro-batch has only one example already; use a smaller model, or a device with more memory"
    return f"out of memory on {device}{tensor}: {batch}; {advice}"


def suggest_remat(plan: Plan) -> str:
    """Suggests `hardware.remat=true`; empty if it is set, or refused with another option."""
    is_refused = plan.hardware.xla is True or plan.strategy.is_tpu
    return "" if is_refused or plan.hardware.remat is True else "hardware.remat=true (in more time)"


def suggest_batch_size(plan: Plan, size: int, parts: int) -> str:
    """Suggests a smaller micro-batch than `size` examples, and more than `parts` micro-batches per step.

    Empty if a micro-batch has one example.
    """
    if size == 1:
        return ""
    if plan.strategy.is_pipeline and size % (2 * plan.strategy.micro_batches) == 0:
        return f"strategy.micro_batches={2 * plan.strategy.micro_batches}"
    divisor = next(n for n in range(2, size + 1) if size % n == 0)
    key = "" if plan.training.global_batch_size is not None else f"training.batch_size={size // divisor} "
    engine = " training.engine=loop" if plan.training.engine == "fit" else ""
    return f"{key}training.accumulate={parts * divisor}{engine}"
