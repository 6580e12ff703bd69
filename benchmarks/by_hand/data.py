"""Random examples of a known shape, the same kind that `dataset=synthetic` makes."""

import numpy as np


def synthetic(count, shape, classes=10):
    """Normal inputs [count, *shape] float32; targets [count] that a linear map of them decides."""
    rng = np.random.default_rng(0)
    size = int(np.prod(shape))
    directions = rng.standard_normal((size, classes), dtype=np.float32)
    x = rng.standard_normal((count, size), dtype=np.float32)
    return x.reshape(count, *shape), (x @ directions).argmax(axis=1).astype(np.int32)
