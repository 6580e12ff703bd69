"""What is typed in a case: drawn from a seed, each case by itself."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: The word for the folder of the small files that datasets read; the runner puts the folder there.
FILES = "<files>"

NUMBERS, SEQUENCE, IMAGES, WORDS, DICTS = "numbers", "sequence", "images", "words", "dicts"

#: Several inputs and outputs, one of them for each position, and weights.
DICT_WORDS = (
    *("dataset=npz", f"dataset.data_dir={FILES}/dicts.npz", "dataset.inputs=[row,series]", "dataset.weights=weight"),
    "dataset.targets=[kind,amount]",
)

#: Datasets: how often, what an example is, and the words.
DATASETS: Mapping[str, tuple[int, str, Sequence[str]]] = {
    "digits": (6, IMAGES, ("dataset=digits", "dataset.limit=42")),
    "images": (4, IMAGES, ("dataset=synthetic", "dataset.examples=50", "dataset.shape=[8,8,2]", "dataset.outputs=3")),
    "columns": (4, NUMBERS, ("dataset=synthetic", "dataset.examples=55", "dataset.shape=[6]", "dataset.outputs=3")),
    "series": (4, SEQUENCE, ("dataset=synthetic", "dataset.examples=50", "dataset.shape=[6,3]", "dataset.outputs=3")),
    "csv": (2, NUMBERS, ("dataset=csv", f"dataset.data_dir={FILES}/table.csv", "dataset.target=answer")),
    "npz": (2, SEQUENCE, ("dataset=npz", f"dataset.data_dir={FILES}/arrays.npz")),
    "texts": (3, WORDS, ("dataset=text_folder", f"dataset.data_dir={FILES}/texts", "dataset.tokens=6")),
    "pictures": (2, IMAGES, ("dataset=image_folder", f"dataset.data_dir={FILES}/pictures", "dataset.size=[8,8]")),
    "records": (1, IMAGES, ("dataset=tfrecord", f"dataset.data_dir={FILES}/records", "dataset.input=pixels",
                            "dataset.target=label", "dataset.classes=3",
                            "dataset.features={pixels: {kind: raw, shape: [8, 8, 1], dtype: uint8}, "
                            "label: {dtype: int64}}")),
}  # fmt: skip

#: Of what a zoo's model is made.
OF_NUMBERS = (
    "nested", "shared", "shared_nested", "branches", "regularized", "constrained", "active", "frozen", "frozen_norm",
    "noisy", "normed", "sync_normed", "layer_normed", "spectral", "unnamed_lambda", "subclassed", "subclassed_losing",
    "subclassed_random",
)  # fmt: skip
OF_SEQUENCES = (
    "lstm", "stacked_gru", "dropped_rnn", "rnn_cells", "masked", "per_step", "attention", "grouped_attention", "conv1d",
)  # fmt: skip
OF_IMAGES = (
    "separable", "transposed", "group_normed", "spatial_dropout", "distorting", "resized", "conv_lstm",
)  # fmt: skip
OF_WORDS = ("word_lstm", "word_bag", "word_convolution", "word_attention")

#: The zoo's models for what an example is.
ZOO: Mapping[str, Sequence[str]] = {
    NUMBERS: OF_NUMBERS,
    SEQUENCE: (*OF_SEQUENCES, *OF_SEQUENCES, *OF_NUMBERS),
    IMAGES: (*OF_IMAGES, *OF_IMAGES, *OF_NUMBERS, *OF_SEQUENCES),
    WORDS: OF_WORDS,
    DICTS: ("towers", "subclassed_towers"),
}

#: The models of the group `model` for what an example is; resnet takes long to trace.
MODELS: Mapping[str, Sequence[str]] = {
    NUMBERS: ("mlp", "linear"),
    SEQUENCE: ("mlp", "linear"),
    IMAGES: ("mlp", "mlp", "linear", "linear", "cnn", "cnn", "cnn", "resnet"),
    WORDS: ("text", "transformer"),
    DICTS: ("mlp", "linear", "cnn"),
}

#: The zoo's models whose result depends on random numbers that replicas draw, or on how a batch is divided.
RANDOM = ("noisy", "dropped_rnn", "spatial_dropout", "distorting", "subclassed_random")
DIVIDED = ("normed",)
SYNCHRONIZED = ("sync_normed", "spectral")

STRATEGIES = {
    "one_device": 24, "mirrored": 24, "multi_worker": 14, "parameter_server": 12, "pipeline": 16, "auto": 10,
}  # fmt: skip

#: Words that nothing works with, in any case; after all others.
WRONG = (
    "strategy=miror", "training.epochs=0", "training.batch_size=-4", "optimizer.learning_rate=fast",
    "model.nothing=1", "+nothing=1", "dataset.validation=1.5", "dataset.validation=nowhere", "optimizer.schedule=step",
    "training.callbacks=[{_target_: zoo.Nothing}]", "training.callbacks=[{_target_: zoo.own_loss}]",
    "training.step={_target_: zoo.nothing}", "training.early_stopping={monitor: val/nothing}",
    "checkpoint.best={monitor: val/nothing}", "hardware=tpu", "strategy=tpu", "cluster.workers=65",
    "optimizer._target_=keras.layers.Dense", "model._target_=zoo.head", "model._target_=nowhere.build",
    "dataset._target_=zoo.build", "hardware.memory_limit_mb=100", "training.clip_norm=0",
    "training.accumulate=1.5", "precision=half", "training.early_stopping={patience: 0}",
    "optimizer.warmup_steps=-1", "training.on_nan=ignore", "strategy.communication=nccl", "cluster=tf_config",
    "hardware.devices=[3]", "checkpoint.keep=0", "training.global_batch_size=1000000007", "dataset.limit=0",
    "resume=/nothing/there", "training.step={_target_: zoo.Stop}",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is typed, and what it is to be compared with.

    Attributes:
        number: with the seed it says all the rest.
        strategy: what is typed, and what it comes to.
        words: all, but for where the run is recorded.
        plain: the words of the same run on one device with nothing that is not to change its losses; None where
            nothing promises that, or it is the same.
        precision: the option.
        wrong: the word that nothing works with, if there is one.
        stop: how the run is interrupted in a second one: the signal's number; 0: not at all.
        is_recorded: whether there is a store.
        model: its name, for the table.
    """

    number: int
    strategy: str
    words: Sequence[str]
    plain: Sequence[str] | None
    precision: str
    wrong: str
    stop: int
    is_recorded: bool
    model: str

    @property
    def is_exact(self) -> bool:
        """Whether two runs of it are the same to the bit."""
        return "hardware.deterministic=true" in self.words and self.strategy != "parameter_server"

    def __str__(self) -> str:
        return f"{self.number}: {' '.join(quoted(word) for word in self.words)}"


