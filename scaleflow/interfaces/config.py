"""The config as typed sections: one dataclass for each config group, and `Plan`, which holds them all.

`scaleflow.config.parse` reads a composed config into these classes. It checks types, the values of each `Literal`
and the limits in a field's metadata (`at_least`, `above`, `at_most`, `below`). An integer without `at_most` is at most
2**31 - 1, and a float is finite. `scaleflow.config.rules` checks combinations of keys. A default given here holds if
the chosen option in conf/ does not set the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

#: The value of a key that the number of training examples decides, before the event `ready`.
BY_SIZE: Final = "by_size"


#: Values of `dataset.validation` that are no names of splits.
NO_SPLITS = AUTO, OUT_OF_FOLD = "auto", "out_of_fold"


@dataclass(frozen=True)
class Target:
    """A class or function that a config names with `_target_`, and its arguments.

    Attributes:
        key: the config key that holds it, such as `dataset`; for messages.
        path: the dotted name of the class or function.
        arguments: its keyword arguments: plain values, or nested mappings with a `_target_`.
        typed: the short name that the user typed in place of it; empty if there is none.
    """

    key: str
    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    typed: str = ""

    def describe(self) -> str:
        """Returns the key with its value, for messages."""
        return f"{self.key}={self.typed}" if self.typed else f"{self.key}._target_={self.path}"


@dataclass(frozen=True)
class Partitioner:
    """`strategy.partitioner`: how `parameter_server` divides variables into shards, along their first axis.

    Attributes:
        max_shards: the most shards of one variable. At least 1. Default null: variables stay whole.
        min_shard_bytes: the least size of a shard, in bytes, so that small variables get fewer shards or stay whole.
            1 to 2**62. Default 262144 (256 KiB). null: every variable gets `max_shards` shards.
    """

    max_shards: int | None = field(default=None, metadata={"at_least": 1})
    min_shard_bytes: int | None = field(default=256 << 10, metadata={"at_least": 1, "at_most": 2**62})


@dataclass(frozen=True)
class Strategy:
    """`strategy`: how the work is spread over devices.

    Attributes:
        name: the strategy. Default `auto`: `tpu` if there is a TPU; `multi_worker` or `parameter_server` if TF_CONFIG
            names several processes; otherwise `mirrored` with several devices and `one_device` with one.
        communication: multi_worker: how gradients travel between workers: `ring` over gRPC, or `nccl` between GPUs.
            Default `auto`: TensorFlow chooses.
        partitioner: parameter_server: how variables are divided among the servers. Default: they stay whole.
        stages: pipeline: the number of parts that the model's layers are divided into, one device for each. At least 2.
            Default 2.
        replicas: pipeline: the number of copies of the stages, each on devices of its own, which share a global batch.
            There must be stages x replicas devices. At least 1. Default 1.
        micro_batches: pipeline: the number of equal parts that a batch is divided into, so that stages work at the same
            time. The batch of a replica must be divisible by it. At least 1; 1 is plain model parallelism. Default 4.
        cuts: pipeline: the name of the first layer of each stage except the first, so one name less than `stages`.
            Default null: stages get about the same estimated cost, of operations and parameters.
    """

    name: Literal["auto", "one_device", "mirrored", "multi_worker", "parameter_server", "pipeline", "tpu"] = "auto"
    communication: Literal["auto", "ring", "nccl"] = "auto"
    partitioner: Partitioner = field(default_factory=Partitioner)
    stages: int = field(default=2, metadata={"at_least": 2})
    replicas: int = field(default=1, metadata={"at_least": 1})
    micro_batches: int = field(default=4, metadata={"at_least": 1})
    cuts: list[str] | None = None

    @property
    def is_auto(self) -> bool:
        """Whether the strategy is not known yet."""
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
        """Whether the model is divided into stages."""
        return self.name == "pipeline"


@dataclass(frozen=True)
class Cluster:
    """`cluster`: what starts the processes of a strategy that has several, and where they run. An engine's own keys are
    the fields that its `section` adds (`cluster/engines.py`).

    Attributes:
        name: what starts the processes. Default `local`.
            `local`: this command starts all of them on this machine.
            `tf_config`: one command runs on each machine; the environment variable TF_CONFIG gives its task.
            `slurm`: srun starts one command for each task of a step.
            `kubernetes`: an Indexed Job starts one command in each pod.
            `ray`: this command starts all of them on the machines of a Ray cluster.
        workers: the number of processes that train. 1 to 4096; with local at most 64. Default null: 2 for
            `multi_worker` and `parameter_server`. Other strategies have one process. With tf_config, slurm and
            kubernetes the environment gives the number; set it only together with `submit`.
        servers: parameter_server: the number of processes that hold the variables. 1 to 64. Default null: 1. With slurm
            and kubernetes these are the last tasks or pods. TF_CONFIG names its own.
        max_restarts: how often the launcher restarts processes that died, over the whole run. It restarts a dead
            worker of `parameter_server` alone if its machine is still there, and otherwise all processes from the
            last checkpoint. With tf_config, slurm and kubernetes it restarts the process of its own machine; there
            it must be 0 or null for `parameter_server`. At least 0. Default null: 10 with `ray`, and with
            `parameter_server` on `local`; otherwise 0.
        stall_seconds: after this many seconds without progress while training or evaluating, the run's processes count
            as dead. It must be longer than the longest evaluation. Until training begins, `start_seconds` are added.
            Above 0. Default null: progress is not watched.
        start_seconds: how long processes wait for each other at the start, in seconds. It also limits the wait for a
            TPU to answer, for resources that a Ray cluster lacks, and for an evaluator's chief. Above 0. Default
            120; in conf/cluster/kubernetes.yaml 1800.
        submit: slurm, kubernetes: `print` writes a batch script or a manifest to standard output and starts nothing.
            Default null: the command runs.
        cpus: ray, kubernetes: CPU cores of each process or pod. At least 1. Default null. Ray: null reserves one
            core and does not limit TensorFlow's threads; a number limits them. Kubernetes: a request, not a limit;
            null requests none.
        gpus: ray, kubernetes: GPUs of each process or pod. At least 0. Default 0.
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
    """`hardware`: which devices a process uses, and how TensorFlow uses them.

    Attributes:
        name: the kind of device. `gpu` and `tpu` are rejected if there is none. Default `auto`: a TPU if the
            strategy is `tpu`, otherwise GPUs if TensorFlow finds some, otherwise the CPU.
        tpu: the TPU's address: `grpc://HOST:PORT` (several with commas), `local`, or a name that Google Cloud knows.
            Default null: the environment variables and device files that `scaleflow.cluster.tpu` looks for.
        devices: indices of the physical devices to use, from 0, each once. Not for a TPU. Default null: all devices.
        logical_devices: the number of logical devices that each physical device is divided into. On a GPU it needs
            `memory_limit_mb`. Not for a TPU or `parameter_server`. At least 1. Default 1.
        memory_growth: GPU: allocate memory as it is needed, not all at the start. Not together with `memory_limit_mb`.
            Default false; in conf/hardware/gpu.yaml true.
        memory_limit_mb: GPU: the memory of each logical device, in MiB. At least 1. Default null: no limit.
        intra_op_threads: the number of threads inside one operation. At least 1. Default null: TensorFlow chooses.
        inter_op_threads: the number of operations that run at the same time. At least 1. Default null: TensorFlow
            chooses.
        xla: compile with XLA. `auto`: many steps as one program, on a CPU under `one_device`, for models and data that
            XLA makes faster (docs/performance.md). true: as `auto`, or where that does not apply the model's forward
            and backward pass; not with `pipeline`, `parameter_server`, `fit` or `deterministic`. Default `auto`.
        deterministic: use deterministic operations, so that every run gives the same bits. Slower on a GPU. Default
            false.
        remat: compute activations again in the backward pass instead of keeping them: less memory, more time. true:
            segments of the model that scaleflow chooses. A list: the layers with weights that a pattern matches (a
            name or path, with `*` and `?`), each by itself. Not with XLA. Default false.
    """

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
    """`precision`: the dtype that layers compute in.

    Attributes:
        name: the Keras dtype policy. `mixed` is `mixed_float16` on a GPU and `mixed_bfloat16` on a CPU or TPU.
            Variables, gradients and the model's outputs are float32 under each of them. Default `float32`.
    """

    name: Literal["float32", "mixed", "mixed_float16", "mixed_bfloat16"] = "float32"


