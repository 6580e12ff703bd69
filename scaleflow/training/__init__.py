"""The loop: many steps to one compiled call, on every strategy; and Keras's `fit` beside it."""

from scaleflow.training.agreement import Agreement
from scaleflow.training.fit import Fit, check_fit, steps_per_execution
from scaleflow.training.loop import Loop
from scaleflow.training.objective import objective_for
from scaleflow.training.passes import WholePasses, supervised
from scaleflow.training.session import Length, Result, Session, check_monitor, length
from scaleflow.training.step import OwnLoop, check_own_updates, checked

__all__ = [
    "Agreement",
    "Fit",
    "Length",
    "Loop",
    "OwnLoop",
    "Result",
    "Session",
    "WholePasses",
    "check_fit",
    "check_monitor",
    "check_own_updates",
    "checked",
    "length",
    "objective_for",
    "steps_per_execution",
    "supervised",
]