def quoted(word: str) -> str:
    return f"'{word}'" if any(mark in word for mark in " {[") else word


@dataclass
class Drawing:
    """The words that were drawn so far, in the parts that a comparison takes apart.

    Attributes:
        common: what the run and its plain counterpart have in common.
        special: what is to change nothing.
        is_equal: whether that is promised.
    """

    draw: random.Random
    strategy: str
    common: list[str] = field(default_factory=list)
    special: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    is_equal: bool = True
    replicas: int = 1
    accumulate: int = 1
    precision: str = "float32"
    log_model: str = ""
    log_dataset: str = ""
    synchronized: bool = False
    debug: str = "none"
    validates: bool = True

    @property
    def can_fit(self) -> bool:
        """Whether Keras's fit takes what was drawn so far."""
        is_known = self.strategy in ("one_device", "mirrored", "auto") and self.accumulate == 1
        return is_known and not any(word.startswith("training.clip_norm") for word in self.common)

    @property
    def can_use_xla(self) -> bool:
        """Whether XLA takes what was drawn so far."""
        is_known = self.strategy not in ("parameter_server", "pipeline") and self.debug not in ("nan", "eager")
        return is_known and "hardware.deterministic=true" not in self.common

    def chance(self, probability: float) -> bool:
        return self.draw.random() < probability

    def maybe(self, probability: float, *words: str) -> None:
        """One of several words, sometimes."""
        if self.chance(probability):
            self.common.append(self.draw.choice(words))


