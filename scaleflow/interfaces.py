"""The contracts: what the rooms of the house know of each other.

Every config group's subpackage may import this module and `scaleflow.errors`, and no other group.
The first half is what a config says once it was checked (`Plan` and its parts); the second half is
what the groups hand to each other in the worker and in the launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

Kind = Literal["classification", "binary", "multi_label", "regression"]

#: What is done to a text before it is split into words.
Standardize = Literal["lower_and_strip_punctuation", "lower", "strip_punctuation", "none"]

# ---------------------------------------------------------------------------------------------
# What the config says
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The real thing that a config names: `_target_` and the arguments beside it.

    Attributes:
        key: the config group, for messages.
        path: the dotted name of a class or function.
        arguments: keyword arguments, plain values or nested `_target_` mappings.
    """

    key: str
    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Partitioner:
    """`strategy.partitioner`: how variables are divided among parameter servers, along their first axis.

    Attributes:
        max_shards: into so many at most; null leaves every variable whole.
        min_shard_bytes: a shard has at least so many, so that small variables stay whole; null divides each
            variable into `max_shards`.
    """

    max_shards: int | None = field(default=None, metadata={"at_least": 1})
    min_shard_bytes: int | None = field(default=256 << 10, metadata={"at_least": 1, "at_most": 2**62})


@dataclass(frozen=True)
class Strategy:
    """`strategy`: how the work is spread over devices.

    Attributes:
        communication: multi_worker: how gradients travel between workers; `ring` over gRPC, `nccl` between GPUs.
        partitioner: parameter_server.
        stages: pipeline: the parts that the model's layers are divided into, a device to each.
        micro_batches: pipeline: the equal parts that a batch goes through the stages in; 1 is plain model parallelism.
        cuts: pipeline: the first layer of each stage but the first; null balances them by parameters.
    """

    name: Literal["auto", "one_device", "mirrored", "multi_worker", "parameter_server", "pipeline", "tpu"] = "auto"
    communication: Literal["auto", "ring", "nccl"] = "auto"
    partitioner: Partitioner = field(default_factory=Partitioner)
    stages: int = field(default=2, metadata={"at_least": 2})
    micro_batches: int = field(default=4, metadata={"at_least": 1})
    cuts: list[str] | None = None


@dataclass(frozen=True)
class Cluster:
    """`cluster`: where the processes of a strategy with several of them are.

    Attributes:
        name: `local` starts them on this machine; `tf_config` is started once on each machine, and the
            environment variable TF_CONFIG says which of them this is; `slurm` is started by srun, as its tasks;
            `kubernetes` is started in the pods of an Indexed Job; `ray` has the machines of a Ray cluster start them.
        workers: processes that train; null means 2 where the strategy needs several.
        servers: parameter_server: processes that hold the variables; null means 1.
        max_restarts: how often processes that died are started again, in all: a parameter server's worker alone, else
            all of them, from the last checkpoint. null means 10 for parameter_server, and 0 elsewhere.
        stall_seconds: processes that report nothing for so long, while training or evaluating, count as dead.
        start_seconds: how long processes wait for each other at the start.
        submit: `print` writes what starts the run there, and starts nothing.
        cpus: ray, kubernetes: cores of each process, or pod. For Ray null sets aside one, and limits nothing; in a pod
            more may be used that nobody else needs.
        gpus: ray, kubernetes: GPUs of each process, or pod.
        address: ray: the cluster's, `HOST:PORT`, or `auto` for one on this machine; null means what the environment
            variable RAY_ADDRESS says, or else a cluster of this machine alone for as long as the run.
        min_workers: ray: with so many the run goes on when others are lost; null means with all.
        placement: ray: `spread` over as many machines as there are, or `pack` on few.
        image: kubernetes, as all below: of its pods.
        job: the name of the Job and of its Service, and of the run's folder on the volume.
        namespace: null means kubectl's.
        memory: of each pod, and its limit, too; in Kubernetes' words.
        env_from: names of Secrets whose keys the pods have as environment variables.
        volume: the name of a PersistentVolumeClaim that all pods mount at `path`; the run's folder is there.
        port: that each pod listens on.
        retries: how often a pod of each index may fail.
    """

    name: Literal["local", "tf_config", "slurm", "kubernetes", "ray"] = "local"
    workers: int | None = field(default=None, metadata={"at_least": 1, "at_most": 64})
    servers: int | None = field(default=None, metadata={"at_least": 1, "at_most": 64})
    max_restarts: int | None = field(default=None, metadata={"at_least": 0})
    stall_seconds: float | None = field(default=None, metadata={"above": 0.0})
    start_seconds: float = field(default=120.0, metadata={"above": 0.0})
    submit: Literal["print"] | None = None
    cpus: int | None = field(default=None, metadata={"at_least": 1})
    gpus: int = field(default=0, metadata={"at_least": 0})
    address: str | None = None
    min_workers: int | None = field(default=None, metadata={"at_least": 1, "at_most": 64})
    placement: Literal["spread", "pack"] = "spread"
    image: str | None = None
    job: str = "scaleflow"
    namespace: str | None = None
    memory: str | None = None
    env_from: list[str] | None = None
    volume: str | None = None
    path: str = "/scaleflow"
    port: int = field(default=2222, metadata={"at_least": 1, "at_most": 65535})
    retries: int = field(default=3, metadata={"at_least": 0})


