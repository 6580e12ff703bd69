"""The most that a GPU can compute, by its name and the dtype that layers compute in."""

from __future__ import annotations

import re
from collections.abc import Sequence

import tensorflow as tf

TERA = 1e12

#: Operations a second of the tensor cores, dense (makers print twice as much for sparse matrices), in units of 10^12:
#: (name, float32 by TF32, float16 and bfloat16). TensorFlow multiplies float32 matrices as TF32 where a GPU can; those
#: before Ampere cannot, and have plain float32 there. None: no such units. The first name that is found counts.
#: Sources: NVIDIA's data sheets: B200 (DGX B200), H200, H100 (SXM, PCIe, NVL), A100, A30, A10, L40S, L4, V100, T4.
PEAKS: Sequence[tuple[str, float, float, float | None]] = (
    # name, float32, float16, bfloat16
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
    """Operations a second of the device of this name under a precision policy; None where that is not known."""
    for pattern, float32, float16, bfloat16 in PEAKS:
        if re.search(pattern, name):
            found = {"float32": float32, "mixed_float16": float16, "mixed_bfloat16": bfloat16}.get(policy)
            return None if found is None else found * TERA
    return None


def process_peak(kind: str, policy: str, count: int) -> float | None:
    """Operations a second of this process's first so many GPUs; None where that is not known, and of a CPU."""
    if kind != "GPU":
        return None
    used = tf.config.get_visible_devices("GPU")[:count]
    details = (tf.config.experimental.get_device_details(gpu) for gpu in used)
    found = [device_peak(each.get("device_name", ""), policy) for each in details]
    known = [each for each in found if each is not None]
    return sum(known) if known and len(known) == len(found) else None
