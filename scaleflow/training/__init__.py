"""The loop: many steps to one compiled call, on every strategy."""

from scaleflow.training.fit import Fit, check_monitor, fit, length
from scaleflow.training.loop import Loop
from scaleflow.training.objective import objective_for

__all__ = ["Fit", "Loop", "check_monitor", "fit", "length", "objective_for"]