@dataclass(frozen=True)
class Hardware:
    """`hardware`: which devices, and how TensorFlow uses them. Memory in MiB.

    Attributes:
        tpu: `grpc://HOST:PORT`, `local` or a name; null means the one that the environment tells of.
        xla: compile the model's forward and backward pass with XLA.
        deterministic: the same bits at every run.
    """

    name: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    tpu: str | None = None
    devices: list[int] | None = None
    logical_devices: int = field(default=1, metadata={"at_least": 1})
    memory_growth: bool = False
    memory_limit_mb: int | None = field(default=None, metadata={"at_least": 1})
    intra_op_threads: int | None = field(default=None, metadata={"at_least": 1})
    inter_op_threads: int | None = field(default=None, metadata={"at_least": 1})
    xla: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class Precision:
    """`precision`: the dtype that layers compute in; variables and outputs stay float32."""

    name: Literal["float32", "mixed", "mixed_float16", "mixed_bfloat16"] = "float32"


@dataclass(frozen=True)
class Augment:
    """`dataset.augment`: what is done to what is trained on, and to nothing else.

    Attributes:
        flip: images left to right, half of them.
        crop: pixels of zeros around an image, out of which one of its size is cut.
        mixup: each example is mixed with another one, by a share from Beta(mixup, mixup) (Zhang et al. 2017).
    """

    flip: bool = False
    crop: int = field(default=0, metadata={"at_least": 0})
    mixup: float = field(default=0.0, metadata={"at_least": 0.0})


@dataclass(frozen=True)
class Dataset:
    """`dataset`: the source, and what the shared pipeline does with it.

    Attributes:
        limit: use only the first so many examples of each split.
        validation: the fraction of the training split that is held out, drawn by the run's seed (of a stream of large
            records the first ones), or the name of a split.
        shuffle: a stream that is not kept goes through a buffer of so many examples; null takes as many as fit in
            256 MiB. What is in memory, and a stream whose records are small, is always shuffled as a whole.
        cache: where the examples of a stream are kept once they were read and prepared: `memory`, `file` (in the
            folder for temporary files, gone with the process), `none`; `auto` takes memory for those that are small.
        threads: of tf.data's own; null shares TensorFlow's.
        normalise: the inputs get the mean 0 and the deviation 1 that the training split has in each channel; a part
            of the saved model.
        on_bad_example: `raise` ends with the name of an example that cannot be read; `skip` looks for them all first.
    """

    target: Target
    limit: int | None = field(default=None, metadata={"at_least": 1})
    validation: float | str | None = 0.1
    shuffle: int | None = field(default=None, metadata={"at_least": 1})
    cache: Literal["auto", "memory", "file", "none"] = "auto"
    threads: int | None = field(default=None, metadata={"at_least": 1})
    on_bad_example: Literal["raise", "skip"] = "raise"
    normalise: bool = False
    augment: Augment | None = None