@dataclass(frozen=True)
class Augment:
    """`dataset.augment`: random changes to the training examples. Validation and test examples stay unchanged.

    Attributes:
        flip: flip each image left to right with probability 1/2. Default false.
        crop: pad each image with this many pixels of zeros on each side, and cut a random window of the original size
            out of it. At least 0. Default 0: no crop.
        mixup: mix each example with another one, by a share drawn from Beta(mixup, mixup) (Zhang et al. 2017). Numeric
            inputs only; class targets become float32 [b, classes]. At least 0. Default 0: no mixup.
        resized_crop: cut a random part out of each image, and resize it to the original size. The part has at least
            this fraction of the area, and sides between 3:4 and 4:3 of the image's. 0 to 1. Default 0: no such crop.
        color_jitter: multiply brightness, contrast and saturation of each image by factors between 1 - color_jitter and
            1 + color_jitter. 0 to 1. Default 0: no change.
        erase: the probability with which a rectangle of 2 to 33 % of an image becomes 0 (Zhong et al. 2017). 0 to 1.
            Default 0: none.
    """

    flip: bool = False
    crop: int = field(default=0, metadata={"at_least": 0})
    mixup: float = field(default=0.0, metadata={"at_least": 0.0})
    resized_crop: float = field(default=0.0, metadata={"at_least": 0.0, "at_most": 1.0})
    color_jitter: float = field(default=0.0, metadata={"at_least": 0.0, "at_most": 1.0})
    erase: float = field(default=0.0, metadata={"at_least": 0.0, "at_most": 1.0})


