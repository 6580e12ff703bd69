"""The interfaces of the package: the only module of scaleflow, besides `errors`, that config groups may import.

Import names from here, not from the modules below:

- `command_names`: how the user types a command, for messages (`name_command`).
- `config`: the typed sections of the config, `Plan`, which holds all of them, and `Rule`.
- `data`: what a dataset is: `Source`, `Inputs`, `Outputs`, `Arrays`, `Stream`, `Preprocessing`.
- `learned_state`: what a run learned from its data: `LearnedState`, `EarlierState`.
- `learned_changes`: what a run learned otherwise than the one whose weights it begins with: `LearnedChanges`.
- `structures`: values and dicts of values, with a name for each value.
- `training`: what the worker's parts exchange: batches and feeds, the training step, snapshots, traces.
- `tracking`: the store that a run is recorded in (`Tracker`).

The modules import nothing else of scaleflow than its errors. They import TensorFlow, Keras and numpy only for type
checkers, so that the command starts fast.
"""

from scaleflow.interfaces.command_names import find_console_script as find_console_script
from scaleflow.interfaces.command_names import is_console_script as is_console_script
from scaleflow.interfaces.command_names import name_command as name_command
from scaleflow.interfaces.config import AUTO as AUTO
from scaleflow.interfaces.config import BY_SIZE as BY_SIZE
from scaleflow.interfaces.config import OUT_OF_FOLD as OUT_OF_FOLD
from scaleflow.interfaces.config import Augment as Augment
from scaleflow.interfaces.config import ClassWeight as ClassWeight
from scaleflow.interfaces.config import Cluster as Cluster
from scaleflow.interfaces.config import Dataset as Dataset
from scaleflow.interfaces.config import EarlyStopping as EarlyStopping
from scaleflow.interfaces.config import Hardware as Hardware
from scaleflow.interfaces.config import Lora as Lora
from scaleflow.interfaces.config import Model as Model
from scaleflow.interfaces.config import ObjectiveOptions as ObjectiveOptions
from scaleflow.interfaces.config import Optimizer as Optimizer
from scaleflow.interfaces.config import Partitioner as Partitioner
from scaleflow.interfaces.config import Precision as Precision
from scaleflow.interfaces.config import Strategy as Strategy
from scaleflow.interfaces.config import Target as Target
from scaleflow.interfaces.config import Training as Training
from scaleflow.interfaces.data import FOLD as FOLD
from scaleflow.interfaces.data import MOST_CONFUSION_CLASSES as MOST_CONFUSION_CLASSES
from scaleflow.interfaces.data import Arrays as Arrays
from scaleflow.interfaces.data import Examples as Examples
from scaleflow.interfaces.data import Inputs as Inputs
from scaleflow.interfaces.data import InputStructure as InputStructure
from scaleflow.interfaces.data import Kind as Kind
from scaleflow.interfaces.data import Outputs as Outputs
from scaleflow.interfaces.data import OutputStructure as OutputStructure
from scaleflow.interfaces.data import Preprocessing as Preprocessing
from scaleflow.interfaces.data import Rows as Rows
from scaleflow.interfaces.data import Source as Source
from scaleflow.interfaces.data import Standardize as Standardize
from scaleflow.interfaces.data import Stream as Stream
from scaleflow.interfaces.events import Status as Status
from scaleflow.interfaces.learned_changes import LearnedChanges as LearnedChanges
from scaleflow.interfaces.learned_state import EarlierState as EarlierState
from scaleflow.interfaces.learned_state import LearnedPreprocessing as LearnedPreprocessing
from scaleflow.interfaces.learned_state import LearnedState as LearnedState
from scaleflow.interfaces.learned_state import count_new as count_new
from scaleflow.interfaces.learned_state import describe_extension as describe_extension
from scaleflow.interfaces.learned_state import extend_classes as extend_classes
from scaleflow.interfaces.learned_state import name_class as name_class
from scaleflow.interfaces.learned_state import to_plain as to_plain
from scaleflow.interfaces.plan import Plan as Plan
from scaleflow.interfaces.plan import Rule as Rule
from scaleflow.interfaces.plan import TaskInfo as TaskInfo
from scaleflow.interfaces.recording_config import Best as Best
from scaleflow.interfaces.recording_config import Checkpoint as Checkpoint
from scaleflow.interfaces.recording_config import Debug as Debug
from scaleflow.interfaces.recording_config import EvaluationOptions as EvaluationOptions
from scaleflow.interfaces.recording_config import ExportOptions as ExportOptions
from scaleflow.interfaces.recording_config import Profiler as Profiler
from scaleflow.interfaces.recording_config import PromotionOptions as PromotionOptions
from scaleflow.interfaces.recording_config import Sweep as Sweep
from scaleflow.interfaces.recording_config import Tracking as Tracking
from scaleflow.interfaces.structures import apply_layer as apply_layer
from scaleflow.interfaces.structures import describe_keys as describe_keys
from scaleflow.interfaces.structures import label_leaf as label_leaf
from scaleflow.interfaces.structures import map_leaves as map_leaves
from scaleflow.interfaces.structures import map_named as map_named
from scaleflow.interfaces.structures import name_leaves as name_leaves
from scaleflow.interfaces.tracking import IDENTITY as IDENTITY
from scaleflow.interfaces.tracking import Point as Point
from scaleflow.interfaces.tracking import Tracker as Tracker
from scaleflow.interfaces.training import BOOSTING as BOOSTING
from scaleflow.interfaces.training import FITTED as FITTED
from scaleflow.interfaces.training import HELD_OUT as HELD_OUT
from scaleflow.interfaces.training import LINEAR as LINEAR
from scaleflow.interfaces.training import MEMBERS as MEMBERS
from scaleflow.interfaces.training import PREDICTION as PREDICTION
from scaleflow.interfaces.training import READ_SCOPE as READ_SCOPE
from scaleflow.interfaces.training import SHARES as SHARES
from scaleflow.interfaces.training import STEP_SCOPE as STEP_SCOPE
from scaleflow.interfaces.training import SUM_SCOPE as SUM_SCOPE
from scaleflow.interfaces.training import Batching as Batching
from scaleflow.interfaces.training import Checkpoints as Checkpoints
from scaleflow.interfaces.training import CoordinatedFeed as CoordinatedFeed
from scaleflow.interfaces.training import Feed as Feed
from scaleflow.interfaces.training import ForwardBackward as ForwardBackward
from scaleflow.interfaces.training import FreezePhase as FreezePhase
from scaleflow.interfaces.training import IndexedFeed as IndexedFeed
from scaleflow.interfaces.training import LossStep as LossStep
from scaleflow.interfaces.training import MakeOptimizer as MakeOptimizer
from scaleflow.interfaces.training import Measure as Measure
from scaleflow.interfaces.training import Objective as Objective
from scaleflow.interfaces.training import OutputKeeper as OutputKeeper
from scaleflow.interfaces.training import OwnUpdates as OwnUpdates
from scaleflow.interfaces.training import Snapshot as Snapshot
from scaleflow.interfaces.training import Tracer as Tracer
from scaleflow.interfaces.training import Workers as Workers