@dataclass(frozen=True)
class Model:
    """`model`: a factory that is called with the dataset's description.

    Attributes:
        init_from: a Keras file, a folder with one, or an MLflow model URI, whose weights layers of the same name and
            shapes begin with.
    """

    target: Target
    init_from: str | None = None


@dataclass(frozen=True)
class Optimizer:
    """`optimizer`: a Keras optimizer, and the learning rate composed around it.

    Attributes:
        schedule: what becomes of the rate: `constant`, `cosine` (to `final_rate` x the rate at the last
            step; Loshchilov and Hutter 2016), `step` (times `step_factor` every `step_every` updates).
        warmup_steps: updates over which the rate rises linearly from zero.
        scale: `linear` multiplies the rate by global batch / base_batch_size (Goyal et al. 2017),
            `sqrt` by its square root.
    """

    target: Target
    learning_rate: float = field(default=0.001, metadata={"above": 0.0})
    schedule: Literal["constant", "cosine", "step"] = "constant"
    final_rate: float = field(default=0.0, metadata={"at_least": 0.0, "at_most": 1.0})
    step_every: int | None = field(default=None, metadata={"at_least": 1})
    step_factor: float = field(default=0.1, metadata={"above": 0.0, "at_most": 1.0})
    warmup_steps: int = field(default=0, metadata={"at_least": 0})
    scale: Literal["none", "linear", "sqrt"] = "none"
    base_batch_size: int = field(default=256, metadata={"at_least": 1})


@dataclass(frozen=True)
class EarlyStopping:
    """`training.early_stopping`: end when `monitor` has not improved for `patience` epochs."""

    monitor: str = "val/loss"
    patience: int = field(default=3, metadata={"at_least": 1})
    mode: Literal["auto", "min", "max"] = "auto"


@dataclass(frozen=True)
class Training:
    """`training`: how long, and in what portions. A step is one optimizer update.

    Attributes:
        engine: `loop` is scaleflow's own, on every strategy; `fit` is Keras's, on one device or mirrored.
        step: a training step of the user's.
        callbacks: Keras's, in both engines.
        on_nan: at a loss or weights that are not finite: `stop`, or `rollback` to the last checkpoint before, with
            the learning rate times `nan_rate_factor`, at most `nan_rollbacks` times.
    """

    epochs: int = field(default=20, metadata={"at_least": 1})
    batch_size: int = field(default=32, metadata={"at_least": 1})
    global_batch_size: int | None = field(default=None, metadata={"at_least": 1})
    accumulate: int = field(default=1, metadata={"at_least": 1})
    clip_norm: float | None = field(default=None, metadata={"above": 0.0})
    steps_per_epoch: int | None = field(default=None, metadata={"at_least": 1})
    max_steps: int | None = field(default=None, metadata={"at_least": 1})
    steps_per_loop: int | Literal["auto"] = field(default="auto", metadata={"at_least": 1})
    engine: Literal["loop", "fit"] = "loop"
    step: Target | None = None
    early_stopping: EarlyStopping | None = None
    callbacks: list[Target] | None = None
    on_nan: Literal["stop", "rollback"] = "stop"
    nan_rate_factor: float = field(default=0.5, metadata={"above": 0.0, "at_most": 0.99})
    nan_rollbacks: int = field(default=3, metadata={"at_least": 1})


@dataclass(frozen=True)
class Best:
    """`checkpoint.best`: the checkpoint at the end of the epoch in which `monitor` was best is kept."""

    monitor: str = "val/loss"
    mode: Literal["auto", "min", "max"] = "auto"


@dataclass(frozen=True)
class Checkpoint:
    """`checkpoint`: when a run's whole state is saved, and what is kept of it.

    Attributes:
        every_epochs, every_steps, every_seconds: when; each may be null.
        keep: the newest so many are kept.
        best: which one is kept besides, until a better one comes.
        export: whether the model of the last step, or of the best checkpoint, is tested and exported.
        folder: anything that `tf.io.gfile` opens; null is `checkpoints` in the run's folder.
        max_seconds: the command ends after so long, with a checkpoint, as if a signal had come.
        write_seconds: where one takes longer to be written, whoever has to wait for it gives up.
    """

    name: Literal["default", "none"] = "default"
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
    def sought(self) -> Best | None:
        """By what the best one is known, if it is wanted."""
        return self.best or (Best() if self.export == "best" else None)


