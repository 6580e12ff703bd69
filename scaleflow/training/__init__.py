"""The loop: many steps to one compiled call, on every strategy."""

from scaleflow.training.agreement import Agreement
from scaleflow.training.loop import Loop
from scaleflow.training.objective import objective_for
from scaleflow.training.passes import WholePasses, supervised
from scaleflow.training.session import Result, Session, check_monitor, length
from scaleflow.training.step import OwnLoop, check_own_updates, checked

__all__ = [
    "Agreement",
    "Loop",
    "OwnLoop",
    "Result",
    "Session",
    "WholePasses",
    "check_monitor",
    "check_own_updates",
    "checked",
    "length",
    "objective_for",
    "supervised",
]
