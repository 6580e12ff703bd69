"""The config as typed sections: one dataclass for each config group, and `Plan`, which holds them all.

`scaleflow.config.parse` reads a composed config into these classes. It checks types, the values of each `Literal` and
the limits in a field's metadata (`at_least`, `above`, `at_most`, `below`). An integer without `at_most` is at most
2**31 - 1, and a float is finite. `scaleflow.config.plan` checks combinations of keys. The comments of conf/ describe
the keys. A default here applies if the chosen option in conf/ does not set the key.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from scaleflow.interfaces.formatting import SECONDS

S = TypeVar("S")

#: The word for a value that depends on the number of training examples. It is resolved before the event `ready`.
BY_SIZE: Final = "by_size"
#: Values of `dataset.validation` that are not names of splits.
NO_SPLITS = AUTO, OUT_OF_FOLD = "auto", "out_of_fold"


@dataclass(frozen=True)
class Target:
    """A class or function that a config names with `_target_`, and its arguments."""

    key: str  # the config key of the target, such as `dataset`; for messages
    path: str  # the dotted name of the class or function
    #: Its keyword arguments: plain values, or nested mappings with a `_target_`
    arguments: Mapping[str, Any] = field(default_factory=dict)
    typed: str = ""  # the short name that the user typed instead; empty without a short name

    def describe(self) -> str:
        """Returns the key with its value, for messages."""
        return f"{self.key}={self.typed}" if self.typed else f"{self.key}._target_={self.path}"


@dataclass(frozen=True)
class Partitioner:
    """`strategy.partitioner`: how `parameter_server` divides variables into shards, along their first axis."""

    max_shards: int | None = field(default=None, metadata={"at_least": 1})
    min_shard_bytes: int | None = field(default=256 << 10, metadata={"at_least": 1, "at_most": 2**62})


@dataclass(frozen=True)
class Strategy:
    """`strategy`: how the work is distributed over devices."""

    name: Literal["auto", "one_device", "mirrored", "multi_worker", "parameter_server", "pipeline", "tpu"] = "auto"
    communication: Literal["auto", "ring", "nccl"] = "auto"
    partitioner: Partitioner = field(default_factory=Partitioner)
    stages: int = field(default=2, metadata={"at_least": 2})
    replicas: int = field(default=1, metadata={"at_least": 1})
    micro_batches: int = field(default=4, metadata={"at_least": 1})
    cuts: list[str] | None = None

    @property
    def is_auto(self) -> bool:
        """Whether the strategy is not resolved yet."""
        return self.name == "auto"

    @property
    def is_synchronous(self) -> bool:
        """Whether several processes take each step together."""
        return self.name == "multi_worker"

    @property
    def has_coordinator(self) -> bool:
        """Whether one process schedules the steps of the others, and parameter servers hold the variables."""
        return self.name == "parameter_server"

    @property
    def has_several_processes(self) -> bool:
        return self.is_synchronous or self.has_coordinator

    @property
    def is_tpu(self) -> bool:
        return self.name == "tpu"

    @property
    def is_pipeline(self) -> bool:
        """Whether the model is divided into pipeline stages."""
        return self.name == "pipeline"


@dataclass(frozen=True)
class Cluster:
    """`cluster`: what starts the processes of a strategy with several processes, and where they run.

    The `section` of an engine adds the engine's own keys (`cluster/engines.py`).
    """

    name: str = "local"
    workers: int | None = field(default=None, metadata={"at_least": 1, "at_most": 4096})
    servers: int | None = field(default=None, metadata={"at_least": 1, "at_most": 64})
    max_restarts: int | None = field(default=None, metadata={"at_least": 0})
    stall_seconds: float | None = field(default=None, metadata={"above": 0.0})
    start_seconds: float = field(default=120.0, metadata={"above": 0.0})
    submit: Literal["print"] | None = None
    cpus: int | None = field(default=None, metadata={"at_least": 1})
    gpus: int = field(default=0, metadata={"at_least": 0})


@dataclass(frozen=True)
class Hardware:
    """`hardware`: which devices a process uses, and how TensorFlow uses them."""

    name: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    tpu: str | None = None
    devices: list[int] | None = None
    logical_devices: int = field(default=1, metadata={"at_least": 1})
    memory_growth: bool = False
    memory_limit_mb: int | None = field(default=None, metadata={"at_least": 1})
    intra_op_threads: int | None = field(default=None, metadata={"at_least": 1})
    inter_op_threads: int | None = field(default=None, metadata={"at_least": 1})
    xla: bool | Literal["auto"] = "auto"
    deterministic: bool = False
    remat: bool | list[str] = False


@dataclass(frozen=True)
class Precision:
    """`precision`: the dtype in which layers compute."""

    name: Literal["float32", "mixed", "mixed_float16", "mixed_bfloat16"] = "float32"


@dataclass(frozen=True)
class Split:
    """`dataset.split`: how rows are divided into splits and folds."""

    by: Literal["auto", "random", "stratum", "group", "time", "column", "hash"] = "auto"
    column: str | None = None
    stratum: str | None = None
    gap: str | float | None = None
    pattern: str | None = None


@dataclass(frozen=True)
class Dataset:
    """`dataset`: the source of the examples, and the options of the input pipeline that all sources share."""

    target: Target
    limit: int | None = field(default=None, metadata={"at_least": 1})
    validation: float | str | None = 0.1
    split: Split = Split("random")
    fold: str | None = None
    shuffle: int | None = field(default=None, metadata={"at_least": 1})
    cache: Literal["auto", "memory", "file", "none"] = "auto"
    shards: int = field(default=1, metadata={"at_least": 1})
    threads: int | None = field(default=None, metadata={"at_least": 1})
    on_bad_example: Literal["auto", "raise", "skip"] = "auto"
    normalise: bool = False
    check: Literal["warn", "refuse", "none"] = "warn"

    @property
    def held_out_fold(self) -> tuple[int, int] | None:
        """The fold to validate on, from 0, and the number of folds, if `fold` has a form such as
        `2/5`; otherwise None.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", self.fold or "")
        return (int(match[1]) - 1, int(match[2])) if match else None

    @property
    def validation_split(self) -> str | None:
        """The split that `validation` names; None if it does not name one."""
        return self.validation if isinstance(self.validation, str) and self.validation not in NO_SPLITS else None