@dataclass(frozen=True)
class Dataset:
    """`dataset`: the source of the examples, and the options of the input pipeline that all sources share.

    Attributes:
        target: the class of the source (`Source`) and its arguments.
        limit: use only this many examples of each split, the first ones. At least 1. Default null: all.
        validation: the fraction of the training split that is held out for validation (0 to less than 1), or the name
            of a split. The run's seed draws the examples. Default 0.1. null: no validation.
        shuffle: the size of the buffer that a stream is shuffled through, in examples. Examples in memory, and
            streams with `Stream.decode` whose records fit in 256 MiB, are shuffled as a whole instead. At least 1.
            Default null: as many as fit in 256 MiB, or 10,000 if their size is unknown. A table that is not in memory
            is shuffled in pools of at least so many rows, by default of 64 MiB.
        cache: where a stream's examples are kept after they were read and preprocessed: `memory`, `file` (a
            temporary file in TMPDIR, deleted with the process) or `none`. Text and examples of different shapes
            cannot be kept. Default `auto`: `memory` for a split of at most 1 GiB (of a table: 256 MiB) that takes at
            most a quarter of the free memory of each worker, otherwise `none`.
        shards: the number of parts into which each epoch divides the files of a table that is read while training. A
            global batch has the same number of rows of each, so the order does not depend on the number of workers, and
            a worker reads only its own parts, if this is a multiple of the number of workers. At least 1, a divisor of
            the global batch size. Default 1: each worker reads all files.
        threads: the number of threads of tf.data's own pool. At least 1. Default null: tf.data shares TensorFlow's.
        on_bad_example: what to do with an example that cannot be read. `raise` ends the command or the run with an
            error that names it. `skip` reads all examples before training and leaves the bad ones out. Default
            `raise`.
        normalise: give the inputs mean 0 and standard deviation 1 in each channel (the last axis), learned from the
            training split. It becomes part of the saved model. Numeric inputs without a preprocessing only. Default
            false.
        augment: random changes to the training examples. Default null: none.
        check: what to do if a sample of the data has faults, or a resumed run's or an evaluation's data differ from
            those of the training: `warn` says so in notes, `refuse` ends the command, `none` does not look. Default
            `warn`.
    """

    target: Target
    limit: int | None = field(default=None, metadata={"at_least": 1})
    validation: float | str | None = 0.1
    shuffle: int | None = field(default=None, metadata={"at_least": 1})
    cache: Literal["auto", "memory", "file", "none"] = "auto"
    shards: int = field(default=1, metadata={"at_least": 1})
    threads: int | None = field(default=None, metadata={"at_least": 1})
    on_bad_example: Literal["raise", "skip"] = "raise"
    normalise: bool = False
    augment: Augment | None = None
    check: Literal["warn", "refuse", "none"] = "warn"

    @property
    def validation_split(self) -> str | None:
        """The split that `validation` names, if it does."""
        return self.validation if isinstance(self.validation, str) and self.validation not in NO_SPLITS else None