@dataclass(frozen=True)
class Profiler:
    """`profiler`: which steps are traced.

    Attributes:
        start_step: the first traced step of each window, counted from 1 as metrics are; the one before it compiles.
        steps: of each window.
    """

    name: Literal["none", "trace"] = "none"
    start_step: int | list[int] = field(default=50, metadata={"at_least": 2})
    steps: int = field(default=20, metadata={"at_least": 2})

    @property
    def windows(self) -> list[tuple[int, int]]:
        """The first and the last traced step of each window, in order; none where nothing is traced."""
        if self.name == "none":
            return []
        starts = self.start_step if isinstance(self.start_step, list) else [self.start_step]
        return [(start, start + self.steps - 1) for start in sorted(starts)]


@dataclass(frozen=True)
class Tracking:
    """`tracking`: where the run is recorded.

    Attributes:
        uri: an MLflow tracking URI, absolute.
        flush_seconds: how long the end of a run waits for a store that is away, or slow.
        offline: the store may be away at the start, too.
        system_metrics: of this machine and of each worker's process on it, every ten seconds.
        register_as: a registered model, of which the logged model becomes a new version.
        alias: of a registered model; moves to that version.
        tensorboard: the metrics go to an event file, too, and every so many epochs the distribution of the weights.
    """

    name: Literal["mlflow", "none"] = "mlflow"
    uri: str | None = None
    experiment: str = "scaleflow"
    run_name: str | None = None
    tags: dict[str, str] | None = None
    flush_seconds: float = field(default=60.0, metadata={"at_least": 0.0})
    offline: bool = False
    system_metrics: bool = True
    register_as: str | None = None
    alias: str | None = "newest"
    tensorboard: bool = False
    histograms_every_epochs: int = field(default=1, metadata={"at_least": 1})


@dataclass(frozen=True)
class TaskInfo:
    """Which of several processes this one is.

    Attributes:
        worker: its number; 0 is the chief, whose events are the run's.
        peers: HOST:PORT of every process that trains or serves, this one too: the chief, the workers, the parameter
            servers.
        servers: how many of them are parameter servers.
        evaluator: whether there is one beside them; `here` where it is this process, whose number then means nothing.
    """

    worker: int
    peers: tuple[str, ...]
    servers: int = 0
    evaluator: Literal["here", "elsewhere"] | None = None


@dataclass(frozen=True)
class Debug:
    """`debug`: ways to look inside. Each option of the group sets one; they go together.

    Attributes:
        inline: the worker runs in the launcher's process, for pdb.
        overfit: every step has the first global batch.
        fast: one step of everything: of training, validation and test.
        nan: an operation that makes NaN or Inf ends the run, and is named.
        placement: the device of each operation goes to the worker's log.
        eager: nothing is compiled: each operation runs as Python comes to it.
    """

    inline: bool = False
    overfit: bool = False
    fast: bool = False
    nan: bool = False
    placement: bool = False
    eager: bool = False


@dataclass(frozen=True)
class Sweep:
    """What holds for several runs by one command.

    Attributes:
        on_change: what becomes of a sweep's folder when the command's config is another than the one it was begun with.
        metric: whose last value a sweeper is told.
        repeat: how often each job is run, and counts.
        warm_up: how often each is run before that.
        same_losses: whether jobs with the same seed and global batch have to begin with the same losses.
    """

    on_change: Literal["refuse", "new"] = "refuse"
    metric: str = "val/loss"
    repeat: int = field(default=1, metadata={"at_least": 1})
    warm_up: int = field(default=0, metadata={"at_least": 0})
    same_losses: bool = False


@dataclass(frozen=True)
class Plan:
    """A command, composed, resolved, typed and checked as far as that needs no TensorFlow.

    Attributes:
        choices: the option chosen in each config group.
        config: the composed config with interpolations resolved, as plain containers.
        search: folders in which the modules named by `_target_` are looked for, first match first.
        resume: the folder of the run that goes on.
        evaluator: whether TF_CONFIG names one, which is this process or another.
        chief: HOST:PORT at which an evaluator's chief answers, where that is one of several processes.
        trusted_modules: modules whose code may be followed beside scaleflow's and Keras's; None: all that there are.
    """

    strategy: Strategy
    hardware: Hardware
    precision: Precision
    dataset: Dataset
    model: Model
    optimizer: Optimizer
    training: Training
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
    evaluator: Literal["here", "elsewhere"] | None = None
    chief: str | None = None
    trusted_modules: Sequence[str] | None = None


