"""Prepares the data of a run: splits, feeds, the objective for the targets, and the record of the data.

Before training it makes a schema from a sample, and lets features look at the data.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.cluster.gpus import gpu_memory_bytes
from scaleflow.config.plan import make_batching
from scaleflow.config.targets import bind_target, check_plan_targets, locate_target
from scaleflow.config.trust import check_origins
from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import (
    BY_SIZE,
    Batching,
    BySplit,
    EarlierState,
    Feed,
    LearnedChanges,
    LearnedState,
    Objective,
    Plan,
    Rows,
    Source,
    Target,
    Training,
    Workers,
)
from scaleflow.interfaces.events import Emit, Event, Note, PhaseBegan
from scaleflow.interfaces.hooks import ReadData, TrainingData, WorkerHook
from scaleflow.runs.event_log import format_line
from scaleflow.runs.objects import KERAS_FILE
from scaleflow.runs.run_name import describe_data_name
from scaleflow.worker.earlier import DIGEST_KEYS, find_changes, find_earlier, open_source
from scaleflow.worker.hooks import call_after_data, change_feed, explain_no_folds, load_hooks, looks_at_data
from scaleflow.worker.metadata import RunMetadata
from scaleflow.worker.runtime import Runtime, StartupTimer, divide_evaluation, setup_runtime

if TYPE_CHECKING:
    from scaleflow.dataset import Permutation, Splits
    from scaleflow.dataset.schema import SplitSample


def make_look(
    plan: Plan,
    hooks: Mapping[str, WorkerHook],
    source: Source,
    earlier: EarlierState | None,
    is_resumed: bool,
    workers: Workers,
    emit: Emit,
    late: Emit,
) -> Callable[[Splits], Mapping[str, Any]] | None:
    """Makes the function that looks at the raw splits of a run and returns the schema to keep.

    A resumed run keeps the schema of its first command, and its data is compared with that schema. Features report
    their findings. If the data cannot be looked at, `late` gets a note: it is emitted only if the data can be read, so
    that otherwise the run reports just the read error.
    """
    known = earlier.state.schema if earlier is not None and is_resumed else {}
    if plan.dataset.check == "none":
        return (lambda splits: known) if known else None
    if plan.dataset.check == "refuse" and not any(looks_at_data(hook) for hook in hooks.values()):
        raise ConfigError("dataset.check=refuse: there is no feature that looks at data; use dataset.check=none")

    def look(splits: Splits) -> Mapping[str, Any]:
        sample: SplitSample | None = None
        schema = dict(known)

        def describe() -> str:  # on the chief
            nonlocal sample
            from scaleflow.dataset.schema import make_schema, sample_split

            try:
                sample = sample_split(source, splits.train, splits.sample)
                schema.update(make_schema(sample))
            except Exception as error:  # strange data does not end a run, and reading reports its own error
                traceback.print_exc()
                return read_reason(error)
            return ""

        if not known:
            problem = workers.from_chief(describe)
            if problem:
                tell_unread(problem, plan.dataset.check, late)
                return schema
        data = ReadData(
            plan=plan,
            source=source,
            splits=splits.by_name(),
            raw_sample=splits.sample,
            sample=sample,
            earlier=known or None,
            workers=workers,
            emit=emit,
            emit_late=emit_late,
        )
        schema.update(call_after_data(hooks, data))
        return schema

    def emit_late(event: Event) -> None:
        format_line(event)  # fails in the hook that emits it, and not later
        late(event)

    return look


def tell_unread(reason: str, check: str, emit: Emit) -> None:
    """Reports that the data cannot be looked at. Raises ConfigError for `dataset.check=refuse`."""
    text = f"dataset.check={check}: the data cannot be looked at ({reason})"
    if check == "refuse":
        raise ConfigError(f"{text}; use dataset.check=none")
    emit(Note(text))


#: Up to this many examples, a global batch may be mostly padding.
SMALL_BATCH = 4096


@dataclass(frozen=True)
class PreparedData:
    """The devices and the examples of a run. They do not depend on its batch size."""

    runtime: Runtime
    source: Source
    splits: Splits
    changes: LearnedChanges | None = None  # how its learned state differs from the run whose weights it takes
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the model sizes of that run
    late: Sequence[Event] = ()  # events to emit after the first examples were read
    #: The hooks of the run's features, by feature name
    hooks: Mapping[str, WorkerHook] = dataclasses.field(default_factory=dict)

    def divide(self, training: Training) -> PreparedData:
        """Returns a copy with global batches of another size."""
        batching = make_batching(training, self.runtime.batching.replicas)
        return dataclasses.replace(self, runtime=dataclasses.replace(self.runtime, batching=batching))


def prepare_data(plan: Plan, emit: Emit, startup_timer: StartupTimer, resumed: Path | None = None) -> PreparedData:
    """Sets up TensorFlow and reads the dataset. Call it once per process. Raises the errors of `build_training`."""
    sys.path[:0] = [folder for folder in plan.search if folder not in sys.path]
    from scaleflow import dataset

    startup_timer.end_part("import")
    emit(PhaseBegan("setting up the devices"))
    runtime = setup_runtime(plan, emit)
    startup_timer.end_part("build")
    if plan.trusted_modules is not None:
        check_origins(plan.config, plan.trusted_modules)
    check_plan_targets(plan)
    emit(PhaseBegan(f"reading {describe_data_name(plan)}"))
    earlier = find_earlier(plan, resumed, runtime.worker_sync)
    source = open_source(plan, earlier)
    late: list[Event] = []
    hooks = load_hooks(plan, emit)
    look = make_look(
        plan, hooks, source, earlier, resumed is not None, workers=runtime.worker_sync, emit=emit, late=late.append
    )
    sizes = {} if earlier is None else earlier.state.sizes
    folds = find_folds(plan, sizes)
    splits = dataset.prepare_splits(
        source,
        plan.dataset,
        plan.seed,
        workers=runtime.worker_sync,
        emit=emit,
        earlier=earlier,
        look=look,
        folds=folds,
        no_folds=explain_no_folds(hooks, plan, emit),
    )
    assert splits.learned is not None
    changes = find_changes(plan, splits.learned, emit)
    return PreparedData(runtime, source, splits, changes=changes, sizes=sizes, late=late, hooks=hooks)


def find_folds(plan: Plan, sizes: Mapping[str, Any]) -> int:
    """Returns the number of folds into which the model's members divide the training split; 0 without folds.

    The `count_folds` of the model's function decides. A user's training step has no folds. `sizes` has known values of
    arguments that are `by_size`.
    """
    target = plan.model.target
    count = getattr(locate_target(target), "count_folds", None)
    if count is None or plan.training.step is not None:
        return 0
    return count({k: sizes.get(k, value) if value == BY_SIZE else value for k, value in target.arguments.items()})  # type: ignore[no-any-return]


def check_batch_size(options: Training, batching: Batching, examples: int) -> None:
    """Rejects a global batch that is mostly padding, because padding takes as much memory as real examples."""
    if batching.global_size <= max(SMALL_BATCH, 2 * examples):
        return
    key = "batch_size" if options.global_batch_size is None else "global_batch_size"
    raise ConfigError(
        f"training.{key}={getattr(options, key)}: makes a global batch of {batching.global_size:,} examples, but the "
        f"training split has {examples:,}; use a smaller one"
    )


def apply_debug_subset(splits: Splits, plan: Plan, runtime: Runtime) -> Splits:
    """Reduces the splits for `debug=overfit`, `debug=fast` and `training.validate_examples`."""
    from scaleflow import dataset

    if plan.training.validate_examples is not None:
        if splits.validation is None:
            raise ConfigError(
                f"training.validate_examples={plan.training.validate_examples}: the run has no validation split; leave "
                "it out"
            )
        splits = dataset.limit_evaluation(splits, plan.training.validate_examples, has_test=False)
    if plan.debug.overfit:
        splits = dataset.repeat_first_batch(splits, runtime.batching)
    if plan.debug.fast:
        splits = dataset.limit_evaluation(splits, divide_evaluation(runtime, plan).global_size)
    return splits


def make_feeds(
    data: TrainingData, runtime: Runtime, hooks: Mapping[str, WorkerHook], order: Permutation | None = None
) -> BySplit[Feed]:
    """Makes the feeds.

    Training is shuffled by the seed or follows `order`, and features may change it. Validation and test are in order
    and without micro-batches.
    """
    from scaleflow import dataset

    plan = data.plan
    splits = data.splits
    batching = runtime.read_batching(runtime.batching)
    evaluation_batching = runtime.read_batching(divide_evaluation(runtime, plan))
    device_bytes = gpu_memory_bytes(runtime.devices.kind, plan.hardware)
    read = functools.partial(
        dataset.make_feed,
        transforms=splits.transforms,
        threads=plan.dataset.threads,
        device_bytes=device_bytes,
        shards=plan.dataset.shards,
    )

    def in_order(examples: Rows | None) -> Feed | None:
        return None if examples is None else read(examples, evaluation_batching, runtime.evaluation_strategy)

    seed = None if plan.debug.overfit else plan.seed  # with `debug.overfit` all batches are equal
    train: Any = read(
        splits.train,
        batching,
        runtime.strategy,
        shuffle_seed=seed,
        buffer=plan.dataset.shuffle,
        steps_per_epoch=plan.training.steps_per_epoch,
    )
    if order is not None:
        train = train.reorder(seed, order)
    train = change_feed(hooks, data, train)
    validation = in_order(splits.validation)
    test = validation if splits.test is splits.validation else in_order(splits.test)
    return BySplit(train, validation, test)


def resolve_cache(plan: Plan, splits: Splits) -> str:
    """Returns `dataset.cache`; for `auto`, the cache that the training split uses."""
    if plan.dataset.shards > 1:  # even if a debug option keeps some batches in memory
        return "none"
    if plan.dataset.cache != "auto":
        return plan.dataset.cache
    place = splits.train.place
    return "none" if place == "stream" else place


def find_example_location(examples: Rows) -> str:
    """Returns where the training steps get their examples: from `memory` or from a `stream`."""
    return "memory" if examples.place == "memory" else "stream"


def complete_record(
    learned: LearnedState | None, metadata: RunMetadata | None, sizes: Mapping[str, Any]
) -> LearnedState:
    """Returns the record with the model's sizes and the digests of the splits. Only the chief knows the digests."""
    assert learned is not None
    described = {} if metadata is None else metadata.data.splits
    digests = {}
    for name, split in described.items():
        digests[name] = {key: split[key] for key in DIGEST_KEYS}
    return dataclasses.replace(learned, splits=digests, sizes=sizes)