@dataclass(frozen=True)
class Lora:
    """`model.lora`: low-rank adaptation (Hu et al. 2021): small matrices train instead of a layer's weight matrix.

    Attributes:
        layers: patterns of the names or paths of layers, as in `model.freeze`. Required. Dense, EinsumDense, Embedding
            and convolution layers take LoRA; a pattern of a layer that contains some of them stands for these.
        rank: the number of columns of the first and of rows of the second small matrix. At least 1. Default 8.
    """

    layers: list[str] | None = None
    rank: int = field(default=8, metadata={"at_least": 1})


@dataclass(frozen=True)
class Model:
    """`model`: the factory of the model.

    Attributes:
        target: a function (inputs: Inputs, outputs: Outputs, **arguments) -> keras.Model.
        init_from: a Keras file, a folder with one, a run's id, or an MLflow model URI. Layers with the same name and
            shapes start from its weights. Default null: new weights.
        init_from_preprocessing: the preprocessing and the classes of a run that begins with `init_from`. `extend`:
            those of the first run, and new words, categories, classes and columns after the known ones. `old`: exactly
            those of the first run. `new`: learned anew; layers that depend on what differs keep their new weights.
            Default `extend`.
        freeze: patterns of the names or paths (`backbone/conv*`) of layers that do not train, with all layers inside
            them. `*` matches any characters, `?` one. A pattern after `!` makes layers trainable again, so
            `['*', '!outputs']` freezes all but one. Applied after `init_from`. By epochs, it is a mapping of an epoch,
            from 0 on, to the patterns from then on: `{0: ['*', '!outputs'], 3: []}`. Default null: none.
        lora: train small matrices instead of the weight matrices of some layers. Default null.
    """

    target: Target
    init_from: str | None = None
    init_from_preprocessing: Literal["extend", "old", "new"] = "extend"
    freeze: list[str] | dict[int, list[str]] | None = None
    lora: Lora | None = None

    @property
    def freezes_by_epoch(self) -> bool:
        """Whether what trains changes during the run."""
        return isinstance(self.freeze, dict)


