"""Reads how much memory the devices have."""

from __future__ import annotations

import subprocess

from scaleflow.interfaces import Hardware

ASK = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
ASK_SECONDS = 10.0
MIB = 1 << 20


def device_bytes(kind: str, options: Hardware) -> float | None:
    """Returns the bytes of the machine's smallest GPU, or of `hardware.memory_limit_mb` if it is set.

    Returns None for a CPU or TPU, and if nvidia-smi fails.
    """
    if kind != "GPU":
        return None
    if options.memory_limit_mb is not None:
        return options.memory_limit_mb * MIB
    try:
        process = subprocess.run(ASK, capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
        return min(float(line) for line in process.stdout.split()) * MIB
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