def refuse_negative_outputs(plan: Plan, losses: Mapping[str, Target]) -> None:
    """Raises ConfigError for a loss of positive values with one of scaleflow's own models, which return any number."""
    path = plan.model.target.path
    if losses and path.startswith("scaleflow.model.") and path != KERAS_FILE:
        loss = next(iter(losses.values()))
        chosen = plan.choices.get("model") or path.split(".")[2]
        raise ConfigError(
            f"{loss.describe()}: is for outputs above 0, and model={chosen} returns any number; use "
            "a model of your own whose last layer is positive, such as activation='softplus', or a loss such as huber"
        )


def make_run_objective(plan: Plan, splits: Splits, runtime: Runtime, emit: Emit) -> Objective:
    """Makes the loss and the metrics of a run. If class weights need it, the chief counts the classes of training.

    Raises ConfigError if a loss, a metric or a class weight does not fit the outputs of the dataset.
    """
    from scaleflow import dataset, objective

    def count(names: list[str]) -> dict[str, list[float]]:
        def count_here() -> str:
            targets = dataset.read_targets("train", splits.train)
            return json.dumps(objective.count_classes(splits.outputs, names, targets))

        counts: dict[str, list[float]] = json.loads(runtime.worker_sync.from_chief(count_here))
        return counts

    weights = objective.find_class_weights(splits.outputs, plan.objective.class_weight, count)
    for note in objective.describe_class_weights(splits.outputs, weights):
        emit(Note(note))
    loader = objective.Loader(locate_target, bind_target)
    refuse_negative_outputs(plan, objective.find_positive_losses(splits.outputs, plan.objective, loader))
    return objective.make_objective(
        splits.outputs, plan.objective, is_weighted=splits.is_weighted, loader=loader, class_weights=weights
    )