@dataclass(frozen=True)
class Optimizer:
    """`optimizer`: a Keras optimizer, and the learning rate that is computed for it.

    Attributes:
        target: the optimizer's class and its arguments other than the learning rate.
        learning_rate: the peak learning rate, before `scale`. Above 0. Default 0.001; options in conf/ set their own.
        schedule: the rate after the warm-up. `constant`; `cosine` falls to `final_rate` times the peak at the last
            update (Loshchilov and Hutter 2016); `step` multiplies by `step_factor` every `step_every` updates. Default
            `constant`.
        final_rate: cosine: the fraction of the peak that is left at the last update. 0 to 1. Default 0.
        step_every: step: the number of updates between two multiplications; required for `step`. At least 1. Default
            null.
        step_factor: step: the factor of each multiplication. Above 0, at most 1. Default 0.1.
        warmup_steps: the number of updates over which the rate rises linearly from 0. At least 0. Default 0.
        scale: `linear` multiplies the peak by global batch / `base_batch_size` (Goyal et al. 2017), `sqrt` by the
            square root of that. Default `none`.
        base_batch_size: the global batch, in examples, for which `learning_rate` is meant. At least 1. Default 256.
        rate_factors: pattern of layers, as in `model.freeze` -> the factor of their learning rate. Above 0. If several
            patterns match, the last one counts. Default null: 1 for all layers.
        ema: the momentum of an average of the weights: evaluations, the best checkpoint and the export use the
            averaged weights. Above 0, below 1. Default null: no average.
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
    rate_factors: dict[str, float] | None = field(default=None, metadata={"at_least": 0.0})
    ema: float | None = field(default=None, metadata={"above": 0.0, "below": 1.0})


#: The weights of one output's classes: `balanced`, or a weight for each class by name or number.
ClassWeight = Literal["balanced"] | dict[str, float]


@dataclass(frozen=True)
class ObjectiveOptions:
    """`objective`: the loss that is minimised, and the metrics that are reported.

    With several outputs `loss`, `metrics` and `class_weight` are mappings from outputs to what they have with one.

    Attributes:
        loss: a Keras loss, or a function or class of the user's with the same form; or a name, such as `focal`,
            `huber` or `mae`. Its `reduction` is scaleflow's. Default null: the loss of the kind of target.
        loss_weights: the factor of each output's loss in the sum that is minimised. At least 0. Default null: 1 each;
            also 1 for outputs that it leaves out.
        metrics: `keras.metrics.Metric` classes, or names such as `auc`, `f1` and `top5`, added to the metrics of the
            kind of target. Default null: none.
        class_weight: the factor of each class in the training loss, for `classification` and `binary`. At least 0.
            `balanced`: examples / (classes x examples of the class) in the training split. Reported losses do not have
            it. Default null: 1 each; also 1 for classes that it leaves out.
        label_smoothing: the share of each target that is spread evenly over all classes, in the loss of training and of
            evaluations. Not for `regression`. 0 to 1. Default 0.
    """

    loss: Target | str | dict[str, Target | str] | None = None
    loss_weights: dict[str, float] | None = field(default=None, metadata={"at_least": 0.0})
    metrics: list[Target | str] | dict[str, list[Target | str]] | None = None
    class_weight: ClassWeight | dict[str, ClassWeight] | None = field(default=None, metadata={"at_least": 0.0})
    label_smoothing: float = field(default=0.0, metadata={"at_least": 0.0, "at_most": 1.0})


@dataclass(frozen=True)
class EarlyStopping:
    """`training.early_stopping`: end the run when a value stops improving.

    Attributes:
        monitor: the watched value: `train/` or `val/` with `loss` or a metric's name, or with an output's name and its
            loss or metric (`val/age/mae`). Default `val/loss`.
        patience: the number of epochs without an improvement after which the run ends. At least 1. Default 3.
        mode: whether a smaller (`min`) or larger (`max`) value is better. Default `auto`: `max` for metrics such
            as accuracy, AUC and R2, `min` for losses and errors. It must be set for a metric of the user's own.
    """

    monitor: str = "val/loss"
    patience: int = field(default=3, metadata={"at_least": 1})
    mode: Literal["auto", "min", "max"] = "auto"


@dataclass(frozen=True)
class Training:
    """`training`: how long the run trains, and how its batches are divided. A step is one optimizer update.

    Attributes:
        epochs: the number of passes over the training split. At least 1. `by_size`: from the number of training
            examples (`training/sizes.py`). Default 20.
        batch_size: examples of one micro-batch on one replica; unused if `global_batch_size` is set. At least 1.
            `auto`: a search before the run finds it, and the run's own config has the number. `by_size`: the global
            batch follows from the number of training examples, rounded up to what replicas and `accumulate` can share.
            Default 32.
        global_batch_size: examples of one update, over all replicas. It must be divisible by replicas x
            `accumulate`. At least 1. Default null: replicas x `accumulate` x `batch_size`.
        accumulate: the number of micro-batches of one update on each replica. At least 1. Default 1.
        clip_norm: the global norm to which the gradient of the whole global batch is clipped. Above 0. Default null: no
            clipping.
        steps_per_epoch: the number of steps after which an epoch ends, at most those of the whole split. At least 1.
            Default null: the whole split.
        max_steps: the number of steps after which the run ends, if its epochs are not over before. At least 1. Default
            null: no limit.
        steps_per_loop: the number of steps of one call of the compiled loop. At least 1. Default `auto`: about half a
            second's worth; 1 for `fit`.
        engine: `loop` is scaleflow's own, on every strategy; `fit` is Keras's, for one device or mirrored. Default
            `loop`.
        step: a training step of the user's: a function `LossStep`, or a class `OwnUpdates`. Default null: the loss
            follows from `Outputs.kind`.
        early_stopping: end the run when a value stops improving. Default null: never.
        callbacks: Keras callbacks, for both engines. Default null: none.
        on_nan: what to do if the loss or the weights are not finite: `stop` ends the run as FAILED; `rollback` restores
            the newest checkpoint from before and lowers the learning rate. Default `stop`.
        nan_rate_factor: rollback: the factor of the learning rate at each rollback. Above 0, at most 0.99. Default 0.5.
        nan_rollbacks: rollback: the most rollbacks of a run. At least 1. Default 3.
    """

    epochs: int | Literal["by_size"] = field(default=20, metadata={"at_least": 1})
    batch_size: int | Literal["auto", "by_size"] = field(default=32, metadata={"at_least": 1})
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
