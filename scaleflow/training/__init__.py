"""The loop: many steps to one compiled call, on every strategy; and Keras's `fit` beside it."""

from scaleflow.training.agreement import Agreement
from scaleflow.training.baseline import baselines
from scaleflow.training.callbacks import check_callback
from scaleflow.training.coordinated import CoordinatedLoop
from scaleflow.training.engine import Engine
from scaleflow.training.evaluation import Evaluation
from scaleflow.training.fit import Fit, steps_per_execution
from scaleflow.training.inside import look_inside
from scaleflow.training.loop import Loop
from scaleflow.training.memory import peaks
from scaleflow.training.objective import objective_for
from scaleflow.training.passes import WholePasses, supervised
from scaleflow.training.session import Length, Result, Session, check_monitor, length
from scaleflow.training.step import OwnLoop, check_own_updates, checked
from scaleflow.training.xla import check_xla

__all__ = [
    "Agreement",
    "CoordinatedLoop",
    "Engine",
    "Evaluation",
    "Fit",
    "Length",
    "Loop",
    "OwnLoop",
    "Result",
    "Session",
    "WholePasses",
    "baselines",
    "check_callback",
    "check_monitor",
    "check_own_updates",
    "check_xla",
    "checked",
    "length",
    "look_inside",
    "objective_for",
    "peaks",
    "steps_per_execution",
    "supervised",
]
