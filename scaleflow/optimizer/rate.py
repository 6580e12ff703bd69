"""The learning rate as a function of the step: batch size scaling, warm-up and schedule."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from scaleflow.interfaces import Optimizer


def scale_to_batch(options: Optimizer, global_batch_size: int) -> float:
    """Scales the peak learning rate with the global batch size.

    `linear` is the rule of Goyal et al. 2017 (https://arxiv.org/abs/1706.02677). `sqrt` keeps the variance of the
    update constant (Krizhevsky 2014, https://arxiv.org/abs/1404.5997).
    """
    ratio = global_batch_size / options.base_batch_size
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[options.scale]
    return options.learning_rate * factor


def make_learning_rate(options: Optimizer, global_batch_size: int, total_steps: int) -> float | Schedule:
    """Returns the `learning_rate` argument for a Keras optimizer: a float if it is constant, else a schedule."""
    peak = scale_to_batch(options, global_batch_size)
    if options.schedule == "constant" and not options.warmup_steps:
        return peak
    return Schedule(peak, options, total_steps)


def find_warm_up_warning(options: Optimizer, total_steps: int) -> str | None:
    """Returns a warning if the warm-up is not shorter than the run, else None."""
    if options.warmup_steps < total_steps:
        return None
    return (
        f"optimizer.warmup_steps={options.warmup_steps}: the run has only {total_steps} steps, so the warm-up would "
        "not end; use a smaller number"
    )


class Schedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]  # keras has no types
    """Linear warm-up from 0 to `peak`, then constant, cosine or step decay.

    Cosine decay (Loshchilov and Hutter 2016, https://arxiv.org/abs/1608.03983) runs from the end of the warm-up to
    `total_steps`. Step decay counts from the first update, including the warm-up.

    Attributes:
        factor: multiplies the rate. Functions that are already traced do not see a change.
    """

    def __init__(self, peak: float, options: Optimizer, total_steps: int) -> None:
        self.peak = peak
        self.options = options
        self.total_steps = total_steps
        self.factor = 1.0

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate, a float32 scalar, of the update after `step` updates."""
        step = tf.cast(step, tf.float32)
        rate = self.peak * self.factor * self._decay(step)
        warmup = self.options.warmup_steps
        return rate * tf.minimum(1.0, (step + 1) / warmup) if warmup else rate

    def _decay(self, step: tf.Tensor) -> tf.Tensor:
        options = self.options
        if options.schedule == "cosine":
            length = max(1, self.total_steps - options.warmup_steps)
            progress = tf.clip_by_value((step - options.warmup_steps) / length, 0.0, 1.0)
            return options.final_rate + (1 - options.final_rate) * 0.5 * (1 + tf.cos(math.pi * progress))
        if options.schedule == "step":
            return tf.pow(options.step_factor, tf.floor(step / float(options.step_every or 1)))
        return tf.ones_like(step)

    def get_config(self) -> dict[str, Any]:
        return {"peak": self.peak, "schedule": self.options.schedule, "total_steps": self.total_steps}
