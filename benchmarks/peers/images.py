"""The images that all contestants train on, as one `.npz` file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

CLASSES = 10

#: Pixels of the side of a block of a pattern.
BLOCK = 4


def write_images(file: Path, shape: Sequence[int], examples: int) -> None:
    """Writes x_train [examples, *shape] uint8 and y_train [examples] int32.

    An image is noise plus the pattern of its class: blocks of pixels, so that convolutions learn it, too.
    """
    height, width, channels = shape
    random = np.random.default_rng(0)
    blocks = random.standard_normal((CLASSES, height // BLOCK, width // BLOCK, channels), np.float32)
    patterns = 16 * blocks.repeat(BLOCK, axis=1).repeat(BLOCK, axis=2)
    y = random.integers(CLASSES, size=examples, dtype=np.int32)
    x = 128 + 64 * random.standard_normal((examples, *shape), np.float32) + patterns[y]
    np.savez(file, x_train=np.clip(x, 0, 255).astype(np.uint8), y_train=y)
