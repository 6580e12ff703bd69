"""Training engines: the compiled loop (many steps per call, on every strategy) and Keras's `fit`."""

from scaleflow.training.baseline import baselines, measure_outputs
from scaleflow.training.callbacks import make_callback
from scaleflow.training.decisions import Checkpointing, PlateauRate, WorkerSync, check_monitor
from scaleflow.training.engine import Engine
from scaleflow.training.evaluation import Evaluation
from scaleflow.training.fit import FitEngine, choose_steps_per_execution
from scaleflow.training.forward_backward import FreezePhases, TapeForwardBackward, make_loss_step
from scaleflow.training.length import Length, choose_length_by_size, compute_length
from scaleflow.training.loop import Loop
from scaleflow.training.metrics_log import MetricsLog, measure_peaks
from scaleflow.training.own_step import CustomUpdateLoop, add_checks, check_own_updates
from scaleflow.training.parameter_server_loop import ParameterServerLoop, list_shards
from scaleflow.training.session import Session, SessionResult
from scaleflow.training.xla import check_xla, choose_xla
from scaleflow.training.xla_loop import XlaLoop