def drawn(seed: int, number: int) -> Case:
    """The case of this number."""
    draw = random.Random(f"random/{seed}/{number}")
    made = Drawing(draw, draw.choices(list(STRATEGIES), list(STRATEGIES.values()))[0])
    for part in (
        draw_debug,
        draw_strategy,
        draw_data,
        draw_model,
        draw_precision,
        draw_optimizer,
        draw_portions,
        draw_length,
        draw_engine,
        draw_watching,
        draw_checkpoints,
        draw_answers,
    ):
        part(made)
    made.draw = random.Random(f"random/{seed}/{number}/objective")  # so that the other words stay as they were
    draw_objective(made)
    made.draw = draw
    recorded = made.chance(0.15)
    made.common += ["tracking.system_metrics=false"] if recorded else ["tracking=none"]
    if recorded:
        made.maybe(0.3, "tracking.tensorboard=true")
    wrong = draw.choice(WRONG) if made.chance(0.1) else ""
    stop = draw.choice([15, 15, 9]) if number % 2 else 0
    if stop:
        made.common.append(CALLBACKS.format("{_target_: zoo.Stop}"))
    elif made.chance(0.2):
        made.common.append(CALLBACKS.format(draw.choice(OTHER_CALLBACKS)))
    if made.debug == "inline" or made.strategy == "parameter_server":
        stop = min(stop, 15) and 15
    words = [*made.common, *made.special, *([wrong] if wrong else [])]
    plain = [*made.common, *made.plain] if made.is_equal and made.plain != made.special and not wrong else None
    return Case(number, made.strategy, words, plain, made.precision, wrong, stop, recorded, made.log_model)


CALLBACKS = "training.callbacks=[{}]"
OTHER_CALLBACKS = (
    "{_target_: zoo.Counting}",
    "{_target_: keras.callbacks.TerminateOnNaN}",
    "{_target_: keras.callbacks.ReduceLROnPlateau, monitor: loss, patience: 4}",
    "{_target_: keras.callbacks.EarlyStopping, monitor: loss, patience: 4}",
)


def draw_debug(made: Drawing) -> None:
    made.common += ["hardware=cpu", "hardware.intra_op_threads=1"]
    if made.chance(0.5):
        made.common.append("hardware.deterministic=true")
    if not made.chance(0.15):
        return
    choices = ["overfit", "fast", "nan", "placement", "inline"]
    if made.strategy in ("one_device", "pipeline") or made.chance(0.2):
        choices.append("eager")
    if made.strategy in ("multi_worker", "parameter_server") and made.chance(0.8):
        choices.remove("inline")
    made.debug = made.draw.choice(choices)
    made.common.append(f"debug={made.debug}")


def draw_strategy(made: Drawing) -> None:
    several = made.strategy in ("mirrored", "auto", "pipeline")
    count = made.draw.choice([2, 2, 2, 3]) if several else 1
    made.special.append(f"strategy={made.strategy}")
    made.plain.append("strategy=one_device")
    made.replicas = made.draw.choice([1, 1, 2]) if made.strategy == "pipeline" else count
    if count > 1:
        devices = count * made.replicas if made.strategy == "pipeline" else count
        made.special.append(f"hardware.logical_devices={devices}")
    if made.strategy in ("multi_worker", "parameter_server"):
        workers = made.draw.choice([2, 2, 2, 1])
        made.special.append(f"cluster.workers={workers}")
        made.replicas = workers if made.strategy == "multi_worker" else 1
    if made.strategy == "pipeline":
        made.special += [f"strategy.stages={count}", f"strategy.replicas={made.replicas}"]
        made.special.append(f"strategy.micro_batches={made.draw.choice([1, 2, 2, 4])}")
    if made.strategy == "parameter_server":
        made.is_equal = False
        if made.chance(0.4):
            made.special += ["strategy.partitioner.max_shards=2", "strategy.partitioner.min_shard_bytes=null"]


#: What `dataset.augment` may have for images.
AUGMENTATIONS = (
    *("flip: true, crop: 1", "mixup: 0.2", "cutmix: 1.0", "mixup: 0.2, cutmix: 1.0", "rotation: 15, zoom: 0.2"),
    *("translation: 0.1, contrast: 0.4", "randaugment: 9", "vertical_flip: true, resized_crop: 0.5, erase: 0.2"),
)


