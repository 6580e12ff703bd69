"""What a training step needs of the host's memory, measured inside a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import keras

STATUS = Path("/proc/self/status")


class StepMemory(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Adds `step_mb` to the logs of the first epoch: the peak of resident memory above that before it, in MiB.

    TensorFlow counts no peak for a CPU. Linux does, of the process: `VmHWM`, which a write to `clear_refs` sets back to
    the present. Later epochs find what the first one has freed, which TensorFlow keeps.
    """

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            Path("/proc/self/clear_refs").write_text("5")
            self._before = read_mib("VmRSS")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            logs["step_mb"] = read_mib("VmHWM") - self._before


def read_mib(name: str) -> float:
    """A line of the process's status, in MiB."""
    found = re.search(rf"^{name}:\s*(\d+) kB", STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024
