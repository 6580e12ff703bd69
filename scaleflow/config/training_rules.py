"""The rules about debugging, profiling, training and data."""

import itertools
from collections.abc import Sequence

from scaleflow.cluster.tasks import process_names
from scaleflow.config.device_rules import runs_elsewhere
from scaleflow.interfaces import Best, Plan, Rule, Strategy

#: The class of `dataset=table` and `dataset=csv`.
TABLE = "scaleflow.dataset.table.Table"

#: Keys of `strategy` that only `strategy=pipeline` has.
FOR_PIPELINE = ("stages", "replicas", "micro_batches", "cuts")


def has_pipeline_keys(plan: Plan) -> bool:
    return any(getattr(plan.strategy, key) != getattr(Strategy, key) for key in FOR_PIPELINE)


def has_invalid_fraction(plan: Plan) -> bool:
    validation = plan.dataset.validation
    return isinstance(validation, float) and not 0 <= validation < 1


def has_unfit_levels(plan: Plan) -> bool:
    levels = plan.objective.levels or []
    is_ascending = all(low < high for low, high in itertools.pairwise([0.0, *levels, 1.0]))
    return len(levels) < 2 or 0.5 not in levels or not is_ascending


#: scaleflow's datasets whose rows have columns or paths.
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
    path = plan.dataset.target.path
    split = plan.dataset.split
    is_by_column = split.by in ("group", "time", "column", "hash") or split.column or split.stratum
    return bool(is_by_column) and path.startswith("scaleflow.") and path not in (*WITH_COLUMNS, *FOLDERS)


def has_useless_split_key(plan: Plan) -> bool:
    split = plan.dataset.split
    return (
        (split.by in ("auto", "random") and (split.column or split.stratum or split.pattern) is not None)
        or (split.by != "time" and split.gap is not None)
        or (split.by != "group" and split.stratum is not None)
        or (split.column is not None and split.pattern is not None)
    )


def has_split_by_target(plan: Plan) -> bool:
    given = plan.dataset.target.arguments
    targets = given.get("target", given.get("targets"))
    return plan.dataset.split.column in (targets if isinstance(targets, list) else [targets])


def is_stopped_by_validation(plan: Plan) -> bool:
    """Whether a metric of the validation split can end the run early."""
    stopping = plan.training.early_stopping
    return stopping is not None and stopping.monitor.startswith("val/")


def has_other_best(plan: Plan) -> bool:
    stopping = plan.training.early_stopping
    best = plan.checkpoint.best
    if stopping is None or best is None:
        return False
    monitors = {each.monitor.replace("auto", Best.monitor) for each in (best, stopping)}
    return len(monitors) > 1 or plan.checkpoint.export != "best"


def has_windows_after_the_end(plan: Plan) -> bool:
    longest = plan.training.max_steps
    return longest is not None and any(last > longest for _, last in plan.profiler.windows)


def has_windows_that_overlap(plan: Plan) -> bool:
    windows = plan.profiler.windows
    return any(following <= last for (_, last), (following, _) in itertools.pairwise(windows))


