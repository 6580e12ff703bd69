"""How much memory the devices have."""

from __future__ import annotations

import subprocess

from scaleflow.interfaces import Hardware

ASK = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
ASK_SECONDS = 10.0
MIB = 1 << 20


def device_bytes(kind: str, options: Hardware) -> float | None:
    """The memory of the smallest GPU of this machine, or what `hardware.memory_limit_mb` leaves of it.

    Returns:
        None if the devices have no memory of their own, or if nvidia-smi does not say.
    """
    if kind != "GPU":
        return None
    if options.memory_limit_mb is not None:
        return options.memory_limit_mb * MIB
    try:
        found = subprocess.run(ASK, capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
        return min(float(line) for line in found.stdout.split()) * MIB
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