# ---------------------------------------------------------------------------------------------
# What the worker's rooms hand to each other
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """One example's input, as the dataset gives it and as the saved model takes it.

    Attributes:
        shape: without the batch dimension.
        dtype: a TensorFlow dtype name.
        scale: what a model multiplies the raw values by to bring them near [0, 1], or None where they
            are near it already. Part of the model, so that the saved one takes raw input.
        vocabulary: of text as numbers (dtype int32, 0 is padding): they are below this.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    scale: float | None = None
    vocabulary: int | None = None


@dataclass(frozen=True)
class Outputs:
    """What the model has to return, and what an example's target means.

    Attributes:
        kind: `classification` (integer targets of shape ()), `binary` (0 or 1, shape (1,)),
            `multi_label` (0 or 1 in each place, the shape of the output) or `regression` (real values).
        shape: of one example's output, without the batch dimension: logits, or values.
        names: of the classes, labels or values, in their order, where they have some; for `binary` of 0 and of 1.
    """

    kind: Kind
    shape: tuple[int, ...]
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Arrays:
    """A split that fits in memory.

    Attributes:
        inputs: [n, *Inputs.shape] of Inputs.dtype; text as numpy's `str`, or objects that are `str` or `bytes`.
        targets: [n] integers for classification, else [n, *Outputs.shape] numbers.
    """

    inputs: np.ndarray[Any, Any]
    targets: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Stream:
    """A split that is read as it goes.

    Attributes:
        dataset: yields single (input, target) examples, not batched, the same ones in the same order each time it is
            iterated; or, with `decode`, records that are cheap to read and to keep: a path and a label, a line, a
            serialized example.
        length: how many; an epoch is counted from it. A stream that is found to end earlier is refused, or ends the
            run as FAILED; what goes beyond is not used.
        decode: traced, as what `tf.data.Dataset.map` calls: a record (the components that `dataset` yields, as
            arguments) -> (input, target), of the shapes and the dtype that the source says. It is called in parallel,
            behind the shuffling and the division among workers: each decodes the examples that it needs.
        name: a record (its components as numpy values, strings as `bytes`, as arguments) -> what a user knows the
            example by (a file, a file and a row), for messages; None: its place in the split.
        faults: the first of the examples that the source already knows it can't decode, in words.
        at_once: so many records, fewer at the end, are decoded in one call, which small ones need to be fast: `decode`
            takes their components [b, ...] and gives (inputs [b, ...], targets [b, ...]). One that can't be decoded
            fails the call. None: one record to a call.
    """

    dataset: tf.data.Dataset
    length: int
    decode: Callable[..., tuple[Any, Any]] | None = None
    name: Callable[..., str] | None = None
    faults: Sequence[str] = ()
    at_once: int | None = None

    def __len__(self) -> int:
        return self.length


Examples = Arrays | Stream


class Source(Protocol):
    """A dataset, as a user writes one: what its examples are, and the examples.

    `dataset._target_` names the class, its arguments beside it. One object is made in each worker, and all of them have
    to give the same. It does not shuffle, batch, repeat or shard: the pipeline behind it does. It may have two more
    attributes:

    - `preprocessing`: a `Preprocessing`, or None;
    - `notes`: what a user should know before anything is read (that it is downloaded first, say), each a line.
    """

    @property
    def inputs(self) -> Inputs: ...

    @property
    def outputs(self) -> Outputs: ...

    @property
    def splits(self) -> Collection[str]:
        """The splits there are: `train`, mostly `test`, and any that `dataset.validation` may name."""

    def load(self, split: str) -> Examples:
        """The examples of one split, the same ones in the same order at every call, in every worker."""


class Preprocessing(Protocol):
    """The way from raw inputs (`Source.inputs`) to what a model computes with, where a rescaling is not enough.

    It is learned once, from the training split, by the chief. In training it is done by the input pipeline; in the
    saved model it is the first part, so that this takes raw inputs: a string, a row.
    """

    def learn(self, batches: Iterable[np.ndarray[Any, Any]]) -> Any:
        """What there is to learn (a vocabulary, means and deviations), as plain values that JSON can hold.

        The other methods get it as it comes back from JSON: a tuple as a list, keys as text.

        Args:
            batches: the raw inputs of the training split (what is held out for validation is not among them), in its
                order, each [b, *Source.inputs.shape]; text from a stream as `bytes`. To be gone through once.
        """

    def features(self, learned: Any) -> Inputs:
        """What comes out, and is what the model factory is called with."""

    def layer(self, learned: Any) -> keras.Layer:
        """raw [b, *Source.inputs.shape] -> [b, *features.shape] of the dtype that `features` says.

        Made of Keras's own layers and operations, so that the saved model loads where this class is not; a
        `keras.Model` of several is one, too. It has no trainable weights, and looks at each example by itself.
        Called more than once, in float32 whatever the model computes in: for the input pipeline, for the saved model.
        """


class Workers(Protocol):
    """The processes that train in step, as what they have to do alike sees them; all of them make the same calls."""

    def from_chief(self, make: Callable[[], str]) -> str:
        """What the chief makes, on every worker."""

    def all(self, found: bool) -> bool:
        """Whether every worker has found so."""


@dataclass(frozen=True)
class Batching:
    """How a global batch is made up: `replicas` x `accumulate` micro-batches of `batch_size`."""

    batch_size: int
    accumulate: int
    replicas: int

    @property
    def share(self) -> int:
        """Examples of a global batch that one replica sees."""
        return self.batch_size * self.accumulate

    @property
    def global_size(self) -> int:
        return self.share * self.replicas

    def steps(self, examples: int) -> int:
        """Global batches in an epoch, the last one padded where it is partial."""
        return -(-examples // self.global_size)


class Feed(Protocol):
    """One split as the compiled loop sees it: position in, padded batch out.

    What comes is a function of (epoch, step) alone, whatever the number of replicas.
    """

    @property
    def examples(self) -> int: ...

    @property
    def batching(self) -> Batching: ...

    @property
    def ahead(self) -> bool:
        """Whether the next step's batch can be read while this step's is trained on."""

    def open(self, epoch: int, step: int) -> Any:
        """What the compiled function needs as an argument to read from (epoch, step) on."""

    def fetch(self, opened: Any) -> Any:
        """Traced, outside the replicas: this step's argument for each replica."""

    def micro_batch(
        self, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, replica: tf.Tensor, index: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Traced, in a replica: (inputs [b, ...], targets [b, ...], mask [b] float32) of one micro-batch."""

    def batches(self, epochs: int, steps_per_epoch: int) -> tf.data.Dataset:
        """The global batches of the first epochs, for Keras's `fit`: (inputs, targets, mask), replica after replica."""


class CoordinatedFeed(Feed, Protocol):
    """A feed whose batches are taken by workers elsewhere, in any order."""

    def worker_argument(self, opened: Any, first: int, steps: int) -> Any:
        """What a worker needs for so many steps from the epoch's step `first` on; taken in order."""


@dataclass(frozen=True)
class Objective:
    """What is minimised and what is watched.

    Attributes:
        loss: (targets, outputs float32) -> [batch] float32.
        metrics: name -> a function of the same form; each is averaged over examples.
        finish: name -> what becomes of that metric's mean, such as a root.
        classes: where examples are of classes, how many there are.
        decide: with `classes`: (targets, outputs) -> (the true class [batch], the model's [batch]), int32.
    """

    loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    metrics: Mapping[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]]
    finish: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    classes: int | None = None
    decide: Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]] | None = None