TRAINING_RULES: Sequence[Rule] = (
    Rule(
        "debug.inline",
        "each worker needs its own process",
        "use strategy=one_device or mirrored, or cluster.workers=1",
        keys=("debug.inline", "strategy"),
        only_if=lambda p: len(process_names(p)) > 1,
    ),
    Rule(
        "debug.eager & hardware.xla=true",
        "XLA compiles, and debug.eager turns compilation off",
        "set one of the two to false",
    ),
    Rule(
        "debug.eager & strategy in mirrored|multi_worker",
        "without compilation, replicas start their collective operations in different orders, and TensorFlow "
        "aborts (measured)",
        "use strategy=one_device or pipeline",
    ),
    Rule(
        "debug.eager & strategy in parameter_server|tpu",
        "only compiled functions run on other machines or on a TPU",
        "use strategy=one_device",
    ),
    Rule(
        "debug.nan & hardware.xla=true",
        "XLA cannot compile the check of each operation",
        "set one of the two to false",
    ),
    Rule(
        "debug.nan & hardware.deterministic",
        "TensorFlow's deterministic cross-entropy contains a NaN constant, which the check would report at step 1",
        "set one of the two to false",
    ),
    Rule(
        f"debug.nan & dataset._target_={TABLE}",
        "the preprocessing of a table marks missing values with NaN, which the check would report before step 1",
        "remove debug=nan; a run always reports the first step whose loss is not finite",
    ),
    Rule(
        "debug.nan & strategy=tpu",
        "a TPU cannot run the check of each operation",
        "use strategy=one_device or mirrored",
    ),
    Rule(
        "debug.nan & precision=mixed_float16",
        "dynamic loss scaling makes some gradients Inf on purpose, which is not an error",
        "use precision=float32 or mixed_bfloat16",
    ),
    Rule(
        "profiler=trace & debug.fast",
        "debug.fast runs a single step, whose time is mostly compilation",
        "use profiler=none, or training.max_steps=100 instead of debug=fast",
    ),
    Rule(
        "profiler=trace & training.max_steps!=null",
        "the run ends before the last step to trace",
        "start earlier, trace fewer steps, or train longer",
        keys=("profiler.start_step", "profiler.steps", "training.max_steps"),
        only_if=has_windows_after_the_end,
    ),
    Rule(
        "profiler=trace & profiler.start_step=[]",
        "the list is empty, so there is no step to start at",
        "set profiler.start_step=50",
        keys=("profiler.start_step",),
    ),
    Rule(
        "profiler=trace",
        "a window starts before the previous one ends",
        "use starts that are further apart, or fewer steps",
        keys=("profiler.start_step", "profiler.steps"),
        only_if=has_windows_that_overlap,
    ),
    Rule(
        "profiler=trace & debug.eager",
        "the trace would show Python's time, not that of a compiled run",
        "use only one of the two",
    ),
    Rule(
        "profiler=trace & training.engine=fit & training.steps_per_loop>1",
        "Keras's fit cannot run the traced steps one by one",
        "use training.steps_per_loop=1, or training.engine=loop",
    ),
    Rule(
        "profiler=trace & strategy=tpu",
        "this has not been tried on a TPU, and the trace of a TPU on the network contains only the host's part",
        "check the trace before you trust its summary",
        "warning",
    ),
    Rule(
        "strategy=pipeline",
        "all stages and replicas of a pipeline are on the devices of one process",
        "use cluster=local",
        keys=("cluster", "strategy"),
        only_if=runs_elsewhere,
    ),
    Rule(
        "strategy=pipeline & hardware=cpu",
        "a pipeline needs exactly one device for each stage of each replica",
        "set hardware.logical_devices to strategy.stages x strategy.replicas",
        keys=("strategy.stages", "strategy.replicas", "hardware.logical_devices"),
        only_if=lambda p: p.hardware.logical_devices != p.strategy.stages * p.strategy.replicas,
    ),
    Rule(
        "strategy.cuts!=null & strategy=pipeline",
        "the list must name the first layer of every stage except the first stage",
        "give one name fewer than there are stages, or null",
        keys=("strategy.cuts", "strategy.stages"),
        only_if=lambda p: len(p.strategy.cuts or ()) != p.strategy.stages - 1,
    ),
    Rule(
        "strategy!=pipeline",
        "this strategy does not divide the model",
        "use strategy=pipeline, or leave them at their defaults",
        keys=("strategy.stages", "strategy.replicas", "strategy.micro_batches", "strategy.cuts", "strategy"),
        only_if=has_pipeline_keys,
    ),
    Rule(
        "hardware.xla=true & strategy=pipeline",
        "XLA compiles a program for one device, and a pipeline uses several",
        "use hardware.xla=false, or another strategy",
    ),
    Rule(
        "hardware.xla=true & strategy=parameter_server",
        "an XLA program cannot read variables on another machine",
        "use hardware.xla=false, or another strategy",
    ),
    Rule(
        "training.engine=fit & strategy not in auto|one_device|mirrored",
        "Keras 3's fit works only with strategy=one_device and mirrored",
        "use training.engine=loop",
    ),
    Rule(
        "training.engine=fit & training.step._target_!=null",
        "Keras's fit runs its own training step",
        "use training.engine=loop",
    ),
    Rule(
        "training.engine=fit & training.accumulate>1",
        "Keras's gradient accumulation fails under a strategy",
        "use training.engine=loop",
    ),
    Rule(
        "training.engine=fit & training.clip_norm!=null",
        "Keras clips the gradient of each replica before they are summed",
        "use training.engine=loop",
    ),
    Rule(
        "training.engine=fit & hardware.xla=true",
        "XLA is supported only in scaleflow's own loop",
        "use training.engine=loop, or hardware.xla=false",
    ),
    Rule(
        "training.engine=fit & precision=mixed_float16 & strategy=mirrored",
        "Keras checks only the first replica's gradients for overflow",
        "use training.engine=loop",
    ),
    Rule(
        "training.steps_per_loop>1 & training.engine=fit & strategy=mirrored",
        "Keras's steps_per_execution fails under this strategy",
        "use auto, or training.engine=loop",
    ),
    Rule(
        "training.on_nan=rollback & training.engine=fit",
        "Keras's fit cannot go back to an earlier step",
        "use training.engine=loop",
    ),
    Rule(
        "training.on_nan=rollback & checkpoint=none",
        "no checkpoints are saved to go back to",
        "use checkpoint=default",
    ),
    Rule(
        "debug.nan & training.on_nan=rollback",
        "debug.nan ends the run at the first NaN, and a rollback continues it",
        "use only one of the two",
    ),
    Rule(
        "objective.levels!=null",
        "these are two or more, above 0 and below 1, ascending, none twice, and one is 0.5, the prediction",
        "give such as [0.1, 0.5, 0.9], or for the median alone objective.loss=mae",
        only_if=has_unfit_levels,
    ),
    Rule(
        "objective.levels!=null & objective.loss!=null",
        "quantiles have a loss of their own, the pinball loss",
        "leave one of the two null",
    ),
    Rule(
        "objective.levels!=null & evaluation.interval!=null",
        "quantiles are the ends of intervals already",
        "leave one of the two null",
    ),
    Rule(
        "objective.levels!=null & training.step._target_!=null",
        "a custom step computes the training loss itself",
        "leave one of the two null",
    ),
    Rule(
        "objective.class_weight!=null & training.step._target_!=null",
        "a custom step computes the training loss itself",
        "apply the class weights in the step, and leave objective.class_weight null",
    ),
    Rule(
        "training.step._target_!=null & strategy=pipeline",
        "a custom step calls the whole model, and a pipeline divides it into stages",
        "use another strategy",
    ),
    Rule(
        "strategy.communication=nccl & hardware=cpu",
        "NCCL works only between GPUs",
        "use ring, or auto",
    ),
    Rule(
        "precision=mixed_float16 & hardware=cpu",
        "results are correct, but float16 is slow on a CPU",
        "precision=mixed selects bfloat16",
        "warning",
    ),
    Rule(
        "training.validate_every!=null",
        "this is no number of updates or of epochs",
        "write 500 for updates, or '2 epochs'",
        only_if=lambda p: isinstance(p.training.validate_every, str) and not p.training.validate_epochs,
    ),
    Rule(
        "training.validate_every>0 & training.engine=fit",
        "Keras's fit validates at the end of an epoch",
        "write '2 epochs', or use training.engine=loop",
    ),
    Rule(
        "!dataset.validation & !dataset.fold",
        "there is no validation split",
        "set dataset.validation=0.1, or leave them out",
        keys=("training.validate_every", "training.validate_examples", "dataset.validation"),
        only_if=lambda p: bool(p.training.validate_every or p.training.validate_examples),
    ),
    Rule(
        "training.early_stopping.restore_best & checkpoint=none",
        "no checkpoint keeps the best model",
        "use checkpoint=default",
    ),
    Rule(
        "training.early_stopping.restore_best",
        "two values would decide which model is exported",
        "leave checkpoint.best out, or give it the monitor of training.early_stopping and checkpoint.export=best",
        keys=("training.early_stopping.restore_best", "checkpoint.best.monitor", "checkpoint.export"),
        only_if=has_other_best,
    ),
    Rule(
        "model.init_from_preprocessing!=extend & model.init_from=null",
        "there is no earlier run whose preprocessing could be taken",
        "set model.init_from, or leave model.init_from_preprocessing out",
    ),
    Rule(
        "model.freeze!=null",
        "the first epoch is 0",
        "begin with it: {0: [PATTERN], 3: []}; an empty list freezes nothing",
        only_if=lambda p: isinstance(p.model.freeze, dict) and min(p.model.freeze, default=None) != 0,
    ),
    Rule(
        "model.freeze!=null & strategy in parameter_server|pipeline",
        "what trains is fixed there when the run begins",
        "use strategy=one_device, mirrored or multi_worker, or two runs, the second with model.init_from",
        only_if=lambda p: p.model.freezes_by_epoch,
    ),
    Rule(
        "model.lora!=null & !model.lora.layers",
        "it names no layers",
        "name the layers: model.lora.layers=[dense*]",
        keys=("model.lora.layers",),
    ),
    Rule(
        "dataset.validation!=null",
        "this is not a fraction of the training split",
        "give a fraction from 0 to less than 1, the name of a split, or null",
        only_if=has_invalid_fraction,
    ),
    Rule(
        "dataset.fold!=null",
        "this is no fold",
        "write 2/5 for the second of five",
        only_if=lambda p: not is_fold(p.dataset.held_out_fold),
    ),
    Rule(
        "dataset.fold!=null & model.init_from",
        "its run may have trained on the rows of the fold",
        "use the weights of a file, or train without model.init_from",
        only_if=lambda p: not (p.model.init_from or "").endswith((".keras", ".h5")),
    ),
    Rule(
        "dataset.split.by & dataset._target_",
        "this dataset has no columns",
        "use dataset.split=random or stratum, or a dataset of a table, arrays, records or files",
        only_if=has_split_without_columns,
    ),
    Rule(
        "dataset.split.by in group|time|column|hash & dataset.split.column=null & dataset.split.pattern=null",
        "no column is named",
        "name one: 'dataset.split={by: group, column: customer}'; of files also pattern",
        keys=("dataset.split.by", "dataset.split.column"),
        only_if=lambda p: p.dataset.target.path in (*WITH_COLUMNS, *FOLDERS),
    ),
    Rule(
        "dataset.split.by",
        "it does not use one of the other keys that are given",
        "give column or pattern with stratum, group, time, column or hash, stratum with group, gap with time",
        only_if=has_useless_split_key,
    ),
    Rule(
        "dataset.split.by in group|hash|column & dataset.split.column!=null",
        "the column is the target",
        "name another column, or use dataset.split=stratum, which gives each split its share of the target",
        only_if=has_split_by_target,
    ),
    Rule(
        "dataset.split.pattern!=null & dataset._target_",
        "only files of a folder have paths",
        "name a column with dataset.split.column",
        only_if=lambda p: p.dataset.target.path not in FOLDERS,
    ),
    Rule(
        # The worker checks a user's own dataset class.
        f"dataset.shards>1 & dataset._target_!={TABLE}",
        "only tables that are read while training can be divided by their files",
        "use dataset=table, or leave dataset.shards 1",
        only_if=lambda p: p.dataset.target.path.startswith("scaleflow."),
    ),
    Rule(
        "dataset.shards>1 & dataset.cache in memory|file",
        "every worker would read all rows once, to keep them",
        "use dataset.cache=none, or leave dataset.shards 1",
    ),
    Rule(
        "training.early_stopping.monitor & !dataset.validation & !dataset.fold",
        "there is no validation split",
        "set dataset.validation=0.1, or monitor train/loss",
        keys=("training.early_stopping.monitor", "dataset.validation"),
        only_if=is_stopped_by_validation,
    ),
)