def draw_data(made: Drawing) -> None:
    name = made.draw.choices(list(DATASETS), [weight for weight, _, _ in DATASETS.values()])[0]
    _, made.log_dataset, words = DATASETS[name]
    if name == "npz" and made.chance(0.6):
        made.log_dataset, words = DICTS, DICT_WORDS
    made.common += words
    if words[0] == "dataset=synthetic":
        made.maybe(0.6, *(f"dataset.kind={kind}" for kind in ("binary", "multi_label", "regression", "regression")))
    made.maybe(0.4, "dataset.validation=0.2", "dataset.validation=null", "dataset.validation=test")
    made.validates = "dataset.validation=null" not in made.common
    made.maybe(0.2, "dataset.cache=none", "dataset.cache=memory", "dataset.cache=file")
    if made.log_dataset != WORDS:
        made.maybe(0.1, "dataset.normalise=true")
    if made.log_dataset == IMAGES:
        made.maybe(0.25, *(f"dataset.augment={{{each}}}" for each in AUGMENTATIONS))
    if made.log_dataset == WORDS:
        made.maybe(0.15, "dataset.augment={word_dropout: 0.1}")


def draw_model(made: Drawing) -> None:
    if made.chance(0.5):
        kind = made.draw.choice(ZOO[made.log_dataset])
        if made.strategy == "pipeline" and kind.startswith("subclassed") and made.chance(0.8):
            kind = "nested"
        made.log_model = f"zoo {kind}"
        made.common += ["model=zoo", f"model.kind={kind}"]
        made.is_equal &= kind not in (*RANDOM, *DIVIDED)
        made.synchronized = kind in SYNCHRONIZED
        return
    made.log_model = made.draw.choice(MODELS[made.log_dataset])
    made.common.append(f"model={made.log_model}")
    if made.log_model in ("mlp", "cnn"):
        made.common.append("model.units=8")
        if made.chance(0.2):
            made.common.append("model.batch_norm=true")
            made.synchronized = True
    if made.log_model == "cnn":
        made.common.append("model.filters=[4]")
    if made.log_model == "transformer":
        made.common += ["model.width=8", "model.heads=2", "model.blocks=1", "model.units=8"]
    made.synchronized |= made.log_model == "resnet"
    if made.log_model not in ("resnet", "linear") and made.chance(0.2):
        made.common.append("model.dropout=0.2")
        made.is_equal = False


def draw_precision(made: Drawing) -> None:
    if made.chance(0.3):
        made.precision = made.draw.choice(["mixed", "mixed_bfloat16", "mixed_float16"])
        if made.debug == "nan" and made.precision == "mixed_float16" and made.chance(0.8):
            made.precision = "mixed"
        made.common.append(f"precision={made.precision}")


OPTIMIZERS = ("lion", "rmsprop", "nadam", "lamb", "adagrad", "adafactor", "adamax", "adadelta", "ftrl", "muon")


def draw_optimizer(made: Drawing) -> None:
    name = made.draw.choice([*("adam", "adamw", "sgd") * 2, *OPTIMIZERS])
    made.common.append(f"optimizer={name}")
    if name == "lion":  # it steps by the sign of a gradient, and rounding changes the sign of one that should be 0
        made.is_equal = False
    made.maybe(0.2, "optimizer.learning_rate=0.01")
    made.maybe(0.4, *(f"optimizer.schedule={each}" for each in ("cosine", "linear", "polynomial", "one_cycle")))
    made.maybe(0.2, "optimizer.warmup_steps=2", "optimizer.warmup_steps=0.5")
    made.maybe(0.1, "optimizer.scale=linear", "optimizer.scale=sqrt")
    made.maybe(0.1, "optimizer.clip_value=0.01")
    if name in ("adamw", "muon"):
        made.maybe(0.3, "optimizer.no_decay=[bias]", "optimizer.no_decay=[bias, norm]")
    if name == "sgd":
        made.maybe(0.3, "optimizer.nesterov=true", "optimizer.momentum=0")


def draw_portions(made: Drawing) -> None:
    """How a global batch is made up; the plain run has the same one in one piece."""
    made.accumulate = made.draw.choice([1, 1, 1, 1, 2, 3])
    size = made.draw.choice([4, 4, 8] if made.replicas * made.accumulate < 4 else [2, 4])
    together = size * made.replicas * made.accumulate
    if made.accumulate > 1:
        made.special.append(f"training.accumulate={made.accumulate}")
    made.plain.append(f"training.global_batch_size={together}")
    made.special.append(f"training.global_batch_size={together}" if made.chance(0.3) else f"training.batch_size={size}")
    made.maybe(0.25, "training.clip_norm=0.5")
    if made.synchronized and (made.accumulate > 1 or made.strategy == "pipeline"):
        made.is_equal = False