@dataclass(frozen=True)
class Lora:
    """`model.lora`: low-rank adaptation (Hu et al. 2021): small matrices train instead of a layer's weight matrix."""

    layers: list[str] | None = None
    rank: int = field(default=8, metadata={"at_least": 1})


@dataclass(frozen=True)
class Model:
    """`model`: the factory of the model."""

    target: Target
    init_from: str | None = None
    init_from_preprocessing: Literal["extend", "old", "new"] = "extend"
    freeze: list[str] | dict[int, list[str]] | None = None
    lora: Lora | None = None

    @property
    def freezes_by_epoch(self) -> bool:
        """Whether the trained variables change during the run."""
        return isinstance(self.freeze, dict)


@dataclass(frozen=True)
class Plateau:
    """`optimizer.plateau`: when a value has stopped improving. `metric` is an alias of `monitor`."""

    monitor: str = "val/loss"
    patience: int = field(default=3, metadata={"at_least": 1})
    mode: Literal["auto", "min", "max"] = "auto"
    min_delta: float = field(default=0.0, metadata={"at_least": 0.0})


@dataclass(frozen=True)
class Optimizer:
    """`optimizer`: a Keras optimizer and its learning rate."""

    target: Target
    learning_rate: float = field(default=0.001, metadata={"above": 0.0})
    schedule: (
        Literal["constant", "cosine", "step", "linear", "polynomial", "exponential", "one_cycle", "cosine_restarts"]
        | Literal["plateau"]
        | Target
    ) = "constant"
    final_rate: float = field(default=0.0, metadata={"at_least": 0.0, "at_most": 1.0})
    step_every: int | None = field(default=None, metadata={"at_least": 1})
    step_factor: float = field(default=0.1, metadata={"above": 0.0, "at_most": 1.0})
    plateau: Plateau | None = None
    power: float = field(default=2.0, metadata={"above": 0.0})
    warmup_steps: int | float = field(default=0, metadata={"at_least": 0})
    scale: Literal["none", "linear", "sqrt"] = "none"
    base_batch_size: int = field(default=256, metadata={"at_least": 1})
    rate_factors: dict[str, float] | None = field(default=None, metadata={"at_least": 0.0})
    no_decay: list[str] | None = None
    clip_value: float | None = field(default=None, metadata={"above": 0.0})
    ema: float | None = field(default=None, metadata={"above": 0.0, "below": 1.0})

    @property
    def watched(self) -> Plateau | None:
        """The value that lowers the learning rate, if the schedule is `plateau`; otherwise None."""
        return (self.plateau or Plateau()) if self.schedule == "plateau" else None