#: (model, (inputs, targets) [b, ...], weights [b] float32)
#:     -> (the scalar sum of the examples' losses times their weights, outputs [b, *Outputs.shape]: logits or values).
#:
#: A user's own is a function that `training.step._target_` names, its further arguments beside it. It is called in a
#: replica, for one micro-batch, under the tape of the loop, which does all else: it adds the model's own losses
#: (regularization), scales for float16, accumulates, sums over the replicas, clips and updates.
#:
#: Weights sum to 1 over all micro-batches and replicas of an update; an example that is padding has 0 (and is a copy of
#: a real one). So a term that is not a sum over examples counts once if it is multiplied by the sum of the weights.
#: Outputs are what `train/` metrics are of. With `dataset.augment.mixup`, targets of classes are [b, classes].
LossStep = Callable[[Any, tuple[Any, Any], Any], tuple[Any, Any]]


class MakeOptimizer(Protocol):
    """Makes one more optimizer, as the config's group `optimizer` says."""

    def __call__(self, variables: Sequence[Any], rate_factor: float = 1.0) -> Any:
        """A Keras optimizer with its state, for some variables; its rate is the config's times a factor.

        Its `apply_gradients` takes this replica's gradients of a weighted loss and sums them over the replicas.
        """


class OwnUpdates(Protocol):
    """A training step that applies optimizers of its own, as a user writes one.

    `training.step._target_` names the class, its arguments beside it; one object is made in each worker. It
    does what it likes to the gradients; so what the loop would do to them is refused beside it: accumulation,
    clipping, float16's loss scaling. What it keeps from step to step (optimizers, models, variables) lies in its
    attributes, also in lists, tuples and dicts there: that is where a checkpoint finds it.
    """

    def build(self, model: Any, make_optimizer: MakeOptimizer) -> None:
        """Makes all variables that there will be; called once, in the strategy's scope."""

    def update(self, model: Any, batch: tuple[Any, Any], weights: Any) -> tuple[Any, Any]:
        """One update; traced in a replica.

        Args:
            model: what the config's group `model` makes.
            batch: (inputs, targets) [b, ...], this replica's share of the global batch.
            weights: [b] float32; they sum to 1 over all replicas, and an example that is padding has 0.

        Returns:
            (the scalar sum of this replica's losses times weights, outputs [b, *Outputs.shape]: logits or values). The
            loop sums the loss over the replicas to report it and to end the run where it is not finite;
            `make_optimizer`'s optimizers sum the gradients. The model's own losses (regularization) are for `update` to
            add, divided by the number of replicas.
        """


