"""The rules about debugging, profiling, training and data."""

import itertools
import re
from collections.abc import Sequence

from scaleflow.cluster.engines import find_engine
from scaleflow.cluster.tasks import process_names
from scaleflow.config.optimizer_rules import validates
from scaleflow.interfaces import Best, Plan, Rule, Strategy

#: The class of `dataset=table` and `dataset=csv`.
TABLE = "scaleflow.dataset.table.Table"

#: Keys of `strategy` that only one option has.
FOR_PIPELINE = ("stages", "replicas", "micro_batches", "cuts")


def has_invalid_fraction(plan: Plan) -> bool:
    validation = plan.dataset.validation
    return isinstance(validation, float) and not 0 <= validation < 1


def has_unfit_levels(levels: list[float]) -> bool:
    is_ascending = all(low < high for low, high in itertools.pairwise([0.0, *levels, 1.0]))
    return len(levels) < 2 or 0.5 not in levels or not is_ascending


#: The datasets of scaleflow whose rows have columns or paths.
WITH_COLUMNS = (
    TABLE,
    *(f"scaleflow.dataset.{each}" for each in ("npz.Npz", "huggingface.HuggingFace", "tfrecord.TFRecord")),
)
FOLDERS = tuple(
    f"scaleflow.dataset.{each}"
    for each in ("image_folder.ImageFolder", "text_folder.TextFolder", "segmentation_folder.SegmentationFolder")
)


def is_fold(fold: tuple[int, int] | None) -> bool:
    return fold is not None and 0 <= fold[0] < fold[1] and fold[1] > 1


def has_split_without_columns(plan: Plan) -> bool:
    path, split = plan.dataset.target.path, plan.dataset.split
    is_by_column = split.by in ("group", "time", "column", "hash") or split.column or split.stratum
    return bool(is_by_column) and path.startswith("scaleflow.") and path not in (*WITH_COLUMNS, *FOLDERS)


def has_split_without_column(plan: Plan) -> bool:
    path, split = plan.dataset.target.path, plan.dataset.split
    return (
        split.by in ("group", "time", "column", "hash")
        and path in (*WITH_COLUMNS, *FOLDERS)
        and split.column is None
        and split.pattern is None
    )


def has_useless_split_key(plan: Plan) -> bool:
    split = plan.dataset.split
    return (
        (split.by in ("auto", "random") and (split.column or split.stratum or split.pattern) is not None)
        or (split.by != "time" and split.gap is not None)
        or (split.by != "group" and split.stratum is not None)
        or (split.column is not None and split.pattern is not None)
    )


def has_split_by_target(plan: Plan) -> bool:
    given, split = plan.dataset.target.arguments, plan.dataset.split
    targets = given.get("target", given.get("targets"))
    is_named = split.column is not None and split.column in (targets if isinstance(targets, list) else [targets])
    return split.by in ("group", "hash", "column") and is_named


def has_monitor_without_validation(plan: Plan) -> bool:
    stopping = plan.training.early_stopping
    return stopping is not None and stopping.monitor.startswith("val/") and not validates(plan)


def restores_best(plan: Plan) -> bool:
    return plan.training.early_stopping is not None and plan.training.early_stopping.restore_best


def has_other_best(plan: Plan) -> bool:
    stopping, best = plan.training.early_stopping, plan.checkpoint.best
    if stopping is None or best is None:
        return False
    monitors = {each.monitor.replace("auto", Best.monitor) for each in (best, stopping)}
    return len(monitors) > 1 or plan.checkpoint.export != "best"


def is_fit_mirrored(plan: Plan) -> bool:
    return plan.training.engine == "fit" and plan.strategy.name == "mirrored"


def has_windows_after_the_end(plan: Plan) -> bool:
    longest = plan.training.max_steps
    return longest is not None and any(last > longest for _, last in plan.profiler.windows)


def has_windows_that_overlap(plan: Plan) -> bool:
    windows = plan.profiler.windows
    return any(following <= last for (_, last), (following, _) in itertools.pairwise(windows))


