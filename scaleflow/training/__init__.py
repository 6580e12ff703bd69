"""The loop: many steps to one compiled call, on every strategy."""

from scaleflow.training.agreement import Agreement
from scaleflow.training.coordinated import CoordinatedLoop
from scaleflow.training.evaluation import Evaluation
from scaleflow.training.loop import Loop
from scaleflow.training.objective import objective_for
from scaleflow.training.session import Result, Session, check_monitor, length
from scaleflow.training.xla import check_xla

__all__ = [
    "Agreement",
    "CoordinatedLoop",
    "Evaluation",
    "Loop",
    "Result",
    "Session",
    "check_monitor",
    "check_xla",
    "length",
    "objective_for",
]
