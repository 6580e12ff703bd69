"""Training engines: the compiled loop (many steps per call, on every strategy) and Keras's `fit`."""

from scaleflow.training.baseline import baselines
from scaleflow.training.callbacks import make_callback
from scaleflow.training.checkpointing import Checkpointing
from scaleflow.training.debug import apply_debug
from scaleflow.training.engine import Engine
from scaleflow.training.evaluation import Evaluation
from scaleflow.training.fit import FitEngine, choose_steps_per_execution
from scaleflow.training.forward_backward import TapeForwardBackward, make_loss_step
from scaleflow.training.freezing import FreezePhases
from scaleflow.training.loop import Loop
from scaleflow.training.metrics_log import MetricsLog, measure_peaks
from scaleflow.training.monitor import check_monitor
from scaleflow.training.parameter_server_loop import ParameterServerLoop, list_shards
from scaleflow.training.session import Feeds, Length, Session, SessionResult, compute_length
from scaleflow.training.sizes import choose_length_by_size
from scaleflow.training.step import CustomUpdateLoop, add_checks, check_own_updates
from scaleflow.training.worker_sync import WorkerSync
from scaleflow.training.xla import check_xla, choose_xla
from scaleflow.training.xla_loop import XlaLoop

__all__ = [
    "Checkpointing",
    "CustomUpdateLoop",
    "Engine",
    "Evaluation",
    "Feeds",
    "FitEngine",
    "FreezePhases",
    "Length",
    "Loop",
    "MetricsLog",
    "ParameterServerLoop",
    "Session",
    "SessionResult",
    "TapeForwardBackward",
    "WorkerSync",
    "XlaLoop",
    "add_checks",
    "apply_debug",
    "baselines",
    "check_monitor",
    "check_own_updates",
    "check_xla",
    "choose_length_by_size",
    "choose_steps_per_execution",
    "choose_xla",
    "compute_length",
    "list_shards",
    "make_callback",
    "make_loss_step",
    "measure_peaks",
]
