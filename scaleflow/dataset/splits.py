"""From a source to the three splits of a run: limited, the validation split taken off, bad examples left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import keras
import numpy as np

from scaleflow.dataset.cache import Transform, cache_split, refuse_unreadable
from scaleflow.dataset.files import draw
from scaleflow.dataset.fingerprint import Fingerprint, fingerprint_splits
from scaleflow.dataset.normalise import Normalise
from scaleflow.dataset.preprocessing import learn_on_chief, make_layer, make_transform
from scaleflow.dataset.records import Records, cache_records, check_decoded_targets, decode_records, record_bytes
from scaleflow.dataset.unreadable import describe_examples, drop_records, find_unreadable
from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    Arrays,
    Dataset,
    Emit,
    Examples,
    Inputs,
    Kind,
    Outputs,
    Preprocessing,
    Source,
    Stream,
    Workers,
)

#: Records of a stream up to this size, on average, are read twice so that the validation split can be drawn from all.
SMALL_RECORD_BYTES = 16 << 10

#: How many bad examples a note names.
NAMED = 5


@dataclass(frozen=True)
class Splits:
    """What a run trains, validates and tests on; the last two may be missing.

    Attributes:
        inputs, outputs: what the model takes, behind the preprocessing, and what it returns.
        sample: a few raw inputs of the training split.
        transform: the preprocessing of what is read as it goes; that of arrays is done.
        preprocessing_model: makes the preprocessing anew, as the first part of a saved model.
        fingerprints: what each raw split looks like, by its name.
        is_drawn_as_read: whether the validation split is drawn from a stream as its records are read.
    """

    train: Examples
    validation: Examples | None
    test: Examples | None
    inputs: Inputs
    outputs: Outputs
    sample: np.ndarray[Any, Any]
    transform: Transform | None = None
    preprocessing_model: Callable[[], keras.Layer] | None = None
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)
    is_drawn_as_read: bool = False

    def counts(self) -> Mapping[str, int]:
        return {name: len(examples) for name, examples in self.by_name().items()}

    def by_name(self) -> Mapping[str, Examples]:
        """Those that there are."""
        roles = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: examples for name, examples in roles.items() if examples is not None}


class SingleProcess:
    """`Workers` of a single process."""

    def from_chief(self, make: Callable[[], str]) -> str:
        return make()

    def all(self, found: bool) -> bool:
        return found


def ignore_event(event: str, /, **fields: Any) -> None:
    """An `Emit` to which nothing matters."""


def prepare_splits(
    source: Source,
    options: Dataset,
    seed: int,
    workers: Workers | None = None,
    emit: Emit = ignore_event,
    preprocesses: bool = True,
) -> Splits:
    """Loads, checks and preprocesses the splits.

    Args:
        source: any object that keeps the contract.
        options: what the pipeline does with it.
        seed: decides which examples of the training split are held out for validation.
        workers: those that train in step; the chief learns the preprocessing for all.
        emit: is told what was left out.
        preprocesses: False leaves the inputs raw, for a saved model, which preprocesses them itself.

    Raises:
        ConfigError: if the source does not keep the contract, a split that was named is missing, or an example that has
        to
            be read at the start can't be.
    """
    for note in getattr(source, "notes", ()):
        emit("note", text=note)
    check_contract(source)
    workers = workers or SingleProcess()
    given = {name: clean_split(source, name, options, workers, emit) for name in list_needed_splits(source, options)}
    if "validation" in source.splits and "validation" not in given:
        emit("note", text="the dataset's split 'validation' is not used; dataset.validation=validation would use it")
    train, validation, is_drawn = given["train"], None, False
    if isinstance(options.validation, str):
        validation = given[options.validation]
    else:
        train, validation, is_drawn = hold_out_examples(train, options.validation or 0.0, seed, emit)
    sample = first_inputs(train, 8)
    raw = Splits(train, validation, given.get("test"), source.inputs, source.outputs, sample)
    raw = replace(raw, fingerprints=fingerprint_splits(raw.by_name()), is_drawn_as_read=is_drawn)
    own = choose_preprocessing(source, options) if preprocesses else None
    return cache_splits(preprocess_splits(own, raw, workers), options.cache, workers)


def list_needed_splits(source: Source, options: Dataset) -> list[str]:
    """The splits that are read, each once."""
    names = ["train", *([options.validation] if isinstance(options.validation, str) else [])]
    return list(dict.fromkeys([*names, *(["test"] if "test" in source.splits else [])]))


def clean_split(source: Source, split: str, options: Dataset, workers: Workers, emit: Emit) -> Examples:
    """One split, checked and limited, without what is to be skipped."""
    examples = load_split(source, split)
    if isinstance(examples, Stream):
        if options.on_bad_example == "raise":
            refuse_faults(split, examples)
        examples = cache_records(split, examples)
    examples = limit_examples(examples, options.limit)
    if isinstance(examples, Arrays):
        return examples
    examples = check_decoded_targets(examples, source.outputs)
    return drop_unreadable(split, examples, workers, emit) if options.on_bad_example == "skip" else examples


def refuse_faults(split: str, stream: Stream) -> None:
    """Refuses examples of which the source has said that they cannot be read."""
    if stream.faults:
        named = "; ".join(stream.faults[:NAMED])
        raise ConfigError(f"dataset: {split!r} has bad examples: {named}; dataset.on_bad_example=skip leaves such out")


def drop_unreadable(split: str, stream: Stream, workers: Workers, emit: Emit) -> Stream:
    """The stream without the examples that cannot be read, which a note counts and names."""
    places = json.loads(workers.from_chief(lambda: json.dumps(find_unreadable(stream))))
    if not places:
        return stream
    if len(places) == len(stream):
        first = describe_examples(stream, places[:1])[0]
        raise ConfigError(
            f"dataset.on_bad_example=skip: none of the {len(stream)} examples of {split!r} can be read: {first}"
        )
    named = ", ".join(map(str, describe_examples(stream, places[:NAMED])))
    more = f" and {len(places) - NAMED} more" if len(places) > NAMED else ""
    skipped = f"left out {len(places)} of the {len(stream)} examples of {split!r} that cannot be read"
    emit("note", text=f"dataset.on_bad_example=skip: {skipped}: {named}{more}")
    return drop_records(stream, places)


def choose_preprocessing(source: Source, options: Dataset) -> Preprocessing | None:
    """The source's own preprocessing, or what the config asks for."""
    own: Preprocessing | None = getattr(source, "preprocessing", None)
    if not options.normalise:
        return own
    if own is not None:
        raise ConfigError(
            f"dataset.normalise=true: {type(source).__name__} preprocesses its inputs itself, with "
            f"{type(own).__name__}; leave it away"
        )
    return Normalise(source.inputs)


