"""Turns exceptions of training into one line for the user."""

from __future__ import annotations

import bdb
import contextlib
import re
import traceback
from collections.abc import Mapping
from typing import Any

from scaleflow.cluster.tasks import find_unreachable
from scaleflow.errors import ScaleflowError, find_cause, read_reason
from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import ArtifactWritten, Emit, FaultReported, Note
from scaleflow.interfaces.extras import guard_extra
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.runs import WorkerProcess

ALLOCATION = re.compile(r"allocating tensor with shape\[([\d,]*)\] and type (\w+) on (\S+)")


def explain_out_of_memory(message: str, plan: Plan, resolved: Mapping[str, Any]) -> str:
    """Formats TensorFlow's message as one line, with advice. `resolved` has `replicas` and `global_batch_size`."""
    allocation = ALLOCATION.search(message)
    device = allocation[3].rpartition("/")[2].removeprefix("device:") if allocation else "a device"
    tensor = f", for a tensor of shape [{allocation[1]}] and type {allocation[2]}" if allocation else ""
    replicas = int(resolved["replicas"])
    total = int(resolved["global_batch_size"])
    parts = plan.training.accumulate
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
    """Suggests `hardware.remat=true`; empty if it is already set, or not allowed with another option."""
    is_refused = plan.hardware.xla is True or plan.strategy.is_tpu
    return "" if is_refused or plan.hardware.remat is True else "hardware.remat=true (in more time)"


def suggest_batch_size(plan: Plan, size: int, parts: int) -> str:
    """Suggests a micro-batch of fewer than `size` examples, and more than `parts` micro-batches per step.

    Returns "" if a micro-batch has one example.
    """
    if size == 1:
        return ""
    if plan.strategy.is_pipeline and size % (2 * plan.strategy.micro_batches) == 0:
        return f"strategy.micro_batches={2 * plan.strategy.micro_batches}"
    divisor = next(n for n in range(2, size + 1) if size % n == 0)
    key = "" if plan.training.global_batch_size is not None else f"training.batch_size={size // divisor} "
    engine = " training.engine=loop" if plan.training.engine == "fit" else ""
    return f"{key}training.accumulate={parts * divisor}{engine}"


#: A message that already begins with the class of its error.
NAMED = re.compile(r"\w*(Error|Exception): ")


def report_failure(process: WorkerProcess, error: Exception) -> None:
    """Reports that training failed. The launcher sees all workers and decides how the run ends."""
    spec = process.spec
    traceback.print_exc()
    if spec.worker == 0:
        spec.files.traceback.write_text(mask_secrets(traceback.format_exc()))
        process.emit(ArtifactWritten(str(spec.files.traceback)))
    text = format_failure(error, spec.plan)
    is_lost = is_loss_of_peer(error)
    task = spec.plan.task
    absent = find_unreachable(spec.plan, task.peers) if is_lost and task else ""
    if absent:
        text = f"no answer from {absent}: {text}"
    process.emit(FaultReported(text, lost_peer=is_lost))


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether an error means that a device is out of memory."""
    import tensorflow as tf

    return isinstance(error, tf.errors.ResourceExhaustedError)


def is_loss_of_peer(error: Exception) -> bool:
    """Returns whether an error means that another process is gone or does not answer."""
    import tensorflow as tf

    return isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError | tf.errors.DeadlineExceededError)


def guard(missing: str, emit: Emit) -> contextlib.AbstractContextManager[None]:
    """Turns a failure of an optional part of a run into a note, like `guard_extra`, unless another process is lost."""
    return guard_extra(missing, lambda text: emit(Note(text)), is_loss_of_peer)


def format_failure(error: Exception, plan: Plan) -> str:
    """Formats an error as one line, with the line of the user's own code that raised it.

    scaleflow's own errors explain themselves. Any other error begins with its class.
    """
    if isinstance(error, ScaleflowError):
        return str(error)
    if isinstance(error, bdb.BdbQuit):
        return "the debugger ended" + (
            "" if plan.debug.inline else "; a worker has no terminal for it, so use debug=inline"
        )
    match = re.search(r"\{\{node (\S+)/CheckNumericsV2\}\}", str(error))
    if match:
        return f"debug.nan: the operation {match[1]} returned NaN or Inf; the log shows where it was called"
    reason = read_reason(error)
    if NAMED.match(reason):
        return reason
    where = "while data was read: " if "Error in user-defined function passed to" in str(error) else ""
    return f"{type(find_cause(error)).__name__}: {where}{reason}"
