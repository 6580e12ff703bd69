"""hardware.xla compiles the model's passes, and nothing else comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.training.driving import far, follow

STEPS = 30
BASE = ("hardware=cpu", "tracking=none", "training.global_batch_size=48", "optimizer.learning_rate=0.01")
RECIPES = {
    "mlp": ("model.units=16",),
    "mlp accumulated and clipped": ("model.units=16", "training.accumulate=4", "training.clip_norm=0.3"),
    "cnn": ("model=cnn", "model.filters=[8]", "model.units=8"),
    "stream": ("dataset._target_=tests.training.test_xla.Streamed", "model.units=16"),
}
STRATEGIES = {
    "one_device": ("strategy=one_device",),
    "mirrored": ("strategy=mirrored", "hardware.logical_devices=2"),
}


class Streamed:
    """The digits, read as they come."""

    def __init__(self) -> None:
        from scaleflow.dataset.digits import Digits

        self._digits = Digits()
        self.inputs, self.outputs, self.splits = self._digits.inputs, self._digits.outputs, self._digits.splits

    def load(self, split: str) -> Any:
        import tensorflow as tf

        from scaleflow.interfaces import Stream

        arrays = self._digits.load(split)
        return Stream(tf.data.Dataset.from_tensor_slices((arrays.inputs, arrays.targets)), len(arrays))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_compiled_with_xla_is_the_same_run(
    isolated: Callable[..., Any], plan: Callable[..., Any], strategy: str, recipe: str
) -> None:
    words = (*BASE, *RECIPES[recipe], *STRATEGIES[strategy])
    plain = isolated(follow, plan(*words), STEPS)
    found = isolated(follow, plan(*words, "hardware.xla=true"), STEPS)
    np.testing.assert_allclose(found.losses, plain.losses, rtol=0, atol=1e-5)
    assert far(found.weights, plain.weights) < 1e-4
    assert plain.losses[-1] < plain.losses[0]
