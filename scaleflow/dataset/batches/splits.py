"""Turns a source into the splits of a run: checks, limits, preprocesses, holds out validation, drops bad examples."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar, cast

import keras
import numpy as np
import tensorflow as tf

from scaleflow.dataset.batches.blocks import MEMORY_BYTES, Blocks
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
from scaleflow.dataset.batches.rows import (
    Fingerprint,
    check_contract,
    check_examples,
    check_ids,
    fingerprint_split,
    to_rows,
)
from scaleflow.dataset.batches.unreadable import refuse_unreadable
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

#: Records of a stream up to this average size are drawn in blocks, which copies them; larger ones one by one.
SMALL_RECORD_BYTES = 16 << 10

#: Maximum number of bad examples that a message names.
MAX_NAMED = 5

#: The beginnings of notes about examples that were left out, and about rows of tables that have no target.
LEFT_OUT = "dataset.on_bad_example=skip: left out"
UNLABELLED = "dataset: left out: "


@dataclass(frozen=True)
class Splits(BySplit[Rows]):
    """The splits of a run, and what is known of them."""

    #: What the model takes, after the preprocessing, and what it returns
    inputs: InputStructure
    outputs: OutputStructure
    sample: Any  # a few raw inputs of the training split
    transforms: Transforms = field(default_factory=dict)  # preprocessing of streams; arrays are preprocessed already
    #: By the name of an input, makes a new preprocessing layer for it, as the first part of a saved model
    preprocessing_layers: Mapping[tuple[str, ...], Callable[[], keras.Layer]] = field(default_factory=dict)
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)  # of each raw split, by name
    learned: LearnedState | None = None  # the record of what was learned; None without preprocessing
    #: By name, the splits before their preprocessing, without that for training if it is preprocessed
    raw: Mapping[str, Rows] = field(default_factory=dict)
    folds: int = 0  # if above 0, the validation split is the training split, and both have the input `FOLD`

    @property
    def is_weighted(self) -> bool:
        """Whether examples of some split have weights."""
        return any(examples.is_weighted for examples in self.by_name().values())

    def counts(self) -> Mapping[str, int]:
        return {name: len(examples) for name, examples in self.by_name().items()}


class SingleProcess:
    """`Workers` of a single process."""

    def from_chief(self, make: Callable[[], str]) -> str:
        return make()

    def all(self, found: bool) -> bool:
        return found


def prepare_splits(
    source: Source,
    options: Dataset,
    seed: int,
    workers: Workers | None = None,
    emit: Emit = ignore_event,
    preprocesses: bool = True,
    earlier: EarlierState | None = None,
    folds: int = 0,
    look: Callable[[Splits], Mapping[str, Any]] | None = None,
) -> Splits:
    """Loads, checks and preprocesses the splits.

    Args:
        source: any object with the interface `Source`.
        options: the section `dataset` of the config.
        seed: selects the training examples that are held out for validation.
        workers: all workers of the run; the chief learns the preprocessing for them.
        emit: receives notes about what was left out.
        preprocesses: False leaves the inputs raw, for a saved model that preprocesses them itself.
        earlier: what an earlier run learned, which is not learned anew.
        folds: into how many the model can divide the training split, as for `choose_validation`.
        look: looks at the raw splits, before their preprocessing, and returns the schema that is kept with what was
            learned.

    Raises ConfigError if the source violates its interface, a named split is missing, or an example that is read at the
    start cannot be read.
    """
    check_contract(source)
    workers = workers or SingleProcess()
    if options.split.by == "column" and options.validation is not None and "validation" in source.splits:
        options = replace(options, validation="validation")
    splits = load_splits(source, options, workers, emit=emit)
    raw, folds = divide_training(source, options, splits, seed=seed, preprocesses=preprocesses, folds=folds, emit=emit)
    raw = replace(raw, learned=describe_learned(source, options, raw, look=look))
    preprocessings = choose_preprocessing(source, options) if preprocesses else {}
    preprocessed = preprocess_splits(preprocessings, raw, workers, earlier=earlier, emit=emit)
    cache_of_source = getattr(source, "learned_cache", None)
    for note in cache_of_source.notes if isinstance(cache_of_source, LearnedCache) else ():
        emit(Note(note))
    cache = options.cache if options.shards == 1 else "none"  # each worker would keep the rows of all
    has_folds = folds > 0 and preprocesses
    cache = "memory" if has_folds else cache  # a stream has no place for the number of a fold
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


def load_splits(source: Source, options: Dataset, workers: Workers, emit: Emit) -> dict[str, Rows]:
    """Loads the splits that a run uses, without the examples that it leaves out."""
    for note in getattr(source, "notes", ()):
        emit(Note(note))
    names = ["train", *([options.validation_split] if options.validation_split else [])]
    names += ["test"] if "test" in source.splits else []
    splits = {name: clean_split(source, name, options, workers=workers, emit=emit) for name in dict.fromkeys(names)}
    report_unlabelled(source, options, emit)
    for note in getattr(source, "load_notes", ()):
        emit(Note(note))
    if "validation" in source.splits and "validation" not in splits:
        emit(Note("the dataset's split 'validation' is not used; set dataset.validation=validation to use it"))
    return splits


def divide_training(
    source: Source, options: Dataset, splits: Mapping[str, Rows], seed: int, preprocesses: bool, folds: int, emit: Emit
) -> tuple[Splits, int]:
    """Returns the raw splits with the one for validation, and the number of folds that it has, 0 for none."""
    train, validation = splits["train"], None
    if options.held_out_fold:
        keys = find_division_keys(options.split, train, source.outputs)
        rest, held_out = hold_out_fold(options.split, keys, len(train), fold=options.held_out_fold)
        validation, train = train.select(held_out), train.select(rest)
        chosen, folds = None, 0
    else:
        chosen, folds = choose_validation(options, source.inputs, len(train), folds=folds)
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
    kept = {name: examples for name, examples in raw.by_name().items() if name != "train" or not preprocesses}
    fingerprints = {name: fingerprint_split(name, examples, source.outputs) for name, examples in raw.by_name().items()}
    return replace(raw, fingerprints=fingerprints, raw=kept), folds


def describe_learned(
    source: Source, options: Dataset, raw: Splits, look: Callable[[Splits], Mapping[str, Any]] | None
) -> LearnedState:
    """Returns the record of what is known of a source before a preprocessing is learned."""
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
    """Makes the training split the validation split, too, with the number of a fold for each example of `raw`.

    Examples of the test split are in no fold.
    """
    train: Any = splits.train  # it is in memory
    keys = find_division_keys(rule, raw, splits.outputs)
    targets = train.targets
    has_single_targets = isinstance(targets, np.ndarray) and targets[0].size == 1
    if rule.by == "auto" and keys.strata is None and has_single_targets:
        keys = replace(keys, strata=np.unique(targets, return_inverse=True)[1].ravel())
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
    """Emits notes about the rows without a target that a table has left out; refuses them if the options say so."""
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
    """Returns the stream without unreadable examples; a note counts and names them."""
    if stream.malformed and (split == "train" or stream.is_whole):
        shown = "; ".join(stream.malformed[:MAX_NAMED])
        emit(Note(f"{LEFT_OUT} {len(stream.malformed)} rows of the files: {shown}"))
    with refuse_unreadable(split, stream):
        indices = json.loads(workers.from_chief(lambda: json.dumps([*stream.find_unreadable()])))
    if not indices:
        return stream
    if len(indices) == len(stream):
        first = stream.describe_unreadable(indices[:1])[0]
        raise ConfigError(
            f"dataset.on_bad_example=skip: none of the {len(stream)} examples of {split!r} can be read: {first}"
        )
    named = [*map(str, stream.describe_unreadable(indices[:MAX_NAMED]))]
    skipped = f"{len(indices)} of the {len(stream)} examples of {split!r} that cannot be read"
    emit(Note(f"{LEFT_OUT} {skipped}: {join_first(named, MAX_NAMED, len(indices))}"))
    return stream.select(~to_mask(indices, len(stream)))


def preprocess_splits(
    preprocessings: Preprocessings, splits: Splits, workers: Workers, earlier: EarlierState | None, emit: Emit
) -> Splits:
    if not preprocessings:
        return splits
    learned = learn_on_chief(preprocessings, splits.train, workers, earlier=earlier, emit=emit)
    records = {
        name: LearnedPreprocessing(name_class(each), to_plain(vars(each)), learned[name])
        for name, each in preprocessings.items()
    }
    features = {name: each.features(learned[name]) for name, each in preprocessings.items()}
    samples, groups = name_leaves(splits.sample), group_names(preprocessings)
    return replace(
        splits,
        learned=splits.learned and replace(splits.learned, preprocessing=records),
        inputs=map_named(lambda name, inputs: features.get(name, inputs), splits.inputs),
        transforms={names: make_transform(preprocessings, learned, names, samples=samples) for names in groups},
        preprocessing_layers={names: functools.partial(make_layer, preprocessings, learned, names) for names in groups},
    )


def cache_splits(splits: Splits, cache: str, workers: Workers) -> Splits:
    """Applies `dataset.cache` to all splits; a split with two roles is cached once."""
    cached: dict[int, Rows] = {}
    blocks = [examples for examples in splits.by_name().values() if isinstance(examples, Blocks) and cache != "file"]
    for reader in {id(each.rows): each.rows for each in blocks}.values():
        same = [each for each in blocks if each.rows is reader]
        cached |= zip(map(id, same), cache_blocks(same, cache, splits.transforms, workers=workers), strict=True)
    for name, examples in splits.by_name().items():
        if id(examples) not in cached:
            is_read_anew = cache == "auto" and name != "test" and getattr(examples, "varies", False)
            wanted = "none" if is_read_anew else cache
            cached[id(examples)] = cache_split(name, examples, wanted, transforms=splits.transforms, workers=workers)
    found: dict[str, Any] = {name: cached[id(examples)] for name, examples in splits.by_name().items()}
    return replace(splits, **found)


def load_split(source: Source, split: str) -> Rows:
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
    """Returns what the examples are divided by; classes of arrays are used without being asked for."""
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
    targets = np.concatenate([np.ravel(each) for each in examples.iterate(lambda _, targets, *__: targets)])
    return replace(keys, strata=find_strata(targets, output))


def hold_out_examples(
    examples: Rows, fraction: float, rule: Split, keys: DivisionKeys, seed: int, emit: Emit
) -> tuple[Rows, Rows | None]:
    """Divides a training split: (train, validation).

    `seed` draws the validation examples. Of a stream whose records are not in memory, both splits read all records.
    """
    count = round(len(examples) * fraction)
    if not count:
        return examples, None
    if count >= len(examples):
        raise ConfigError(
            f"dataset.validation={fraction}: leaves none of the {len(examples)} examples to train on; use a smaller "
            "fraction"
        )
    has_keys = any(each is not None for each in vars(keys).values())
    if not examples.is_random_access and not has_keys and rule.by in ("auto", "random", "column"):
        return hold_out_of_stream(cast(StreamRows, examples), count, fraction, seed=seed, emit=emit)
    division = Division(rule, fraction, seed)
    rest, held_out = division.hold_out(keys, len(examples), draw=1, together=examples.drawn_together)
    return examples.select(rest), examples.select(held_out)


def hold_out_of_stream(stream: StreamRows, count: int, fraction: float, seed: int, emit: Emit) -> tuple[Rows, Rows]:
    """Does the same for a stream whose records are not in memory."""
    dataset = stream.dataset.take(len(stream))
    if record_bytes(stream) <= SMALL_RECORD_BYTES:
        rest, held_out = (draw(dataset, len(stream), count, seeds=(seed, 1), is_held_out=out) for out in (False, True))
    else:
        emit(
            Note(
                f"dataset.validation={fraction}: each validation reads all {len(stream)} records of the stream to find "
                f"the {count} that are held out; to save that, set dataset.validation to the name of a split"
            )
        )
        places = tf.range(len(stream), dtype=tf.int64)
        seeds, last = tf.constant((seed, 1), tf.int64), tf.constant(max(len(stream) - 1, 1), tf.int64)
        is_held_out = (tf.random.experimental.index_shuffle(places, seeds, last) < count).numpy()
        numbered = replace(stream, dataset=dataset)
        rest, held_out = (numbered.select(chosen).dataset for chosen in (~is_held_out, is_held_out))
    train = replace(stream, dataset=rest, length=len(stream) - count)
    return train, replace(stream, dataset=held_out, length=count)


def repeat_first_batch(splits: Splits, batching: Batching) -> Splits:
    """Replaces every training batch of an epoch by the first one; validates on it, too, and drops the test split.

    The validation examples are then none of the raw ones, so these are dropped, too.
    """
    batch = limit_examples(splits.train, batching.global_size)
    if batch.blocks:
        batch = cache_split("train", batch, "memory", transforms=splits.transforms, workers=SingleProcess())
    train = batch.repeat(batching.steps(len(splits.train)))
    return replace(splits, train=train, validation=None if splits.validation is None else batch, test=None, raw={})


def limit_evaluation(splits: Splits, size: int, has_test: bool = True) -> Splits:
    limited: dict[str, Any] = {}
    for name, examples in splits.by_name().items():
        if name == "validation" or (name == "test" and has_test):
            limited[name] = limit_examples(examples, size)
    return replace(splits, **limited)
