"""From a source to the three splits of a run: limited, and the validation split taken off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from scaleflow.errors import Refusal
from scaleflow.interfaces import Arrays, Dataset, Examples, Inputs, Kind, Outputs, Source, Stream


@dataclass(frozen=True)
class Splits:
    """What a run trains, validates and tests on; the last two may be missing."""

    train: Examples
    validation: Examples | None
    test: Examples | None

    def counts(self) -> Mapping[str, int]:
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: len(examples) for name, examples in named.items() if examples is not None}


def prepare(source: Source, options: Dataset, seed: int) -> Splits:
    """Loads and checks the splits.

    Args:
        source: any object that keeps the contract.
        seed: decides which examples of an in-memory training split are held out for validation.

    Raises:
        Refusal: if the source does not keep the contract, or a split that was named is missing.
    """
    check_contract(source)
    validation: Examples | None
    if isinstance(options.validation, str):
        train, validation = load(source, "train"), load(source, options.validation)
        validation = limited(validation, options.limit)
        train = limited(train, options.limit)
    else:
        train = limited(load(source, "train"), options.limit)
        train, validation = hold_out(train, options.validation or 0.0, seed)
    test = limited(load(source, "test"), options.limit) if "test" in source.splits else None
    return Splits(train, validation, test)


def check_contract(source: Any) -> None:
    """Refuses an object that is no `Source`, naming what it lacks."""
    name = type(source).__name__
    for attribute, kind in (("inputs", Inputs), ("outputs", Outputs)):
        if not isinstance(getattr(source, attribute, None), kind):
            raise Refusal(f"dataset: {name}.{attribute} must be a scaleflow.interfaces.{kind.__name__}")
    if "train" not in (getattr(source, "splits", None) or ()):
        raise Refusal(f"dataset: {name}.splits must name the splits, 'train' among them")
    if not callable(getattr(source, "load", None)):
        raise Refusal(f"dataset: {name} needs a method load(split)")
    if source.outputs.kind not in get_args(Kind):
        raise Refusal(
            f"dataset: {name}.outputs.kind={source.outputs.kind}: expected one of {', '.join(get_args(Kind))}"
        )


def load(source: Source, split: str) -> Examples:
    if split not in source.splits:
        raise Refusal(f"dataset.validation={split}: there is no such split; there is {', '.join(source.splits)}")
    examples = source.load(split)
    if not isinstance(examples, Arrays | Stream):
        raise Refusal(f"dataset: load({split!r}) returned a {type(examples).__name__}, expected Arrays or a Stream")
    if not len(examples):
        raise Refusal(f"dataset: the split {split!r} is empty")
    check_shapes(source, split, examples)
    return examples


def check_shapes(source: Source, split: str, examples: Examples) -> None:
    """Refuses examples that are not what the source says they are."""
    target_shape = () if source.outputs.kind == "classification" else tuple(source.outputs.shape)
    found = look_at_arrays(split, examples) if isinstance(examples, Arrays) else look_at_stream(split, examples)
    for what, shape, said in zip(("inputs", "targets"), found[:2], (source.inputs.shape, target_shape), strict=True):
        if shape != tuple(said):
            raise Refusal(f"dataset: {what} of {split!r} have shape {shape}, and the source says {tuple(said)}")
    if found[2] != source.inputs.dtype:
        raise Refusal(f"dataset: inputs of {split!r} are {found[2]}, and the source says {source.inputs.dtype}")
    if isinstance(examples, Arrays):
        check_targets(source.outputs, split, examples.targets)


def check_targets(outputs: Outputs, split: str, targets: np.ndarray[Any, Any]) -> None:
    """Refuses targets in memory that their kind does not allow."""
    kind = outputs.kind
    if targets.dtype.kind not in ("iu" if kind == "classification" else "iufb"):
        expected = "integers" if kind == "classification" else "numbers"
        raise Refusal(f"dataset: {kind} targets of {split!r} are {targets.dtype.name}, expected {expected}")
    if kind == "regression":
        return
    least, most = targets.min(), targets.max()
    last = outputs.shape[-1] - 1 if kind == "classification" else 1
    if least < 0 or most > last:
        raise Refusal(f"dataset: {kind} targets of {split!r} reach from {least} to {most}, expected 0 to {last}")


def look_at_arrays(split: str, examples: Arrays) -> tuple[Any, Any, str]:
    """(input shape, target shape, input dtype) of examples in memory."""
    inputs, targets = examples.inputs, examples.targets
    for what, array in (("inputs", inputs), ("targets", targets)):
        if not isinstance(array, np.ndarray):
            raise Refusal(f"dataset: {what} of {split!r} are a {type(array).__name__}, expected a numpy array")
    if len(inputs) != len(targets):
        raise Refusal(f"dataset: load({split!r}) gave {len(inputs)} inputs and {len(targets)} targets")
    return inputs.shape[1:], targets.shape[1:], inputs.dtype.name


def look_at_stream(split: str, examples: Stream) -> tuple[Any, Any, str]:
    """(input shape, target shape, input dtype) of a stream."""
    spec = examples.dataset.element_spec
    if not (isinstance(spec, tuple) and len(spec) == 2 and all(hasattr(s, "shape") for s in spec)):
        raise Refusal(f"dataset: the stream of {split!r} must yield (input, target), and yields {spec}")
    count = int(examples.dataset.cardinality())
    if count != examples.length and count >= 0:
        raise Refusal(f"dataset: the stream of {split!r} holds {count} examples, and the source says {examples.length}")
    shapes = [tuple(s.shape) if s.shape.rank is not None else "unknown" for s in spec]
    return shapes[0], shapes[1], spec[0].dtype.name


def limited(examples: Examples, limit: int | None) -> Examples:
    """The first `limit` examples."""
    if limit is None or limit >= len(examples):
        return examples
    if isinstance(examples, Arrays):
        return Arrays(examples.inputs[:limit], examples.targets[:limit])
    return Stream(examples.dataset.take(limit), limit)


def hold_out(examples: Examples, fraction: float, seed: int) -> tuple[Examples, Examples | None]:
    """Divides a training split into (train, validation).

    Examples in memory are drawn at random by `seed`; of a stream the first ones are held out, since
    nothing else can be had from it without reading it twice.
    """
    count = round(len(examples) * fraction)
    if not count:
        return examples, None
    if count >= len(examples):
        raise Refusal(f"dataset.validation={fraction}: leaves nothing of {len(examples)} examples to train on")
    if isinstance(examples, Stream):
        rest = Stream(examples.dataset.skip(count), len(examples) - count)
        return rest, Stream(examples.dataset.take(count), count)
    order = np.random.default_rng([seed, 1]).permutation(len(examples))
    held, kept = np.sort(order[:count]), np.sort(order[count:])
    return (
        Arrays(examples.inputs[kept], examples.targets[kept]),
        Arrays(examples.inputs[held], examples.targets[held]),
    )