class ForwardBackward(Protocol):
    """A model's way forward, and forward and backward, over one micro-batch. Traced in a replica."""

    @property
    def variables(self) -> Sequence[Any]:
        """What the gradients are of, and the optimizer updates."""

    @property
    def devices(self) -> Sequence[str]:
        """The device of each variable's gradient; empty where that is the replica's own."""

    def forward(self, inputs: tf.Tensor) -> tf.Tensor:
        """The outputs [b, ...] float32 that an evaluation looks at."""

    def backward(
        self, batch: tuple[tf.Tensor, tf.Tensor], weights: tf.Tensor, parts: int, scale: Callable[[Any], Any]
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor | None]]:
        """The gradient of the weighted loss.

        Args:
            batch: (inputs, targets) of one micro-batch.
            weights: [b] float32, of each example; 0 where it is padding.
            parts: micro-batches to an update, over all replicas; the model's own losses count once to an update.
            scale: what the loss is passed through before the way back, for float16.

        Returns:
            (the scalar sum of losses times weights, outputs, a gradient or None to each of `variables`).
        """


@dataclass(frozen=True)
class Snapshot:
    """All that a run needs to go on from where it was.

    Attributes:
        step: steps that were taken.
        tensors: every variable by a name that does not depend on how it was spread over devices, whole.
        host: what the host's half knows, as plain values that JSON can hold.
    """

    step: int
    tensors: Mapping[str, np.ndarray[Any, Any]]
    host: Mapping[str, Any]


class Checkpoints(Protocol):
    """Where snapshots are kept."""

    def steps_left(self, step: int) -> int | None:
        """How many steps until one is due, where that is known beforehand."""

    def is_due(self, step: int, seconds: float) -> bool:
        """Whether one is due within an epoch, behind `step`, `seconds` after the last one."""

    def is_due_after(self, epoch: int) -> bool:
        """Whether one is due at the end of an epoch, counted from 1."""

    def save(self, snapshot: Snapshot, is_best: bool = False) -> None:
        """Begins to save; it is written in the background, and a newer one may take its place before it is begun.

        Raises:
            CheckpointError: if this or an earlier one could not be written.
        """

    def wait(self) -> None:
        """Until all is written; raises as `save` does."""

    def load_best(self) -> Snapshot | None:
        """The best one that was saved; None if there is none, or if it is damaged, which a note says."""

    def load_newest(self, before: int | None = None) -> Snapshot | None:
        """The newest one that is undamaged, or None; of those before a step, where that is given."""

    def drop_from(self, step: int) -> None:
        """Forgets those at or behind a step, which the run does not go on from any more."""


