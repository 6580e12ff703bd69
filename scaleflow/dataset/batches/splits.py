"""Turns a source into the splits of a run: checks, limits, preprocesses, holds out validation, drops bad examples."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar, cast

import keras
import numpy as np
import tensorflow as tf

from scaleflow.dataset.batches.blocks import MEMORY_BYTES, Blocks
from scaleflow.dataset.batches.fingerprint import Fingerprint, fingerprint_split
from scaleflow.dataset.batches.matched_source import find_original
from scaleflow.dataset.batches.preprocessing import (
    Preprocessings,
    Transforms,
    cache_blocks,
    cache_split,
    choose_preprocessing,
    group_names,
    learn_on_chief,
    make_layer,
    make_transform,
)
from scaleflow.dataset.batches.records import StreamRows, cache_records, draw, record_bytes, to_mask
from scaleflow.dataset.batches.rows import to_rows
from scaleflow.dataset.batches.source_checks import check_contract, check_examples
from scaleflow.dataset.batches.unreadable import refuse_unreadable
from scaleflow.dataset.batches.value_checks import check_ids
from scaleflow.dataset.batches.varying import is_own_source, settle_variation
from scaleflow.dataset.reading.division import (
    Division,
    add_folds,
    assign_folds,
    choose_validation,
    encode_keys,
    find_strata,
    hold_out_fold,
    is_by_target,
)
from scaleflow.dataset.reading.learned_cache import LearnedCache
from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    Arrays,
    Batching,
    BySplit,
    Dataset,
    DivisionKeys,
    EarlierState,
    Inputs,
    InputStructure,
    LearnedPreprocessing,
    LearnedState,
    Outputs,
    OutputStructure,
    Rows,
    Source,
    Split,
    Stream,
    Workers,
    map_named,
    name_class,
    name_leaves,
    to_plain,
)
from scaleflow.interfaces.events import Emit, Note, ignore_event
from scaleflow.interfaces.formatting import join_first

AnyRows = TypeVar("AnyRows", bound=Rows)

#: Records of a stream are drawn in blocks, which copies them, if their average size is at most this.
SMALL_RECORD_BYTES = 16 << 10

#: Maximum number of bad examples that a message names.
MAX_NAMED = 5

#: The beginning of notes about examples that were left out.
LEFT_OUT = "dataset.on_bad_example=skip: left out"

#: The beginning of notes about rows of tables without a target.
UNLABELLED = "dataset: left out: "


@dataclass(frozen=True)
class Splits(BySplit[Rows]):
    """The splits of a run, and facts about them."""

    inputs: InputStructure  # of the model, after the preprocessing
    outputs: OutputStructure
    sample: Any  # a few raw inputs of the training split
    transforms: Transforms = field(default_factory=dict)  # preprocessing of streams. Arrays are preprocessed already.
    #: By input, a function that makes its preprocessing layer, the first part of a saved model
    preprocessing_layers: Mapping[tuple[str, ...], Callable[[], keras.Layer]] = field(default_factory=dict)
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)  # of the raw splits, by name
    learned: LearnedState | None = None  # None without preprocessing
    #: The splits before their preprocessing, by name, without the training split if that is preprocessed
    raw: Mapping[str, Rows] = field(default_factory=dict)
    folds: int = 0  # if above 0, the validation split is the training split, and both have the input `FOLD`

    @property
    def is_weighted(self) -> bool:
        """Whether a split has weights."""
        return any(examples.is_weighted for examples in self.by_name().values())

    def counts(self) -> Mapping[str, int]:
        """Returns the number of examples of each split."""
        return {name: len(examples) for name, examples in self.by_name().items()}


class SingleProcess:
    """`Workers` of a single process."""

    def from_chief(self, make: Callable[[], str]) -> str:
        return make()

    def all(self, condition: bool) -> bool:
        return condition


def prepare_splits(
    source: Source,
    options: Dataset,
    seed: int,
    workers: Workers | None = None,
    emit: Emit = ignore_event,
    preprocesses: bool = True,
    earlier: EarlierState | None = None,
    folds: int = 0,
    no_folds: str = "",
    look: Callable[[Splits], Mapping[str, Any]] | None = None,
) -> Splits:
    """Loads, checks and preprocesses the splits.

    Args:
        source: any object with the interface `Source`.
        options: the section `dataset` of the config.
        seed: draws the training examples that are held out for validation.
        workers: all workers of the run. The chief learns the preprocessing for them.
        emit: receives notes about examples that are left out, and about caches.
        preprocesses: False leaves the inputs raw, for a saved model that preprocesses them itself.
        earlier: the learned state of an earlier run. Its preprocessing is not learned again.
        folds: the number of folds that the model can use, as in `choose_validation`.
        no_folds: why no member of the model can leave out a fold, as in `choose_validation`.
        look: returns the schema of the raw splits, which becomes a part of the learned state.

    Raises:
        ConfigError: if the source violates its interface, a named split is missing, or an example that is read at the
            start cannot be read.
    """
    check_contract(source)
    workers = workers or SingleProcess()
    if options.split.by == "column" and options.validation is not None and "validation" in source.splits:
        options = replace(options, validation="validation")
    splits = load_splits(source, options, workers, emit=emit)
    raw, folds = divide_training(
        source, options, splits, seed=seed, preprocesses=preprocesses, folds=folds, no_folds=no_folds, emit=emit
    )
    raw = replace(raw, learned=describe_learned(source, options, raw, look=look))
    preprocessings = choose_preprocessing(source, options) if preprocesses else {}
    preprocessed = preprocess_splits(preprocessings, raw, workers, earlier=earlier, emit=emit)
    source_cache = getattr(source, "learned_cache", None)
    if isinstance(source_cache, LearnedCache):
        for note in source_cache.notes:
            emit(Note(note))
    has_folds = folds > 0 and preprocesses
    cache = choose_cache(options, has_folds)
    cached = cache_splits(preprocessed, cache, workers)
    if cached.train.place != "stream" and getattr(preprocessed.train, "varies", False):
        reason = "the folds of the model" if has_folds else f"dataset.cache={cache}"
        emit(Note(f"{reason}: keeps the first reading of the examples, and all epochs have the same random changes"))
    for name, examples in cached.by_name().items():
        examples.check_cached(cached.inputs, name)
    if preprocesses and cache == "auto" and cached.train.blocks:
        emit(
            Note(
                f"dataset.cache=auto: the rows are read while training, because all of them take more than "
                f"{MEMORY_BYTES >> 20} MiB, or more than a quarter of the free memory"
            )
        )
    return divide_into_folds(cached, folds, options.split, raw=raw.train) if has_folds else cached


def choose_cache(options: Dataset, has_folds: bool) -> str:
    """Returns the value of `dataset.cache` that applies."""
    if has_folds:
        return "memory"  # a stream has no place for the number of a fold
    if options.shards > 1:
        return "none"  # each worker would keep the rows of all workers
    return options.cache


def load_splits(source: Source, options: Dataset, workers: Workers, emit: Emit) -> dict[str, Rows]:
    """Loads the splits that a run uses, without the examples that it leaves out."""
    for note in getattr(source, "notes", ()):
        emit(Note(note))
    names = ["train"]
    if options.validation_split:
        names.append(options.validation_split)
    if "test" in source.splits:
        names.append("test")
    splits: dict[str, Rows] = {}
    for name in dict.fromkeys(names):  # the validation split may be one of the others
        splits[name] = clean_split(source, name, options, workers=workers, emit=emit)
    report_unlabelled(source, options, emit)
    for note in getattr(source, "load_notes", ()):
        emit(Note(note))
    if "validation" in source.splits and "validation" not in splits:
        emit(Note("the dataset's split 'validation' is not used; set dataset.validation=validation to use it"))
    return splits


def divide_training(
    source: Source,
    options: Dataset,
    splits: Mapping[str, Rows],
    seed: int,
    preprocesses: bool,
    folds: int,
    no_folds: str,
    emit: Emit,
) -> tuple[Splits, int]:
    """Returns the raw splits, with one for validation, and the number of folds, 0 for none."""
    train = splits["train"]
    validation: Rows | None = None
    if options.held_out_fold:
        folds = 0
        keys = find_division_keys(options.split, train, source.outputs)
        rest, held_out = hold_out_fold(options.split, keys, len(train), fold=options.held_out_fold)
        validation = train.select(held_out)
        train = train.select(rest)
    else:
        chosen, folds = choose_validation(options, source.inputs, len(train), folds=folds, no_folds=no_folds)
        if isinstance(chosen, str):
            validation = splits[chosen]
        elif folds:
            validation = train if preprocesses else None  # a model without its folds has seen all of it
        elif chosen:
            keys = find_division_keys(options.split, train, source.outputs)
            train, validation = hold_out_examples(train, chosen, options.split, keys=keys, seed=seed, emit=emit)
    with refuse_unreadable("train", train):
        sample = train.read_first(8)
    check_ids(source.inputs, "train", sample)
    raw = Splits(train, validation, splits.get("test"), inputs=source.inputs, outputs=source.outputs, sample=sample)
    fingerprints: dict[str, Fingerprint] = {}
    kept: dict[str, Rows] = {}
    for name, examples in raw.by_name().items():
        fingerprints[name] = fingerprint_split(name, examples, source.outputs)
        if name != "train" or not preprocesses:
            kept[name] = examples
    return replace(raw, fingerprints=fingerprints, raw=kept), folds


def describe_learned(
    source: Source, options: Dataset, raw: Splits, look: Callable[[Splits], Mapping[str, Any]] | None
) -> LearnedState:
    """Returns the learned state before a preprocessing is learned."""
    return LearnedState(
        source.inputs,
        source.outputs,
        source=name_class(find_original(source)),
        reading=to_plain(getattr(source, "reading", {})),
        pictures=tuple(getattr(source, "decoders", {})),
        schema=look(raw) if look else {},
        split=asdict(options.split),
    )


def divide_into_folds(splits: Splits, folds: int, rule: Split, raw: Rows) -> Splits:
    """Validates on the training split, and adds the number of its fold to each example.

    Examples of the test split are in no fold.

    Args:
        splits: the preprocessed splits. They are in memory.
        folds: the number of folds.
        rule: `dataset.split`.
        raw: the training split before its preprocessing.
    """
    train: Any = splits.train
    keys = find_division_keys(rule, raw, splits.outputs)
    targets = train.targets
    has_single_targets = isinstance(targets, np.ndarray) and targets[0].size == 1
    if rule.by == "auto" and keys.strata is None and has_single_targets:
        _, strata = np.unique(targets, return_inverse=True)
        keys = replace(keys, strata=strata.ravel())
    train = add_folds(train, assign_folds(rule, keys, len(raw), folds))
    test = None if splits.test is None else add_folds(splits.test, np.full(len(splits.test), -1, np.int32))
    return replace(splits, train=train, validation=train, test=test, folds=folds)


def clean_split(source: Source, split: str, options: Dataset, workers: Workers, emit: Emit) -> Rows:
    """Loads, checks and limits one split, and drops unreadable examples for `dataset.on_bad_example=skip`."""
    examples = load_split(source, split)
    if examples.place != "stream":
        return limit_examples(examples.check_targets(source.outputs, split), options.limit)
    stream = cast(StreamRows, examples)
    if options.on_bad_example != "skip":
        refuse_faults(split, stream)
    if is_own_source(source):
        stream = settle_variation(split, stream, options, workers, emit)
    if not stream.varies:
        stream = cache_records(split, stream)
    stream = limit_examples(stream, options.limit).check_targets(source.outputs)
    return drop_unreadable(split, stream, workers, emit=emit) if options.on_bad_example == "skip" else stream


def report_unlabelled(source: Source, options: Dataset, emit: Emit) -> None:
    """Emits notes about rows without a target. Refuses such rows for `dataset.on_bad_example=raise`."""
    for split, text in getattr(source, "unlabelled", {}).items():
        if options.on_bad_example == "raise":
            raise ConfigError(f"dataset.on_bad_example=raise: in {split!r}, {text}; auto and skip leave them out")
        emit(Note(f"{UNLABELLED}in {split!r}, {text}"))


def refuse_faults(split: str, stream: Stream) -> None:
    if stream.faults:
        faults = "; ".join(stream.faults[:MAX_NAMED])
        raise ConfigError(
            f"dataset: {split!r} has bad examples: {faults}; use dataset.on_bad_example=skip to leave them out"
        )


def drop_unreadable(split: str, stream: StreamRows, workers: Workers, emit: Emit) -> StreamRows:
    """Returns the stream without unreadable examples, and emits a note that counts and names them."""
    if stream.malformed and (split == "train" or stream.is_whole):
        shown = "; ".join(stream.malformed[:MAX_NAMED])
        emit(Note(f"{LEFT_OUT} {len(stream.malformed)} rows of the files: {shown}"))
    with refuse_unreadable(split, stream):
        found_by_chief = workers.from_chief(lambda: json.dumps([*stream.find_unreadable()]))
        indices = json.loads(found_by_chief)
    if not indices:
        return stream
    if len(indices) == len(stream):
        first = stream.describe_unreadable(indices[:1])[0]
        raise ConfigError(
            f"dataset.on_bad_example=skip: none of the {len(stream)} examples of {split!r} can be read: {first}"
        )
    reasons = [str(reason) for reason in stream.describe_unreadable(indices[:MAX_NAMED])]
    skipped = f"{len(indices)} of the {len(stream)} examples of {split!r} that cannot be read"
    emit(Note(f"{LEFT_OUT} {skipped}: {join_first(reasons, MAX_NAMED, len(indices))}"))
    return stream.select(~to_mask(indices, len(stream)))


def preprocess_splits(
    preprocessings: Preprocessings, splits: Splits, workers: Workers, earlier: EarlierState | None, emit: Emit
) -> Splits:
    """Learns the preprocessings, and returns the splits with their transforms and layers."""
    if not preprocessings:
        return splits
    learned = learn_on_chief(preprocessings, splits.train, workers, earlier=earlier, emit=emit)
    records: dict[str, LearnedPreprocessing] = {}
    features: dict[str, Inputs] = {}
    for name, preprocessing in preprocessings.items():
        options = to_plain(vars(preprocessing))
        records[name] = LearnedPreprocessing(name_class(preprocessing), options, learned[name])
        features[name] = preprocessing.features(learned[name])
    samples = name_leaves(splits.sample)
    transforms: dict[tuple[str, ...], Callable[[Sequence[Any]], Sequence[Any]]] = {}
    layers: dict[tuple[str, ...], Callable[[], keras.Layer]] = {}
    for names in group_names(preprocessings):
        transforms[names] = make_transform(preprocessings, learned, names, samples=samples)
        layers[names] = functools.partial(make_layer, preprocessings, learned, names)
    return replace(
        splits,
        learned=splits.learned and replace(splits.learned, preprocessing=records),
        inputs=map_named(lambda name, inputs: features.get(name, inputs), splits.inputs),
        transforms=transforms,
        preprocessing_layers=layers,
    )


def cache_splits(splits: Splits, cache: str, workers: Workers) -> Splits:
    """Applies `dataset.cache` to all splits. A split with two roles is cached once."""
    by_name = splits.by_name()
    cached: dict[int, Rows] = {}  # by the id of the split
    if cache != "file":
        for same in group_by_reader(by_name.values()):
            results = cache_blocks(same, cache, splits.transforms, workers=workers)
            for blocks, result in zip(same, results, strict=True):
                cached[id(blocks)] = result
    for name, examples in by_name.items():
        if id(examples) not in cached:
            is_read_again = cache == "auto" and name != "test" and getattr(examples, "varies", False)
            mode = "none" if is_read_again else cache
            cached[id(examples)] = cache_split(name, examples, mode, transforms=splits.transforms, workers=workers)
    changes: dict[str, Any] = {name: cached[id(examples)] for name, examples in by_name.items()}
    return replace(splits, **changes)


def group_by_reader(splits: Iterable[Rows]) -> list[list[Blocks]]:
    """Returns the splits that are blocks, in groups that read the same rows."""
    groups: dict[int, list[Blocks]] = {}
    for examples in splits:
        if isinstance(examples, Blocks):
            groups.setdefault(id(examples.rows), []).append(examples)
    return list(groups.values())


def load_split(source: Source, split: str) -> Rows:
    """Loads one split, and checks it."""
    if split not in source.splits:
        raise ConfigError(
            f"dataset.validation={split}: there is no such split; the splits are {', '.join(source.splits)}"
        )
    examples = source.load(split)
    if not isinstance(examples, Arrays | Stream):
        raise ConfigError(f"dataset: load({split!r}) returned a {type(examples).__name__}, expected Arrays or a Stream")
    if not len(examples):
        raise ConfigError(f"dataset: the split {split!r} is empty")
    check_examples(source, split, examples)
    return to_rows(examples)


def limit_examples(examples: AnyRows, limit: int | None) -> AnyRows:
    return examples if limit is None or limit >= len(examples) else examples.limit(limit)


def find_division_keys(rule: Split, examples: Rows, outputs: OutputStructure) -> DivisionKeys:
    """Returns the values that divide examples. With `by: auto`, these are the classes of arrays."""
    keys = encode_keys(rule, DivisionKeys.of(examples), len(examples))
    output = outputs if isinstance(outputs, Outputs) else None
    has_classes = output is not None and output.is_one_class
    uses_classes = rule.by == "auto" and has_classes and examples.place != "stream"
    if keys.strata is not None or not (is_by_target(rule) or uses_classes):
        return keys
    if output is None or not (has_classes or output.shape == (1,)):
        raise ConfigError(
            "dataset.split: the targets are no classes and no single numbers, of which each split could get its share; "
            "use dataset.split=random, or name a column"
        )
    batches = [np.ravel(batch) for batch in examples.iterate(lambda _, targets, *__: targets)]
    return replace(keys, strata=find_strata(np.concatenate(batches), output))


def hold_out_examples(
    examples: Rows, fraction: float, rule: Split, keys: DivisionKeys, seed: int, emit: Emit
) -> tuple[Rows, Rows | None]:
    """Divides a training split into (train, validation). `seed` draws the validation examples.

    If the records of a stream are not in memory, both splits read all of them.
    """
    count = round(len(examples) * fraction)
    if not count:
        return examples, None
    if count >= len(examples):
        raise ConfigError(
            f"dataset.validation={fraction}: leaves none of the {len(examples)} examples to train on; use a smaller "
            "fraction"
        )
    has_keys = any(values is not None for values in vars(keys).values())
    if not examples.is_random_access and not has_keys and rule.by in ("auto", "random", "column"):
        return hold_out_of_stream(cast(StreamRows, examples), count, fraction, seed=seed, emit=emit)
    division = Division(rule, fraction, seed)
    rest, held_out = division.hold_out(keys, len(examples), draw=1, together=examples.drawn_together)
    return examples.select(rest), examples.select(held_out)


def hold_out_of_stream(stream: StreamRows, count: int, fraction: float, seed: int, emit: Emit) -> tuple[Rows, Rows]:
    """Divides a stream whose records are not in memory into (train, validation)."""
    dataset = stream.dataset.take(len(stream))
    if record_bytes(stream) <= SMALL_RECORD_BYTES:
        rest = draw(dataset, len(stream), count, seeds=(seed, 1), is_held_out=False)
        held_out = draw(dataset, len(stream), count, seeds=(seed, 1), is_held_out=True)
    else:
        emit(
            Note(
                f"dataset.validation={fraction}: each validation reads all {len(stream)} records of the stream to find "
                f"the {count} that are held out; to save that, set dataset.validation to the name of a split"
            )
        )
        places = tf.range(len(stream), dtype=tf.int64)
        seeds = tf.constant((seed, 1), tf.int64)
        last = tf.constant(max(len(stream) - 1, 1), tf.int64)
        is_held_out = (tf.random.experimental.index_shuffle(places, seeds, last) < count).numpy()
        whole = replace(stream, dataset=dataset)
        rest = whole.select(~is_held_out).dataset
        held_out = whole.select(is_held_out).dataset
    train = replace(stream, dataset=rest, length=len(stream) - count)
    return train, replace(stream, dataset=held_out, length=count)


def repeat_first_batch(splits: Splits, batching: Batching) -> Splits:
    """Replaces all training batches of an epoch by the first one, and validates on it. Drops the test split.

    It also drops the raw splits, because the validation examples are not among them.
    """
    batch = limit_examples(splits.train, batching.global_size)
    if batch.blocks:
        batch = cache_split("train", batch, "memory", transforms=splits.transforms, workers=SingleProcess())
    train = batch.repeat(batching.steps(len(splits.train)))
    validation = None if splits.validation is None else batch
    return replace(splits, train=train, validation=validation, test=None, raw={})


def limit_evaluation(splits: Splits, size: int, has_test: bool = True) -> Splits:
    """Limits the validation split, and with `has_test` the test split."""
    limited: dict[str, Any] = {}
    for name, examples in splits.by_name().items():
        if name == "validation" or (name == "test" and has_test):
            limited[name] = limit_examples(examples, size)
    return replace(splits, **limited)
