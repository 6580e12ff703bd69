"""Checks: what one is, how they run one after another within a time limit, and what came of each."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.gpu.bench import Bench, CheckFailed, CheckSkipped, Options, OutOfTime, Value
from benchmarks.gpu.device import Device

Status = Literal["passed", "failed", "skipped", "not run"]

NO_GPU = "there is no NVIDIA GPU: nvidia-smi lists none that may be used"
ONLY_GPU = "it needs a GPU's own memory or counters"


@dataclass(frozen=True)
class Check:
    """A part of what is promised for GPUs.

    Attributes:
        name, group: how it is selected and reported.
        seconds: how long it may take.
        function: measures; it fills the bench's values, and raises if something is wrong.
        tolerance: what is allowed, for the report.
        devices: how many GPUs, or logical CPUs, it needs.
        only_gpu: whether it makes no sense on CPUs.
    """

    name: str
    group: str
    seconds: float
    function: Callable[[Bench], None]
    tolerance: str = ""
    devices: int = 1
    only_gpu: bool = False


@dataclass
class Result:
    """What came of a check: `reason` says why it did not pass, `remarks` name rules that the values contradict."""

    check: Check
    status: Status
    reason: str = ""
    values: dict[str, Value] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run_checks(
    checks: Sequence[Check],
    device: Device | None,
    seconds: float,
    options: Options | None = None,
    obstacle: str | None = None,
) -> Iterator[Result]:
    """Runs checks one after another; yields what came of each.

    Args:
        checks: in order.
        device: what they run on; None skips all of them.
        seconds: the total time limit. What has not ended by then is not run.
        options: those of the command.
        obstacle: why none of them can pass; they fail without being run.
    """
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="scaleflow-gpu-") as shared:
        for check in checks:
            reason = find_reason_to_skip(check, device)
            if device is None or reason is not None:
                yield Result(check, "skipped", reason or NO_GPU)
            elif obstacle is not None:
                yield Result(check, "failed", obstacle)
            elif time.monotonic() >= end:
                yield Result(check, "not run", "out of time")
            else:
                yield run_check(check, Bench(device, Path(shared), options or Options()), end)


def find_reason_to_skip(check: Check, device: Device | None) -> str | None:
    if device is None:
        return NO_GPU
    if check.only_gpu and device.kind == "cpu":
        return ONLY_GPU
    if device.count < check.devices:
        return f"it needs {check.devices} devices, and there is {device.count}"
    return None


def run_check(check: Check, bench: Bench, end: float) -> Result:
    """Runs a check until `end`, on the clock of `time.monotonic`, or until its own time is over."""
    begin = time.monotonic()
    result = Result(check, "passed", values=bench.values, remarks=bench.remarks)
    with tempfile.TemporaryDirectory(prefix=f"{check.name}-", dir=bench.shared) as folder:
        bench.folder, bench.deadline = Path(folder), min(end, begin + check.seconds)
        try:
            check.function(bench)
        except CheckSkipped as skipped:
            result.status, result.reason = "skipped", str(skipped)
        except OutOfTime:
            is_total = time.monotonic() >= end
            result.status = "not run" if is_total else "failed"
            result.reason = "out of time" if is_total else f"it took longer than {check.seconds:g} s"
        except CheckFailed as failure:
            result.status, result.reason = "failed", str(failure)
        except Exception as error:  # of one check; the others go on
            traceback.print_exc()
            result.status, result.reason = "failed", f"{type(error).__name__}: {error}"
        finally:
            bench.stop_processes()
    result.seconds = time.monotonic() - begin
    return result
