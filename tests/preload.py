"""Preloaded into the session's forkserver: what nearly every child imports anyway."""

import scaleflow.dataset
import scaleflow.hardware
import scaleflow.model
import scaleflow.optimizer
import scaleflow.precision
import scaleflow.strategy
import scaleflow.training  # noqa: F401
