"""Reads the data of a run: splits, feeds, the objective that their targets need, and what describes them.

A sample of it is checked before training: its schema, its faults, its differences from earlier data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    DivisionKeys,
    EarlierState,
    Feed,
    LearnedChanges,
    LearnedState,
    Objective,
    Plan,
    Rows,
    Source,
    Split,
    Target,
    Training,
    Workers,
    name_leaves,
)
from scaleflow.interfaces.events import Emit, Event, Note, PhaseBegan
from scaleflow.runs.objects import KERAS_FILE
from scaleflow.runs.run_name import describe_data_name
from scaleflow.worker.earlier import DIGEST_KEYS, find_changes, find_earlier, open_source
from scaleflow.worker.metadata import RunMetadata
from scaleflow.worker.runtime import Runtime, StartupTimer, divide_evaluation, setup_runtime

if TYPE_CHECKING:
    from scaleflow.data_checks.drift import DataFinding, SplitSample
    from scaleflow.dataset import ClassOrder, Splits

#: The most examples, and the most values of all of them, that a run looks at.
MOST_EXAMPLES, MOST_VALUES = 2000, 1 << 20

#: The fewest examples, however large they are.
FEWEST_EXAMPLES = 32

#: The most columns that are no inputs, of which rows may belong together.
MOST_OTHERS = 50

#: The rules whose findings say that the figures of the test are too good.
TOGETHER = ("groups", "time drift", "duplicates across splits")

#: The most findings that a run reports.
MOST_TOLD = 5


def make_look(
    plan: Plan, source: Source, earlier: EarlierState | None, is_resumed: bool, workers: Workers, emit: Emit, late: Emit
) -> Callable[[Splits], Mapping[str, Any]] | None:
    """Makes the function that looks at the raw splits of a run, and returns the schema that is kept.

    The data of a resumed run are compared with the schema of its first command, which is kept. The function tells what
    it finds as `dataset.check` says. That the data cannot be looked at is told `late`: if they cannot be read either,
    the run has that error alone. The schema has what was found about rows that belong together, as `together`.
    """
    known = earlier.state.schema if earlier is not None and is_resumed else {}
    check = plan.dataset.check
    if check == "none":
        return (lambda splits: known) if known else None

    def look(splits: Splits) -> Mapping[str, Any]:
        schema = dict(known)

        def find() -> str:  # on the chief
            from scaleflow.data_checks.drift import make_schema

            try:
                if known:
                    found = compare_split(known, source, splits.train, few=splits.sample)
                else:
                    sample = sample_split(source, splits.train, splits.sample)
                    found = find_told(source, splits, plan.dataset.split, sample=sample)
                    schema.update(make_schema(sample))
                    schema["together"] = [asdict(each) for each in found if each.rule in TOGETHER]
            except Exception as error:  # strange data end no run, and an example that cannot be read has its own error
                traceback.print_exc()
                return json.dumps({"error": read_reason(error)})
            return json.dumps({"findings": [asdict(each) for each in found]})

        answer = json.loads(workers.from_chief(find))
        tell_findings(answer, check, late if "error" in answer else emit)
        return schema

    return look


def find_told(source: Source, splits: Splits, rule: Split, sample: SplitSample) -> list[DataFinding]:
    """Returns the faults of the training split. The first examples of a stream may not be typical of the rest.

    `sample` is one of the training split.
    """
    from scaleflow.data_checks.drift import DRIFT, select_level
    from scaleflow.data_checks.rules import find_duplicates, find_faults

    if not splits.train.is_spread:
        return []
    parts = {name: each for name, each in splits.by_name().items() if name == "train" or each is not splits.train}
    samples = {"train": sample, **sample_judge(source, parts, few=splits.sample, is_table=sample.is_table)}
    together = find_together_in(samples, parts, rule)
    found = [*together, *(find_duplicates(samples) if len(samples) > 1 else ())]
    return select_level([*found, *find_faults(sample, with_hints=False)], DRIFT)


def sample_judge(source: Source, parts: Mapping[str, Rows], few: Any, is_table: bool) -> dict[str, SplitSample]:
    """Returns a sample of the split of a table that judges the model, by its name; empty if there is none."""
    name = next((name for name in ("test", "validation") if name in parts), None)
    return {name: sample_split(source, parts[name], few)} if is_table and name is not None else {}


def find_together_in(samples: Mapping[str, SplitSample], parts: Mapping[str, Rows], rule: Split) -> list[DataFinding]:
    """Returns what is found about rows that belong together, in samples of the splits `parts`."""
    from scaleflow.data_checks.together import find_together

    keys = {name: DivisionKeys.of(each) for name, each in parts.items()}
    return list(find_together(samples, sum(map(len, parts.values())), rule, keys=keys))


def compare_split(schema: Mapping[str, Any], source: Source, examples: Rows, few: Any) -> list[DataFinding]:
    """Returns how a split differs from the training split of a run: drift, and all unseen categories.

    `examples` is the split before its preprocessing, `few` some of its raw inputs.
    """
    from scaleflow.data_checks.drift import DRIFT, LEVELS, compare_sample

    if not schema or not examples.is_spread:
        return []
    found = compare_sample(schema, sample_split(source, examples, few))
    return [each for each in found if LEVELS.index(each.level) >= LEVELS.index(DRIFT) or each.rule == "unseen"]


def tell_comparison(
    plan: Plan, earlier: EarlierState | None, source: Source, examples: Rows, few: Any, emit: Emit
) -> None:
    """Reports how an evaluation's data differ from the model's training data, as `dataset.check` says."""
    if plan.dataset.check == "none" or earlier is None:
        return
    try:
        found = compare_split(earlier.state.schema, source, examples, few=few)
    except Exception as error:
        traceback.print_exc()
        tell_findings({"error": read_reason(error)}, plan.dataset.check, emit)
        return
    tell_findings({"findings": [asdict(each) for each in found]}, plan.dataset.check, emit)


def tell_findings(answer: Mapping[str, Any], check: str, emit: Emit) -> None:
    """Reports findings in notes. Raises ConfigError for `dataset.check=refuse`."""
    if "error" in answer:
        text = f"dataset.check={check}: the data cannot be looked at ({answer['error']})"
        if check == "refuse":
            raise ConfigError(f"{text}; use dataset.check=none")
        emit(Note(text))
        return
    findings: Sequence[Mapping[str, Any]] = answer["findings"]
    told = [f"{each['text']} ({each['because']})" for each in findings]
    refused = [text for text, each in zip(told, findings, strict=True) if each["level"] != "hint"]
    if refused and check == "refuse":
        more = f", and {count_more(refused[1:])}" if len(refused) > 1 else ""
        raise ConfigError(
            f"dataset.check=refuse: {refused[0]}{more}; scaleflow check shows all, and dataset.check=warn goes on"
        )
    for text in told[:MOST_TOLD]:
        emit(Note(f"dataset.check: {text}"))
    if len(told) > MOST_TOLD:
        emit(Note(f"dataset.check: {count_more(told[MOST_TOLD:])}; scaleflow check shows all"))


def count_more(texts: Collection[str]) -> str:
    return f"{len(texts)} more finding{'s' if len(texts) > 1 else ''}"


def sample_split(
    source: Source,
    examples: Rows,
    few: Any,
    most: tuple[int, int] = (MOST_EXAMPLES, MOST_VALUES),
    reads_all: bool = False,
) -> SplitSample:
    """Reads examples of a split, as columns.

    Args:
        examples: the split, before its preprocessing.
        few: some of its raw inputs.
        most: the most examples, and the most values of all of them.
        reads_all: whether a stream that is not in memory is read to its end; else its first examples are read.
    """
    from scaleflow.data_checks.drift import make_sample

    leaves = name_leaves(few).values()
    values = sum(array.size for array in leaves) / max(1, max(map(len, leaves), default=1))
    count = min(most[0], max(FEWEST_EXAMPLES, int(most[1] / max(1.0, values))))
    places, (inputs, targets, *_) = examples.read_spread(count, reads_all)
    sample = make_sample(source.inputs, source.outputs, (inputs, targets), examples=len(examples))
    return dataclasses.replace(sample, others=read_others(source, examples, places))


def read_others(source: Source, examples: Rows, places: Any) -> dict[str, Any]:
    """Returns what examples have besides inputs and targets: columns of a table's files, groups of an own dataset."""
    from scaleflow.data_checks.together import GROUPS

    others = {} if examples.groups is None else {GROUPS: examples.groups[places]}
    reading = getattr(source, "reading", {})
    if not (unused := reading.get("unused", [])[:MOST_OTHERS] if isinstance(reading, Mapping) else []):
        return others
    from pyarrow import ArrowException

    from scaleflow.serving.cells import to_texts

    with contextlib.suppress(ConfigError, ArrowException):  # a file lacks one, or values that are no texts
        read = examples.open_columns(unused, "dataset.check")(places)
        others |= {name: to_texts(column)[0] for name, column in read.items()}
    return others


