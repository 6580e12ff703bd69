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
    target_shape = () if source.outputs.kind == "classification" else source.outputs.shape
    if isinstance(examples, Arrays):
        shapes = [examples.inputs.shape[1:], examples.targets.shape[1:]]
        dtype = examples.inputs.dtype.name
        if len(examples.inputs) != len(examples.targets):
            raise Refusal(
                f"dataset: load({split!r}) gave {len(examples.inputs)} inputs and {len(examples.targets)} targets"
            )
    else:
        spec = examples.dataset.element_spec
        if not (isinstance(spec, tuple) and len(spec) == 2):
            raise Refusal(f"dataset: the stream of {split!r} must yield (input, target), and yields {spec}")
        shapes = [tuple(s.shape) for s in spec]
        dtype = spec[0].dtype.name
    for what, found, said in zip(("inputs", "targets"), shapes, (source.inputs.shape, target_shape), strict=True):
        if tuple(found) != tuple(said):
            raise Refusal(f"dataset: {what} of {split!r} have shape {tuple(found)}, and the source says {tuple(said)}")
    if dtype != source.inputs.dtype:
        raise Refusal(f"dataset: inputs of {split!r} are {dtype}, and the source says {source.inputs.dtype}")


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
