"""The interfaces of the package: the only module of scaleflow, besides `errors`, that config groups may import.

Import names from here, not from the modules below:

- `config`: the typed sections of the config, and `Plan`, which holds all of them.
- `data`: what a dataset is: `Source`, `Inputs`, `Outputs`, `Arrays`, `Stream`, `Preprocessing`.
- `training`: what the worker's parts exchange: batches and feeds, the training step, snapshots, traces.
- `tracking`: the store that a run is recorded in (`Tracker`).

The modules import nothing else of scaleflow. They import TensorFlow, Keras and numpy only for type checkers, so that
the command starts fast.
"""

from scaleflow.interfaces.config import (
    Augment,
    Best,
    Checkpoint,
    Cluster,
    Dataset,
    Debug,
    EarlyStopping,
    Hardware,
    Model,
    Optimizer,
    Partitioner,
    Plan,
    Precision,
    Profiler,
    Strategy,
    Sweep,
    Target,
    TaskInfo,
    Tracking,
    Training,
)
from scaleflow.interfaces.data import (
    Arrays,
    Examples,
    Inputs,
    Kind,
    Outputs,
    Preprocessing,
    Source,
    Standardize,
    Stream,
)
from scaleflow.interfaces.tracking import (
    IDENTITY,
    Point,
    Status,
    Tracker,
)
from scaleflow.interfaces.training import (
    READ_SCOPE,
    STEP_SCOPE,
    SUM_SCOPE,
    Batching,
    Checkpoints,
    CoordinatedFeed,
    Feed,
    ForwardBackward,
    LossStep,
    MakeOptimizer,
    Objective,
    OwnUpdates,
    Snapshot,
    Tracer,
    Workers,
)

__all__ = [
    "IDENTITY",
    "READ_SCOPE",
    "STEP_SCOPE",
    "SUM_SCOPE",
    "Arrays",
    "Augment",
    "Batching",
    "Best",
    "Checkpoint",
    "Checkpoints",
    "Cluster",
    "CoordinatedFeed",
    "Dataset",
    "Debug",
    "EarlyStopping",
    "Examples",
    "Feed",
    "ForwardBackward",
    "Hardware",
    "Inputs",
    "Kind",
    "LossStep",
    "MakeOptimizer",
    "Model",
    "Objective",
    "Optimizer",
    "Outputs",
    "OwnUpdates",
    "Partitioner",
    "Plan",
    "Point",
    "Precision",
    "Preprocessing",
    "Profiler",
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
]
