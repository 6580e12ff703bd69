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

from scaleflow.interfaces.command_names import is_console_script, name_command
from scaleflow.interfaces.config import (
    BY_SIZE,
    Augment,
    ClassWeight,
    Cluster,
    Dataset,
    EarlyStopping,
    Hardware,
    Lora,
    Model,
    ObjectiveOptions,
    Optimizer,
    Partitioner,
    Precision,
    Strategy,
    Target,
    Training,
)
from scaleflow.interfaces.data import (
    FOLD,
    MOST_CONFUSION_CLASSES,
    Arrays,
    Examples,
    Inputs,
    InputStructure,
    Kind,
    Outputs,
    OutputStructure,
    Preprocessing,
    Source,
    Standardize,
    Stream,
)
from scaleflow.interfaces.events import Status
from scaleflow.interfaces.learned_changes import LearnedChanges
from scaleflow.interfaces.learned_state import (
    EarlierState,
    LearnedPreprocessing,
    LearnedState,
    count_new,
    describe_extension,
    extend_classes,
    name_class,
    to_plain,
)
from scaleflow.interfaces.plan import Plan, Rule, TaskInfo
from scaleflow.interfaces.recording_config import (
    Best,
    Checkpoint,
    Debug,
    EvaluationOptions,
    Profiler,
    Sweep,
    Tracking,
)
from scaleflow.interfaces.structures import (
    describe_keys,
    label_leaf,
    map_leaves,
    map_named,
    name_leaves,
)
from scaleflow.interfaces.tracking import (
    IDENTITY,
    Point,
    Tracker,
)
from scaleflow.interfaces.training import (
    HELD_OUT,
    MEMBERS,
    PREDICTION,
    READ_SCOPE,
    SHARES,
    STEP_SCOPE,
    SUM_SCOPE,
    Batching,
    Checkpoints,
    CoordinatedFeed,
    Feed,
    ForwardBackward,
    IndexedFeed,
    LossStep,
    MakeOptimizer,
    Measure,
    Objective,
    OutputKeeper,
    OwnUpdates,
    Snapshot,
    Tracer,
    Workers,
)

__all__ = [
    "BY_SIZE",
    "FOLD",
    "HELD_OUT",
    "IDENTITY",
    "MEMBERS",
    "MOST_CONFUSION_CLASSES",
    "PREDICTION",
    "READ_SCOPE",
    "SHARES",
    "STEP_SCOPE",
    "SUM_SCOPE",
    "Arrays",
    "Augment",
    "Batching",
    "Best",
    "Checkpoint",
    "Checkpoints",
    "ClassWeight",
    "Cluster",
    "CoordinatedFeed",
    "Dataset",
    "Debug",
    "EarlierState",
    "EarlyStopping",
    "EvaluationOptions",
    "Examples",
    "Feed",
    "ForwardBackward",
    "Hardware",
    "IndexedFeed",
    "InputStructure",
    "Inputs",
    "Kind",
    "LearnedChanges",
    "LearnedPreprocessing",
    "LearnedState",
    "Lora",
    "LossStep",
    "MakeOptimizer",
    "Measure",
    "Model",
    "Objective",
    "ObjectiveOptions",
    "Optimizer",
    "OutputKeeper",
    "OutputStructure",
    "Outputs",
    "OwnUpdates",
    "Partitioner",
    "Plan",
    "Point",
    "Precision",
    "Preprocessing",
    "Profiler",
    "Rule",
    "Snapshot",
    "Source",
    "Standardize",
    "Status",
    "Strategy",
    "Stream",
    "Sweep",
    "Target",
    "TaskInfo",
    "Tracer",
    "Tracker",
    "Tracking",
    "Training",
    "Workers",
    "count_new",
    "describe_extension",
    "describe_keys",
    "extend_classes",
    "is_console_script",
    "label_leaf",
    "map_leaves",
    "map_named",
    "name_class",
    "name_command",
    "name_leaves",
    "to_plain",
]