TRAINING_RULES: Sequence[Rule] = (
    Rule(
        ("debug.inline", "strategy"),
        lambda p: p.debug.inline and len(process_names(p)) > 1,
        "each worker needs its own process",
        instead="use strategy=one_device or mirrored, or cluster.workers=1",
    ),
    Rule(
        ("debug.eager", "hardware.xla"),
        lambda p: p.debug.eager and p.hardware.xla is True,
        "XLA compiles, and debug.eager turns compilation off",
        instead="set one of the two to false",
    ),
    Rule(
        ("debug.eager", "strategy"),
        lambda p: p.debug.eager and p.strategy.name in ("mirrored", "multi_worker"),
        "without compilation, replicas start their collective operations in different orders, and TensorFlow "
        "aborts (measured)",
        instead="use strategy=one_device or pipeline",
    ),
    Rule(
        ("debug.eager", "strategy"),
        lambda p: p.debug.eager and p.strategy.name in ("parameter_server", "tpu"),
        "only compiled functions run on other machines or on a TPU",
        instead="use strategy=one_device",
    ),
    Rule(
        ("debug.nan", "hardware.xla"),
        lambda p: p.debug.nan and p.hardware.xla is True,
        "XLA cannot compile the check of each operation",
        instead="set one of the two to false",
    ),
    Rule(
        ("debug.nan", "hardware.deterministic"),
        lambda p: p.debug.nan and p.hardware.deterministic,
        "TensorFlow's deterministic cross-entropy contains a NaN constant, which the check would report at step 1",
        instead="set one of the two to false",
    ),
    Rule(
        ("debug.nan", "dataset._target_"),
        lambda p: p.debug.nan and p.dataset.target.path == TABLE,
        "the preprocessing of a table marks missing values with NaN, which the check would report before step 1",
        instead="remove debug=nan; a run always reports the first step whose loss is not finite",
    ),
    Rule(
        ("debug.nan", "strategy"),
        lambda p: p.debug.nan and p.strategy.name == "tpu",
        "a TPU cannot run the check of each operation",
        instead="use strategy=one_device or mirrored",
    ),
    Rule(
        ("debug.nan", "precision"),
        lambda p: p.debug.nan and p.precision.name == "mixed_float16",
        "dynamic loss scaling makes some gradients Inf on purpose, which is not an error",
        instead="use precision=float32 or mixed_bfloat16",
    ),
    Rule(
        ("profiler", "debug.fast"),
        lambda p: p.profiler.name == "trace" and p.debug.fast,
        "debug.fast runs a single step, whose time is mostly compilation",
        instead="use profiler=none, or training.max_steps=100 instead of debug=fast",
    ),
    Rule(
        ("profiler.start_step", "profiler.steps", "training.max_steps"),
        has_windows_after_the_end,
        "the run ends before the last step to trace",
        instead="start earlier, trace fewer steps, or train longer",
    ),
    Rule(
        ("profiler.start_step",),
        lambda p: p.profiler.name == "trace" and not p.profiler.windows,
        "the list is empty, so there is no step to start at",
        instead="set profiler.start_step=50",
    ),
    Rule(
        ("profiler.start_step", "profiler.steps"),
        has_windows_that_overlap,
        "a window starts before the previous one ends",
        instead="use starts that are further apart, or fewer steps",
    ),
    Rule(
        ("profiler", "debug.eager"),
        lambda p: p.profiler.name == "trace" and p.debug.eager,
        "the trace would show Python's time, not that of a compiled run",
        instead="use only one of the two",
    ),
    Rule(
        ("profiler", "training.engine", "training.steps_per_loop"),
        lambda p: (
            p.profiler.name == "trace" and p.training.engine == "fit" and p.training.steps_per_loop not in ("auto", 1)
        ),
        "Keras's fit cannot run the traced steps one by one",
        instead="use training.steps_per_loop=1, or training.engine=loop",
    ),
    Rule(
        ("dataset.augment.rotation",),
        lambda p: p.dataset.augment is not None and 0 < p.dataset.augment.rotation < 1,
        "it is in degrees, so images hardly turn; Keras's RandomRotation takes parts of a full turn, of which 0.1 are "
        "36 degrees",
        instead="use for example dataset.augment.rotation=15",
        verdict="warning",
    ),
    Rule(
        ("profiler", "strategy"),
        lambda p: p.profiler.name == "trace" and p.strategy.name == "tpu",
        "this has not been tried on a TPU, and the trace of a TPU on the network contains only the host's part",
        instead="check the trace before you trust its summary",
        verdict="warning",
    ),
    Rule(
        ("cluster", "strategy"),
        lambda p: p.strategy.name == "pipeline" and not find_engine(p.cluster).is_local,
        "all stages and replicas of a pipeline are on the devices of one process",
        instead="use cluster=local",
    ),
    Rule(
        ("strategy.stages", "strategy.replicas", "hardware.logical_devices"),
        lambda p: (
            p.strategy.name == "pipeline"
            and p.hardware.name == "cpu"
            and p.hardware.logical_devices != p.strategy.stages * p.strategy.replicas
        ),
        "a pipeline needs exactly one device for each stage of each replica",
        instead="set hardware.logical_devices to strategy.stages x strategy.replicas",
    ),
    Rule(
        ("strategy.cuts", "strategy.stages"),
        lambda p: (
            p.strategy.name == "pipeline"
            and p.strategy.cuts is not None
            and len(p.strategy.cuts) != p.strategy.stages - 1
        ),
        "the list must name the first layer of every stage except the first stage",
        instead="give one name fewer than there are stages, or null",
    ),
    Rule(
        ("strategy.stages", "strategy.replicas", "strategy.micro_batches", "strategy.cuts", "strategy"),
        lambda p: (
            not p.strategy.is_pipeline and any(getattr(p.strategy, k) != getattr(Strategy, k) for k in FOR_PIPELINE)
        ),
        "this strategy does not divide the model",
        instead="use strategy=pipeline, or leave them at their defaults",
    ),
    Rule(
        ("hardware.xla", "strategy"),
        lambda p: p.hardware.xla is True and p.strategy.name == "pipeline",
        "XLA compiles a program for one device, and a pipeline uses several",
        instead="use hardware.xla=false, or another strategy",
    ),
    Rule(
        ("hardware.xla", "strategy"),
        lambda p: p.hardware.xla is True and p.strategy.name == "parameter_server",
        "an XLA program cannot read variables on another machine",
        instead="use hardware.xla=false, or another strategy",
    ),
    Rule(
        ("training.engine", "strategy"),
        lambda p: p.training.engine == "fit" and p.strategy.name not in ("auto", "one_device", "mirrored"),
        "Keras 3's fit works only with strategy=one_device and mirrored",
        instead="use training.engine=loop",
    ),
    Rule(
        ("training.engine", "training.step._target_"),
        lambda p: p.training.engine == "fit" and p.training.step is not None,
        "Keras's fit runs its own training step",
        instead="use training.engine=loop",
    ),
    Rule(
        ("training.engine", "training.accumulate"),
        lambda p: p.training.engine == "fit" and p.training.accumulate > 1,
        "Keras's gradient accumulation fails under a strategy",
        instead="use training.engine=loop",
    ),
    Rule(
        ("training.engine", "training.clip_norm"),
        lambda p: p.training.engine == "fit" and p.training.clip_norm is not None,
        "Keras clips the gradient of each replica before they are summed",
        instead="use training.engine=loop",
    ),
    Rule(
        ("training.engine", "hardware.xla"),
        lambda p: p.training.engine == "fit" and p.hardware.xla is True,
        "XLA is supported only in scaleflow's own loop",
        instead="use training.engine=loop, or hardware.xla=false",
    ),
    Rule(
        ("training.engine", "precision", "strategy"),
        lambda p: is_fit_mirrored(p) and p.precision.name == "mixed_float16",
        "Keras checks only the first replica's gradients for overflow",
        instead="use training.engine=loop",
    ),
    Rule(
        ("training.steps_per_loop", "training.engine", "strategy"),
        lambda p: is_fit_mirrored(p) and p.training.steps_per_loop not in ("auto", 1),
        "Keras's steps_per_execution fails under this strategy",
        instead="use auto, or training.engine=loop",
    ),
    Rule(
        ("training.on_nan", "training.engine"),
        lambda p: p.training.on_nan == "rollback" and p.training.engine == "fit",
        "Keras's fit cannot go back to an earlier step",
        instead="use training.engine=loop",
    ),
    Rule(
        ("training.on_nan", "checkpoint"),
        lambda p: p.training.on_nan == "rollback" and p.checkpoint.name == "none",
        "no checkpoints are saved to go back to",
        instead="use checkpoint=default",
    ),
    Rule(
        ("debug.nan", "training.on_nan"),
        lambda p: p.debug.nan and p.training.on_nan == "rollback",
        "debug.nan ends the run at the first NaN, and a rollback continues it",
        instead="use only one of the two",
    ),
    Rule(
        ("objective.levels",),
        lambda p: has_unfit_levels([0.1, 0.5] if p.objective.levels is None else p.objective.levels),
        "these are two or more, above 0 and below 1, ascending, none twice, and one is 0.5, the prediction",
        instead="give such as [0.1, 0.5, 0.9], or for the median alone objective.loss=mae",
    ),
    *(
        Rule(
            ("objective.levels", key),
            lambda p, is_set=is_set: p.objective.levels is not None and is_set(p),  # type: ignore[misc]
            why,
            instead="leave one of the two null",
        )
        for key, is_set, why in (
            (
                "objective.loss",
                lambda p: p.objective.loss is not None,
                "quantiles have a loss of their own, the pinball loss",
            ),
            (
                "evaluation.interval",
                lambda p: p.evaluation.interval is not None,
                "quantiles are the ends of intervals already",
            ),
            (
                "training.step._target_",
                lambda p: p.training.step is not None,
                "a custom step computes the training loss itself",
            ),
        )
    ),
    Rule(
        ("objective.class_weight", "training.step._target_"),
        lambda p: p.objective.class_weight is not None and p.training.step is not None,
        "a custom step computes the training loss itself",
        instead="apply the class weights in the step, and leave objective.class_weight null",
    ),
    Rule(
        ("training.step._target_", "strategy"),
        lambda p: p.training.step is not None and p.strategy.name == "pipeline",
        "a custom step calls the whole model, and a pipeline divides it into stages",
        instead="use another strategy",
    ),
    Rule(
        ("strategy.communication", "hardware"),
        lambda p: p.strategy.communication == "nccl" and p.hardware.name == "cpu",
        "NCCL works only between GPUs",
        instead="use ring, or auto",
    ),
    Rule(
        ("precision", "hardware"),
        lambda p: p.precision.name == "mixed_float16" and p.hardware.name == "cpu",
        "results are correct, but float16 is slow on a CPU",
        instead="precision=mixed selects bfloat16",
        verdict="warning",
    ),
    Rule(
        ("training.validate_every",),
        lambda p: isinstance(p.training.validate_every, str) and not p.training.validate_epochs,
        "this is no number of updates or of epochs",
        instead="write 500 for updates, or '2 epochs'",
    ),
    Rule(
        ("training.validate_every", "training.engine"),
        lambda p: isinstance(p.training.validate_every, int) and p.training.engine == "fit",
        "Keras's fit validates at the end of an epoch",
        instead="write '2 epochs', or use training.engine=loop",
    ),
    Rule(
        ("training.validate_every", "training.validate_examples", "dataset.validation"),
        lambda p: bool(p.training.validate_every or p.training.validate_examples) and not validates(p),
        "there is no validation split",
        instead="set dataset.validation=0.1, or leave them out",
    ),
    Rule(
        ("training.early_stopping.restore_best", "checkpoint"),
        lambda p: restores_best(p) and p.checkpoint.name == "none",
        "no checkpoint keeps the best model",
        instead="use checkpoint=default",
    ),
    Rule(
        ("training.early_stopping.restore_best", "checkpoint.best.monitor", "checkpoint.export"),
        lambda p: restores_best(p) and has_other_best(p),
        "two values would decide which model is exported",
        instead="leave checkpoint.best out, or give it the monitor of training.early_stopping and "
        "checkpoint.export=best",
    ),
    Rule(
        ("model.init_from_preprocessing", "model.init_from"),
        lambda p: p.model.init_from is None and p.model.init_from_preprocessing != "extend",
        "there is no earlier run whose preprocessing could be taken",
        instead="set model.init_from, or leave model.init_from_preprocessing out",
    ),
    Rule(
        ("model.freeze",),
        lambda p: isinstance(p.model.freeze, dict) and min(p.model.freeze, default=None) != 0,
        "the first epoch is 0",
        instead="begin with it: {0: [PATTERN], 3: []}; an empty list freezes nothing",
    ),
    Rule(
        ("model.freeze", "strategy"),
        lambda p: p.model.freezes_by_epoch and (p.strategy.has_coordinator or p.strategy.is_pipeline),
        "what trains is fixed there when the run begins",
        instead="use strategy=one_device, mirrored or multi_worker, or two runs, the second with model.init_from",
    ),
    Rule(
        ("model.lora.layers",),
        lambda p: p.model.lora is not None and not p.model.lora.layers,
        "it names no layers",
        instead="name the layers: model.lora.layers=[dense*]",
    ),
    Rule(
        ("dataset.balance",),
        lambda p: isinstance(p.dataset.balance, dict) and sum(p.dataset.balance.values()) > 1 + 1e-9,
        "the shares sum to more than 1",
        instead="give some classes their share of the examples: {positive: 0.3}; the others divide the rest",
    ),
    Rule(
        ("dataset.balance", "objective.class_weight"),
        lambda p: p.dataset.balance is not None and p.objective.class_weight is not None,
        "rare classes would count twice",
        instead="use only one of the two",
    ),
    Rule(
        ("dataset.balance", "dataset.prior_correction", "training.step._target_"),
        lambda p: p.dataset.balance is not None and p.dataset.prior_correction and p.training.step is not None,
        "a custom step computes its loss from outputs that are corrected already",
        instead="use dataset.prior_correction=false",
    ),
    Rule(
        ("dataset.prior_correction", "dataset.balance"),
        lambda p: p.dataset.balance is None and not p.dataset.prior_correction,
        "examples are drawn as they are, so that there is nothing to correct",
        instead="leave dataset.prior_correction out",
    ),
    Rule(
        ("dataset.balance", "debug.overfit"),
        lambda p: p.dataset.balance is not None and p.debug.overfit,
        "debug.overfit trains on the first batch only",
        instead="use only one of the two",
    ),
    Rule(
        ("dataset.validation",),
        has_invalid_fraction,
        "this is not a fraction of the training split",
        instead="give a fraction from 0 to less than 1, the name of a split, or null",
    ),
    Rule(
        ("dataset.fold",),
        lambda p: p.dataset.fold is not None and not is_fold(p.dataset.held_out_fold),
        "this is no fold",
        instead="write 2/5 for the second of five",
    ),
    Rule(
        ("dataset.fold", "model.init_from"),
        lambda p: p.dataset.fold is not None and not (p.model.init_from or ".h5").endswith((".keras", ".h5")),
        "its run may have trained on the rows of the fold",
        instead="use the weights of a file, or train without model.init_from",
    ),
    Rule(
        ("dataset.split.by", "dataset._target_"),
        has_split_without_columns,
        "this dataset has no columns",
        instead="use dataset.split=random or stratum, or a dataset of a table, arrays, records or files",
    ),
    Rule(
        ("dataset.split.by", "dataset.split.column"),
        has_split_without_column,
        "no column is named",
        instead="name one: 'dataset.split={by: group, column: customer}'; of files also pattern",
    ),
    Rule(
        ("dataset.split.by",),
        has_useless_split_key,
        "it does not use one of the other keys that are given",
        instead="give column or pattern with stratum, group, time, column or hash, stratum with group, gap with time",
    ),
    Rule(
        ("dataset.split.by", "dataset.split.column"),
        has_split_by_target,
        "the column is the target",
        instead="name another column, or use dataset.split=stratum, which gives each split its share of the target",
    ),
    Rule(
        ("dataset.split.pattern", "dataset._target_"),
        lambda p: p.dataset.split.pattern is not None and p.dataset.target.path not in FOLDERS,
        "only files of a folder have paths",
        instead="name a column with dataset.split.column",
    ),
    Rule(
        ("dataset.shards", "dataset._target_"),
        # Of a class of the user's, the worker finds out what it is.
        lambda p: (
            p.dataset.shards > 1 and p.dataset.target.path.startswith("scaleflow.") and p.dataset.target.path != TABLE
        ),
        "only tables that are read while training can be divided by their files",
        instead="use dataset=table, or leave dataset.shards 1",
    ),
    Rule(
        ("dataset.shards", "dataset.cache"),
        lambda p: p.dataset.shards > 1 and p.dataset.cache in ("memory", "file"),
        "every worker would read all rows once, to keep them",
        instead="use dataset.cache=none, or leave dataset.shards 1",
    ),
    Rule(
        ("training.early_stopping.monitor", "dataset.validation"),
        has_monitor_without_validation,
        "there is no validation split",
        instead="set dataset.validation=0.1, or monitor train/loss",
    ),
    Rule(
        ("tracking.notify",),
        lambda p: p.tracking.notify is not None and not re.match(r"(slack:)?https?://[^/]", p.tracking.notify),
        "it is no address of the web",
        instead="type https://HOST/PATH, or slack:https://hooks.slack.com/... for Slack",
    ),
    Rule(
        ("promotion", "tracking"),
        lambda p: p.promotion.name == "champion" and p.tracking.name == "none",
        "there is no store with registered models",
        instead="use tracking=mlflow, or promotion=none",
    ),
    Rule(
        ("promotion.model", "tracking.register_as", "tracking.alias"),
        lambda p: (
            p.promotion.name == "champion"
            and p.tracking.register_as == p.promotion.model
            and p.tracking.alias in ("champion", "challenger")
        ),
        "the run would move the alias before the promotion decides",
        instead="leave tracking.alias out",
    ),
)