#: The weights of one output's classes: `balanced`, or a weight for each class by name or number.
ClassWeight = Literal["balanced"] | dict[str, float]


@dataclass(frozen=True)
class ObjectiveOptions:
    """`objective`: the loss to minimise, and the metrics to report.

    With several outputs, `loss`, `metrics` and `class_weight` map each output to the value that it would have alone.
    """

    loss: Target | str | dict[str, Target | str] | None = None
    loss_weights: dict[str, float] | None = field(default=None, metadata={"at_least": 0.0})
    metrics: list[Target | str] | dict[str, list[Target | str]] | None = None
    class_weight: ClassWeight | dict[str, ClassWeight] | None = field(default=None, metadata={"at_least": 0.0})
    label_smoothing: float = field(default=0.0, metadata={"at_least": 0.0, "at_most": 1.0})
    levels: list[float] | None = field(default=None, metadata={"example": "0.1, 0.5, 0.9"})


@dataclass(frozen=True)
class EarlyStopping(Plateau):
    """`training.early_stopping`: ends the run when a value stops improving. `metric` is an alias of `monitor`."""

    start_epoch: int = field(default=0, metadata={"at_least": 0})
    threshold: float | None = None
    restore_best: bool = False


def parse_duration(value: float | str | None) -> float | None:
    """Returns a time such as 600 or `10m` in seconds; 0 if the text is not a time."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([smhd])", str(value))
    if match is None:
        return 0.0 if isinstance(value, str) else value
    return float(match[1]) * SECONDS[match[2]]


@dataclass(frozen=True)
class Training:
    """`training`: how long the run trains, and how its batches are divided. A step is one optimizer update."""

    epochs: int | Literal["by_size"] = field(default=20, metadata={"at_least": 1})
    batch_size: int | Literal["by_size"] = field(default=32, metadata={"at_least": 1})
    global_batch_size: int | None = field(default=None, metadata={"at_least": 1})
    accumulate: int = field(default=1, metadata={"at_least": 1})
    clip_norm: float | None = field(default=None, metadata={"above": 0.0})
    steps_per_epoch: int | None = field(default=None, metadata={"at_least": 1})
    max_steps: int | None = field(default=None, metadata={"at_least": 1})
    max_seconds: float | str | None = field(default=None, metadata={"above": 0.0})
    steps_per_loop: int | Literal["auto"] = field(default="auto", metadata={"at_least": 1})
    engine: Literal["loop", "fit"] = "loop"
    step: Target | None = None
    validate_every: int | str | None = field(default=None, metadata={"at_least": 1})
    validate_examples: int | None = field(default=None, metadata={"at_least": 1})
    early_stopping: EarlyStopping | None = None
    callbacks: list[Target] | None = None
    on_nan: Literal["stop", "rollback"] = "stop"
    nan_rate_factor: float = field(default=0.5, metadata={"above": 0.0, "at_most": 0.99})
    nan_rollbacks: int = field(default=3, metadata={"at_least": 1})

    @property
    def validate_epochs(self) -> int:
        """The number of epochs between validations, if `validate_every` has a form such as `2 epochs`; otherwise 0."""
        match = re.fullmatch(r"([1-9]\d*) epochs?", str(self.validate_every))
        return int(match[1]) if match else 0


@dataclass(frozen=True)
class Best:
    """`checkpoint.best`: the value that chooses the best checkpoint at the end of each epoch."""

    monitor: str = "val/loss"
    mode: Literal["auto", "min", "max"] = "auto"


@dataclass(frozen=True)
class Checkpoint:
    """`checkpoint`: when the whole state of a run is saved, and which checkpoints are kept.

    A run also saves at its end and when it is stopped.
    """

    name: Literal["default", "best", "none"] = "default"
    every_epochs: int | None = field(default=1, metadata={"at_least": 1})
    every_steps: int | None = field(default=None, metadata={"at_least": 1})
    every_seconds: float | None = field(default=None, metadata={"above": 0.0})
    keep: int = field(default=2, metadata={"at_least": 1})
    best: Best | None = None
    export: Literal["last", "best"] = "last"
    folder: str | None = None
    max_seconds: float | None = field(default=None, metadata={"above": 0.0})
    write_seconds: float = field(default=600.0, metadata={"above": 0.0})

    @property
    def criterion(self) -> Best | None:
        """The value that chooses the best checkpoint; None if no best checkpoint is kept."""
        return self.best or (Best() if self.export == "best" else None)


@dataclass(frozen=True)
class Profiler:
    """`profiler`: which steps are traced."""

    name: Literal["none", "trace"] = "none"
    start_step: int | list[int] = field(default=50, metadata={"at_least": 2})
    steps: int = field(default=20, metadata={"at_least": 2})

    @property
    def windows(self) -> list[tuple[int, int]]:
        """The (first, last) traced step of each window, in order; empty if nothing is traced."""
        if self.name == "none":
            return []
        starts = self.start_step if isinstance(self.start_step, list) else [self.start_step]
        return [(start, start + self.steps - 1) for start in sorted(starts)]


@dataclass(frozen=True)
class ThresholdGoal:
    """`evaluation.threshold`: the goal of the threshold on the validation rows. Exactly one key is set.

    Attributes:
        recall, precision: the minimum recall or precision of the second class.
        cost: the costs of a miss of the second class and of a false alarm. Their sum is minimised.
    """

    recall: float | None = field(default=None, metadata={"above": 0.0, "at_most": 1.0})
    precision: float | None = field(default=None, metadata={"above": 0.0, "at_most": 1.0})
    cost: list[float] | None = field(default=None, metadata={"above": 0.0})

    @property
    def is_one(self) -> bool:
        """Whether exactly one goal is set, and `cost` has two values."""
        goals = [goal for goal in (self.recall, self.precision, self.cost) if goal is not None]
        return len(goals) == 1 and (self.cost is None or len(self.cost) == 2)


#: Parameters of functions in `evaluation.metrics` that receive the weights of the examples.
METRIC_WEIGHTS = ("sample_weight", "weights")


@dataclass(frozen=True)
class EvaluationOptions:
    """`evaluation`: how the predictions for the test split are evaluated; without a test split, for validation."""

    name: Literal["default", "full", "none"] = "default"
    id: str | None = None
    intervals: int = field(default=1000, metadata={"at_least": 0, "at_most": 10_000})
    seconds: float = field(default=5.0, metadata={"above": 0.0})
    miss_cost: float = field(default=1.0, metadata={"above": 0.0})
    alarm_cost: float = field(default=1.0, metadata={"above": 0.0})
    metrics: list[Target | str] | None = field(default=None, metadata={"example": "sklearn.metrics.f1_score"})
    threshold: float | Literal["auto"] | ThresholdGoal = field(default=0.5, metadata={"above": 0.0, "below": 1.0})
    calibrate: Literal["auto"] | None = None
    interval: float | None = field(default=None, metadata={"above": 0.0, "below": 1.0})
    sets: float | None = field(default=None, metadata={"above": 0.0, "below": 1.0})

    @property
    def own_threshold(self) -> float | None:
        """The threshold, if it is a number other than 0.5; otherwise None."""
        return self.threshold if isinstance(self.threshold, float) and self.threshold != 0.5 else None

    @property
    def costs(self) -> tuple[float, float] | None:
        """The costs of a miss of the second class and of a false alarm; None if the user sets none."""
        goal = self.threshold
        if isinstance(goal, ThresholdGoal) and goal.cost is not None:
            miss, alarm = goal.cost
            return miss, alarm
        costs = self.miss_cost, self.alarm_cost
        return None if costs == (1.0, 1.0) else costs

    @property
    def learned(self) -> list[str]:
        """The keys whose values must be learned from the validation rows."""
        keys = [key for key in ("calibrate", "interval", "sets") if getattr(self, key) is not None]
        return [f"evaluation.{key}" for key in ["threshold"] * (not isinstance(self.threshold, float)) + keys]


@dataclass(frozen=True)
class Tracking:
    """`tracking`: where the run is recorded."""

    name: Literal["mlflow", "none"] = "mlflow"
    uri: str | None = None
    experiment: str = "scaleflow"
    run_name: str | None = None
    tags: dict[str, str] | None = None
    flush_seconds: float = field(default=60.0, metadata={"at_least": 0.0})
    offline: bool = False
    system_metrics: bool = True
    code: bool = True
    register_as: str | None = None
    alias: str | None = "newest"
    tensorboard: bool = False
    histograms_every_epochs: int = field(default=1, metadata={"at_least": 1})


@dataclass(frozen=True)
class Debug:
    """`debug`: switches for finding errors. Each option of the group sets one of them; they can be combined."""

    inline: bool = False
    overfit: bool = False
    fast: bool = False
    nan: bool = False
    placement: bool = False
    eager: bool = False


@dataclass(frozen=True)
class Sweep:
    """`sweep`: options for several runs in one command (`-m`)."""

    on_change: Literal["refuse", "new", "rerun", "keep"] = "refuse"
    metric: str = "val/loss"
    mode: Literal["auto", "min", "max"] = "auto"
    repeat: int = field(default=1, metadata={"at_least": 1})
    warm_up: int = field(default=0, metadata={"at_least": 0})
    folds: int | None = field(default=None, metadata={"at_least": 2})
    max_seconds: float | str | None = field(default=None, metadata={"above": 0.0})
    same_losses: bool = False


@dataclass(frozen=True)
class TaskInfo:
    """The place of this process among several, from TF_CONFIG.

    Attributes:
        worker: this process's index in `peers`; 0 is the chief, whose events are the run's.
        peers: HOST:PORT of every process that trains or serves, including this one: the chief, then the workers, then
            the parameter servers.
        servers: the number of parameter servers. Default 0.
    """

    worker: int
    peers: tuple[str, ...]
    servers: int = 0


@dataclass(frozen=True)
class Plan:
    """A command, composed, resolved and typed. It has passed all checks that need no TensorFlow.

    Attributes:
        strategy, hardware, precision, dataset, model, optimizer, objective, training, evaluation,
            checkpoint, profiler, tracking, cluster, sweep, debug: the sections of the config.
        seed: the seed of the weights, of the order of examples and of synthetic data. 0 to 2**31 - 1. The config's
            default is 0.
        choices: the chosen option of each config group.
        config: the composed config as plain containers, with interpolations, `auto` and similar words resolved. The
            sections are parsed from it; `set_values` changes both. Only the address of the store differs, because it
            belongs to this machine: `tracking` has it.
        search: folders to search for the modules that `_target_` names; the first match counts. Default: only Python's
            own search path.
        resume: the folder or id of the run to resume. Default None: a new run.
        resume_data: `same` refuses to resume a run whose data has changed; `changed` continues. Default `same`.
        resume_code: the same for the user's code that the config names. Default `same`.
        task: the task of this process, if each machine runs its own launcher. Default None: this command starts all
            processes.
        tf_config: the text of TF_CONFIG, if `task` comes from it. Default None.
        weights: the path of the local file with the weights of `model.init_from`. Default None: no weights are loaded,
            or they are in the run's checkpoints.
        answers: fields of the model's `Outputs` that the validation rows of another run decided, such as
            `set_threshold`. This run then has no validation rows. Default: empty.
        features: the keys of features, by the dataclass that describes them; use `of`.
        trusted_modules: modules whose code `_target_` may run, in addition to a list of scaleflow's and Keras's own
            names.
            Default None: any code.
    """

    strategy: Strategy
    hardware: Hardware
    precision: Precision
    dataset: Dataset
    model: Model
    optimizer: Optimizer
    objective: ObjectiveOptions
    training: Training
    evaluation: EvaluationOptions
    checkpoint: Checkpoint
    profiler: Profiler
    tracking: Tracking
    cluster: Cluster
    sweep: Sweep
    debug: Debug
    seed: int
    choices: Mapping[str, str]
    config: Mapping[str, Any]
    search: Sequence[str] = ()
    resume: str | None = None
    resume_data: Literal["same", "changed"] = "same"
    resume_code: Literal["same", "changed"] = "same"
    task: TaskInfo | None = None
    tf_config: str | None = None
    weights: str | None = None
    answers: Mapping[str, Any] = field(default_factory=dict)
    trusted_modules: Sequence[str] | None = None
    features: Mapping[type, Any] = field(default_factory=dict)

    def of(self, section: type[S]) -> S:
        """Returns a feature's keys as an object of its dataclass; with defaults if the config does not have them."""
        options: S = self.features.get(section) or section()
        return options


@dataclass(frozen=True)
class Rule:
    """A combination of options that does not work, or that the user should know about."""

    when: str  # the condition, see `config/conditions.py`; the key that is best changed comes first
    reason: str  # why it does not work
    instead: str  # an alternative that works
    verdict: Literal["refused", "warning"] = "refused"  # `warning`: the run starts and shows it as a note
    #: The keys that the message shows with their values. Default: the keys in `when`
    keys: tuple[str, ...] = field(default=(), kw_only=True)
    #: An additional condition that is too complicated for `when`. Default: none
    only_if: Callable[[Plan], bool] | None = field(default=None, kw_only=True)