#: A global batch of up to this many examples may be mostly padding.
SMALL_BATCH = 4096


@dataclass(frozen=True)
class PreparedData:
    """The devices and the examples of a run, which do not depend on its batch size."""

    runtime: Runtime
    source: Source
    splits: Splits
    changes: LearnedChanges | None = None  # what the run learned otherwise than the one whose weights it takes
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of that one's model
    late: Sequence[Event] = ()  # what is told after the first examples were read

    def divide(self, training: Training) -> PreparedData:
        """Returns the same with global batches of another size."""
        batching = make_batching(training, self.runtime.batching.replicas)
        return dataclasses.replace(self, runtime=dataclasses.replace(self.runtime, batching=batching))


def prepare_data(plan: Plan, emit: Emit, startup_timer: StartupTimer, resumed: Path | None = None) -> PreparedData:
    """Sets up TensorFlow and reads the dataset. A process does that once. Raises what `build_training` raises."""
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
    look = make_look(
        plan, source, earlier, resumed is not None, workers=runtime.worker_sync, emit=emit, late=late.append
    )
    sizes = {} if earlier is None else earlier.state.sizes
    folds = find_folds(plan, sizes)
    splits = dataset.prepare_splits(
        source, plan.dataset, plan.seed, workers=runtime.worker_sync, emit=emit, earlier=earlier, look=look, folds=folds
    )
    assert splits.learned is not None
    changes = find_changes(plan, splits.learned, emit)
    return PreparedData(runtime, source, splits, changes=changes, sizes=sizes, late=late)