def preprocess_splits(preprocessing: Preprocessing | None, splits: Splits, workers: Workers) -> Splits:
    """The splits with what their preprocessing is, learned from the training split."""
    if preprocessing is None:
        return splits
    learned = learn_on_chief(preprocessing, splits.train, workers)
    inputs = preprocessing.features(learned)
    transform = make_transform(preprocessing, learned, splits.sample, inputs)
    return replace(
        splits, inputs=inputs, transform=transform, preprocessing_model=lambda: make_layer(preprocessing, learned)
    )


def cache_splits(splits: Splits, cache: str, workers: Workers) -> Splits:
    """The splits, those that `dataset.cache` keeps as arrays; one with two roles is kept once."""
    done: dict[int, Examples] = {}
    for name, examples in splits.by_name().items():
        if id(examples) not in done:
            done[id(examples)] = cache_split(name, examples, cache, splits.transform, workers)
    held, test = (None if examples is None else done[id(examples)] for examples in (splits.validation, splits.test))
    return replace(splits, train=done[id(splits.train)], validation=held, test=test)


def first_inputs(examples: Examples, count: int) -> np.ndarray[Any, Any]:
    """A few raw inputs of the training split, [count, *shape]."""
    if isinstance(examples, Arrays):
        return np.array(examples.inputs[:count])
    with refuse_unreadable("train", examples):
        return np.stack([x for x, _ in decode_records(examples, examples.dataset.take(count)).as_numpy_iterator()])


def check_contract(source: Any) -> None:
    """Refuses an object that is no `Source`, naming what it lacks."""
    name = type(source).__name__
    for attribute, kind in (("inputs", Inputs), ("outputs", Outputs)):
        # What fails inside a property is not taken for its absence.
        found = getattr(source, attribute) if hasattr(type(source), attribute) else getattr(source, attribute, None)
        if not isinstance(found, kind):
            raise ConfigError(f"dataset: {name}.{attribute} must be a scaleflow.interfaces.{kind.__name__}")
    if "train" not in (getattr(source, "splits", None) or ()):
        raise ConfigError(f"dataset: {name}.splits must name the splits, 'train' among them")
    if not callable(getattr(source, "load", None)):
        raise ConfigError(f"dataset: {name} needs a method load(split)")
    if source.outputs.kind not in get_args(Kind):
        raise ConfigError(
            f"dataset: {name}.outputs.kind={source.outputs.kind}: expected one of {', '.join(get_args(Kind))}"
        )


def load_split(source: Source, split: str) -> Examples:
    if split not in source.splits:
        raise ConfigError(f"dataset.validation={split}: there is no such split; there is {', '.join(source.splits)}")
    examples = source.load(split)
    if not isinstance(examples, Arrays | Stream):
        raise ConfigError(f"dataset: load({split!r}) returned a {type(examples).__name__}, expected Arrays or a Stream")
    if not len(examples):
        raise ConfigError(f"dataset: the split {split!r} is empty")
    check_shapes(source, split, examples)
    return examples


def check_shapes(source: Source, split: str, examples: Examples) -> None:
    """Refuses examples that are not what the source says they are."""
    target_shape = () if source.outputs.kind == "classification" else tuple(source.outputs.shape)
    found = describe_arrays(split, examples) if isinstance(examples, Arrays) else describe_stream(split, examples)
    for what, shape, said in zip(("inputs", "targets"), found[:2], (source.inputs.shape, target_shape), strict=True):
        if shape != tuple(said):
            raise ConfigError(f"dataset: {what} of {split!r} have shape {shape}, and the source says {tuple(said)}")
    if found[2] != source.inputs.dtype:
        raise ConfigError(f"dataset: inputs of {split!r} are {found[2]}, and the source says {source.inputs.dtype}")
    if isinstance(examples, Arrays):
        check_targets(source.outputs, split, examples.targets)


