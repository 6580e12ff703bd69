"""Peak speed of GPUs by name and by the dtype that layers compute in."""

from __future__ import annotations

import re
from collections.abc import Sequence

import tensorflow as tf

TERA = 1e12

#: Dense operations per second of the tensor cores in units of 10^12 (data sheets often give twice as much, for sparse
#: matrices). float32 is TF32, which TensorFlow uses for float32 matrices from Ampere on; before, it is plain float32.
#: None: no tensor cores for that dtype. The first pattern that matches counts.
#: Sources: NVIDIA's data sheets: B200 (DGX B200), H200, H100 (SXM, PCIe, NVL), A100, A30, A10, L40S, L4, V100, T4.
PEAKS: Sequence[tuple[str, float, float, float | None]] = (
    # pattern, float32, float16, bfloat16
    (r"\bB200\b", 1125.0, 2250.0, 2250.0),
    (r"\bH200 NVL\b", 417.5, 835.5, 835.5),
    (r"\bH200\b", 494.5, 989.5, 989.5),
    (r"\bH100 PCIe\b", 378.0, 756.5, 756.5),
    (r"\bH100 NVL\b", 417.5, 835.5, 835.5),
    (r"\bH100\b", 494.5, 989.5, 989.5),
    (r"\bA100\b", 156.0, 312.0, 312.0),
    (r"\bA30\b", 82.0, 165.0, 165.0),
    (r"\bA10\b", 62.5, 125.0, 125.0),
    (r"\bL40S\b", 183.0, 362.0, 362.0),
    (r"\bL4\b", 60.0, 121.0, 121.0),
    (r"\bV100-SXM2\b", 15.7, 125.0, None),
    (r"\bV100-PCIE\b", 14.0, 112.0, None),
    (r"\bT4\b", 8.1, 65.0, None),
)


def device_peak(name: str, policy: str) -> float | None:
    """Returns a device's peak operations per second under a dtype policy, None if unknown."""
    for pattern, float32, float16, bfloat16 in PEAKS:
        if re.search(pattern, name):
            peak = {"float32": float32, "mixed_float16": float16, "mixed_bfloat16": bfloat16}.get(policy)
            return None if peak is None else peak * TERA
    return None


def process_peak(kind: str, policy: str, count: int) -> float | None:
    """Returns the peak operations per second of this process's first `count` GPUs, None if unknown or no GPU."""
    if kind != "GPU":
        return None
    used = tf.config.get_visible_devices("GPU")[:count]
    details = (tf.config.experimental.get_device_details(gpu) for gpu in used)
    peaks = [device_peak(each.get("device_name", ""), policy) for each in details]
    known = [each for each in peaks if each is not None]
    return sum(known) if known and len(known) == len(peaks) else None