#: Name scopes of what the loop and fit compile, by which a trace tells what an operation is part of: of a step at all,
#: of its reading, of the sum over its replicas.
STEP_SCOPE, READ_SCOPE, SUM_SCOPE = "train_step", "read_batch", "sum_over_replicas"


class Tracer(Protocol):
    """Traces some steps of a run. All workers make the same calls; steps are counted from 1."""

    def steps_left(self, step: int) -> int | None:
        """How many steps the next call may take, behind `step`, so that a window begins and ends where it is to."""

    def trace_call(self, step: int) -> AbstractContextManager[bool]:
        """Around the call that begins with `step`; gives whether it is to be a call of that step alone."""

    def count_steps(self, step: int) -> None:
        """So many steps were taken; writes the trace of a window that ends with this one."""

    def report(self, usual_ms: float | None) -> None:
        """Reports what was written, once all workers have done so.

        Args:
            usual_ms: the mean milliseconds of a step that is not traced, waiting for input included, if that is known.
        """

    def close(self) -> None:
        """Writes what there is of a window that has begun."""

    def finish(self, step: int) -> None:
        """The run is through after so many steps; tells of the windows that it has ended before."""


class Emit(Protocol):
    """Where a worker's events go."""

    def __call__(self, event: str, /, **fields: Any) -> None: ...


# ---------------------------------------------------------------------------------------------
# What the launcher's rooms hand to each other
# ---------------------------------------------------------------------------------------------

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class Point:
    """One value of one metric. `time` in milliseconds since the epoch."""

    key: str
    value: float
    step: int
    time: int


#: The tag of a run by which it is found, whatever became of the command that asked for it.
IDENTITY = "scaleflow.id"


class Tracker(Protocol):
    """A store of runs. Every call may be repeated with the same arguments and changes nothing then.

    Attributes:
        adopted: the run that `start` takes instead of making one.
    """

    adopted: str | None

    @property
    def run_id(self) -> str | None: ...

    @property
    def uri(self) -> str | None:
        """The store's address."""

    def connect(self) -> None:
        """Opens the store; makes no run.

        Raises:
            StoreUnreachable: where it does not answer now.
            ConfigError: where it can't be used.
        """

    def find_folder(self, run_id: str) -> str:
        """The folder that a run was started in. Raises `ConfigError` where the store has no such run of ours."""

    def adopt(self, run_id: str) -> None:
        """Takes a run that was made before, as it is. Raises `ConfigError` where the store has no such run."""

    def reopen(self) -> None:
        """The run that was taken goes on."""

    def start(self, name: str, tags: Mapping[str, str], began: int) -> None:
        """Makes the run, or adopts the one that the environment names.

        Args:
            name: the run's.
            tags: set at once; `IDENTITY` among them, by which one that was made before is found.
            began: when the command began, in milliseconds since the epoch.
        """

    def log_params(self, values: Mapping[str, str]) -> None: ...

    def log_metrics(self, points: Sequence[Point]) -> None: ...

    def set_tags(self, values: Mapping[str, str]) -> None: ...

    def log_artifact(self, path: Path, folder: str | None) -> None: ...

    def log_dataset(self, told: Mapping[str, Any]) -> None:
        """Logs the dataset, as the event `data` tells of it, as what the run has for input."""

    def log_model(self, path: Path, step: int) -> None:
        """Logs the folder that a worker exported as the run's model."""

    def finish(self, status: Status, ended: int) -> None:
        """Ends the run, which ended at `finish`, in milliseconds since the epoch."""

    def describe_links(self) -> Sequence[tuple[str, str]]:
        """What to tell the user: (word, value) lines that say how to look at the run."""