def check_targets(outputs: Outputs, split: str, targets: np.ndarray[Any, Any]) -> None:
    """Refuses targets in memory that their kind does not allow."""
    kind = outputs.kind
    if targets.dtype.kind not in ("iu" if kind == "classification" else "iufb"):
        expected = "integers" if kind == "classification" else "numbers"
        raise ConfigError(f"dataset: {kind} targets of {split!r} are {targets.dtype.name}, expected {expected}")
    if kind == "regression":
        return
    least, most = targets.min(), targets.max()
    last = outputs.shape[-1] - 1 if kind == "classification" else 1
    if least < 0 or most > last:
        raise ConfigError(f"dataset: {kind} targets of {split!r} reach from {least} to {most}, expected 0 to {last}")


def describe_arrays(split: str, examples: Arrays) -> tuple[Any, Any, str]:
    """(input shape, target shape, input dtype) of examples in memory."""
    inputs, targets = examples.inputs, examples.targets
    for what, array in (("inputs", inputs), ("targets", targets)):
        if not isinstance(array, np.ndarray):
            raise ConfigError(f"dataset: {what} of {split!r} are a {type(array).__name__}, expected a numpy array")
    if len(inputs) != len(targets):
        raise ConfigError(f"dataset: load({split!r}) gave {len(inputs)} inputs and {len(targets)} targets")
    return inputs.shape[1:], targets.shape[1:], "string" if inputs.dtype.kind in "OSU" else inputs.dtype.name


def describe_stream(split: str, examples: Stream) -> tuple[Any, Any, str]:
    """(input shape, target shape, input dtype) of a stream."""
    spec = decode_records(examples).element_spec
    if not (isinstance(spec, tuple) and len(spec) == 2 and all(hasattr(s, "shape") for s in spec)):
        raise ConfigError(f"dataset: the stream of {split!r} must yield (input, target), and yields {spec}")
    count = int(examples.dataset.cardinality())
    if count != examples.length and count >= 0:
        raise ConfigError(
            f"dataset: the stream of {split!r} holds {count} examples, and the source says {examples.length}"
        )
    shapes = [tuple(s.shape) if s.shape.rank is not None else "unknown" for s in spec]
    return shapes[0], shapes[1], spec[0].dtype.name


def limit_examples(examples: Examples, limit: int | None) -> Examples:
    """The first `limit` examples."""
    if limit is None or limit >= len(examples):
        return examples
    if isinstance(examples, Arrays):
        return Arrays(examples.inputs[:limit], examples.targets[:limit])
    if isinstance(examples, Records):
        return examples.select(np.arange(limit))
    return replace(examples, dataset=examples.dataset.take(limit), length=limit)


def hold_out_examples(
    examples: Examples, fraction: float, seed: int, emit: Emit
) -> tuple[Examples, Examples | None, bool]:
    """Divides a training split.

    Which examples are held out is drawn from `seed`. Of a stream of large records they are the first ones, since a draw
    would read all of it at each validation.

    Returns:
        (train, validation, whether it is drawn from a stream as its records are read).
    """
    count = round(len(examples) * fraction)
    if not count:
        return examples, None, False
    if count >= len(examples):
        raise ConfigError(f"dataset.validation={fraction}: leaves nothing of {len(examples)} examples to train on")
    if isinstance(examples, Stream) and not isinstance(examples, Records):
        return hold_out_of_stream(examples, count, fraction, seed, emit)
    order = np.random.default_rng([seed, 1]).permutation(len(examples))
    return select_examples(examples, np.sort(order[count:])), select_examples(examples, np.sort(order[:count])), False


def hold_out_of_stream(
    stream: Stream, count: int, fraction: float, seed: int, emit: Emit
) -> tuple[Stream, Stream, bool]:
    """The same for a stream whose records are not in memory."""
    dataset = stream.dataset.take(len(stream))
    is_drawn = record_bytes(stream) <= SMALL_RECORD_BYTES
    if is_drawn:
        rest, held_out = (draw(dataset, len(stream), count, (seed, 1), which) for which in (False, True))
    else:
        emit(
            "note",
            text=f"dataset.validation={fraction}: the first {count} examples of the stream are held out, because its "
            "records are too large to read all of them again at each validation; if they are sorted, by class for "
            "example, shuffle the files or name a split: dataset.validation=NAME",
        )
        rest, held_out = dataset.skip(count), dataset.take(count)
    train = replace(stream, dataset=rest, length=len(stream) - count)
    return train, replace(stream, dataset=held_out, length=count), is_drawn


def select_examples(examples: Arrays | Records, places: np.ndarray[Any, Any]) -> Examples:
    if isinstance(examples, Records):
        return examples.select(places)
    return Arrays(examples.inputs[places], examples.targets[places])