def draw_length(made: Drawing) -> None:
    made.common.append(f"training.epochs={made.draw.choice([1, 2, 3])}")
    made.maybe(0.5, "training.steps_per_epoch=2")
    made.common.append(f"training.max_steps={made.draw.choice([3, 4, 5, 6])}")


def draw_engine(made: Drawing) -> None:
    made.plain.append("training.steps_per_loop=1")
    per_loop = made.draw.choice(["1", "1", "2", "3", "auto"])
    if made.chance(0.35 if made.can_fit else 0.02):
        made.special.append("training.engine=fit")
        per_loop = "auto" if made.strategy != "one_device" and made.chance(0.9) else per_loop
    elif made.chance(0.08 if made.can_use_xla else 0.01):
        made.special.append("hardware.xla=true")
    made.special.append(f"training.steps_per_loop={per_loop}")
    if made.chance(0.05):
        step = made.draw.choice(["{_target_: zoo.own_loss, shift: 0.5}", "{_target_: zoo.OwnUpdates}"])
        made.common.append(f"training.step={step}")


def draw_watching(made: Drawing) -> None:
    watched = ["train/loss", "val/loss"] if made.validates or made.chance(0.2) else ["train/loss"]
    keys = made.draw.choice(["patience: 1", "patience: 1, min_delta: 0.1", "threshold: 1.0", "restore_best: true"])
    made.maybe(0.15, *(f"training.early_stopping={{metric: {name}, {keys}}}" for name in watched))
    made.maybe(0.1, "training.on_nan=rollback")
    made.maybe(0.05, "training.max_seconds=1h")
    if made.validates:
        made.maybe(
            0.15, "training.validate_every=2", "training.validate_every=2 epochs", "training.validate_examples=3"
        )
    if made.chance(0.04):
        made.common += ["profiler=trace", "profiler.start_step=2", "profiler.steps=2", "tracking.flush_seconds=400"]


#: Words of the group `objective` for any kind of target (classes are refused quantiles), and for classes only.
OBJECTIVES = (
    "objective.metrics=[{_target_: keras.metrics.MeanSquaredError}]",
    "objective.metrics=[{_target_: zoo.Spread, name: spread}]",
    "objective.loss={_target_: keras.losses.LogCosh}",
    "objective=quantiles",
)
OF_CLASSES = (
    "objective.class_weight=balanced",
    "objective.class_weight={0: 2.0}",
    "dataset.balance=oversample",
    "dataset.balance=undersample",
    "dataset.balance={0: 0.3}",
    "objective.label_smoothing=0.1",
    "objective.loss={_target_: keras.losses.CategoricalCrossentropy}",
    "objective.metrics=[{_target_: keras.metrics.AUC}, {_target_: keras.metrics.F1Score}]",
    "objective.metrics=[{_target_: keras.metrics.MeanIoU}]",
)


def draw_objective(made: Drawing) -> None:
    has_classes = made.common.count("dataset=digits") or made.log_dataset == WORDS
    words = OBJECTIVES + (OF_CLASSES if has_classes else ())
    if any(word.startswith("training.step=") for word in made.common):  # whose loss has no weights of classes
        words = tuple(word for word in words if "class_weight" not in word and "balance" not in word)
    made.maybe(0.15, *words)


def draw_checkpoints(made: Drawing) -> None:
    if made.chance(0.02 if "training.on_nan=rollback" in made.common else 0.1):
        made.common.append("checkpoint=none")
        return
    made.maybe(0.3, "checkpoint.every_steps=1", "checkpoint.every_steps=2")
    made.maybe(0.15, "checkpoint.keep=1")
    watched = ["checkpoint.best={monitor: train/loss}"]
    if made.validates or made.chance(0.2):
        watched += ["checkpoint.best={monitor: val/loss}", "checkpoint.export=best"]
    made.maybe(0.2, *watched)


#: Keys of the group `evaluation` that the validation rows decide. Some targets have no such answers: refused in words.
ANSWERS = (
    *("evaluation.calibrate=auto", "evaluation.sets=0.5", "evaluation.interval=0.5", "evaluation.threshold=auto"),
    "evaluation.metrics=[sklearn.metrics.mean_squared_error]",
)


def draw_answers(made: Drawing) -> None:
    if made.validates:
        made.maybe(0.12, *ANSWERS)