def find_folds(plan: Plan, sizes: Mapping[str, Any]) -> int:
    """Returns into how many folds the model's members can divide the training split, as its function's `count_folds`
    says; 0 without one. A training step of the user's knows no folds.

    `sizes` are known values of arguments that are `by_size`.
    """
    target = plan.model.target
    count = getattr(locate_target(target), "count_folds", None)
    if count is None or plan.training.step is not None:
        return 0
    return count({k: sizes.get(k, value) if value == BY_SIZE else value for k, value in target.arguments.items()})  # type: ignore[no-any-return]


def check_batch_size(options: Training, batching: Batching, examples: int) -> None:
    """Rejects a global batch of which most is padding, because it would take the memory of real examples."""
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


def make_feeds(splits: Splits, runtime: Runtime, plan: Plan, order: ClassOrder | None = None) -> BySplit[Feed]:
    """Makes the feeds: training shuffled by the seed, or in an order of its own; validation and test in order and
    without micro-batches.
    """
    from scaleflow import dataset

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

    seed = None if plan.debug.overfit else plan.seed  # all its batches are the same
    drawn: Any = read(
        splits.train,
        batching,
        runtime.strategy,
        shuffle_seed=seed,
        buffer=plan.dataset.shuffle,
        steps_per_epoch=plan.training.steps_per_epoch,
    )
    train = drawn if order is None else drawn.reorder(seed, order)
    train = dataset.augment_feed(train, plan.dataset.augment, plan.seed, inputs=splits.inputs, outputs=splits.outputs)
    validation = in_order(splits.validation)
    test = validation if splits.test is splits.validation else in_order(splits.test)
    return BySplit(train, validation, test)


def resolve_cache(plan: Plan, splits: Splits) -> str:
    """Returns `dataset.cache`, with `auto` replaced by what the training split uses."""
    if plan.dataset.shards > 1:  # also where a debug option keeps some batches in memory
        return "none"
    if plan.dataset.cache != "auto":
        return plan.dataset.cache
    place = splits.train.place
    return "none" if place == "stream" else place


def find_example_location(examples: Rows) -> str:
    """Returns where the steps find their examples: in `memory`, or in a `stream`."""
    return "memory" if examples.place == "memory" else "stream"


def complete_record(
    learned: LearnedState | None, metadata: RunMetadata | None, sizes: Mapping[str, Any]
) -> LearnedState:
    """Returns the record with the sizes of the model and the digests of the splits, which only the chief knows."""
    assert learned is not None
    described = {} if metadata is None else metadata.data.splits
    digests = {name: {key: each[key] for key in DIGEST_KEYS} for name, each in described.items()}
    return dataclasses.replace(learned, splits=digests, sizes=sizes)


def refuse_negative_outputs(plan: Plan, losses: Mapping[str, Target]) -> None:
    """Raises ConfigError for losses of positive values on one of scaleflow's own models, which return any number."""
    path = plan.model.target.path
    if losses and path.startswith("scaleflow.model.") and path != KERAS_FILE:
        loss = next(iter(losses.values()))
        chosen = plan.choices.get("model") or path.split(".")[2]
        raise ConfigError(
            f"{loss.describe()}: is for outputs above 0, and model={chosen} returns any number; use "
            "a model of your own whose last layer is positive, such as activation='softplus', or a loss such as huber"
        )


def make_run_objective(plan: Plan, splits: Splits, runtime: Runtime, emit: Emit) -> Objective:
    """Makes the loss and the metrics of a run. The chief counts the classes of the training split, if that is needed.

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
