"""Sources that change what another one gives: its classes become those of an earlier run, all splits become one."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import tensorflow as tf

from scaleflow.dataset.batches.rows import check_contract, to_rows
from scaleflow.dataset.batches.unreadable import refuse_unreadable
from scaleflow.dataset.reading.targets import show_classes
from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    Arrays,
    EarlierState,
    Examples,
    Outputs,
    OutputStructure,
    Rows,
    Source,
    Stream,
    extend_classes,
    label_leaf,
    map_leaves,
    map_named,
    name_leaves,
)


class SourceView:
    """Base of sources that change what another source gives; whatever they do not define is that of the other one.

    Attributes:
        source: the other source.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["source"], name)


def find_original(source: Any) -> Any:
    """Returns the source that the user names, of which a source may be a view."""
    return find_original(source.source) if isinstance(source, SourceView) else source


def read_targets(split: str, examples: Rows) -> Iterator[Any]:
    """Yields (targets,) or (targets, weights) of a split in batches, in their order: arrays [b, ...], or dicts of them.

    Raises:
        ConfigError: if an example cannot be read.
    """
    with refuse_unreadable(split, examples):
        yield from examples.iterate(lambda _, *rest: rest)


#: The most examples of unknown classes that a message names.
MOST_EXAMPLES = 5


@dataclass(frozen=True)
class ClassMatch:
    """How the targets of one output change."""

    given: Outputs  # what the source says of the output
    wanted: Outputs  # what it is among the classes of the earlier run
    #: For each class or label of the source its index there; None for one that is not known
    places: Sequence[int | None]

    @property
    def unknown(self) -> list[int]:
        """The classes of the source that are not known and may not occur."""
        is_counted = self.wanted.ignore is not None and self.given.ignore is None
        return [] if is_counted else [n for n, place in enumerate(self.places) if place is None]

    def convert(self, targets: tf.Tensor) -> tf.Tensor:
        """Returns targets [..., *given.target_shape] as [..., *wanted.target_shape]."""
        if self.given.kind == "multi_label":
            order = [self.places.index(n) if n in self.places else -1 for n in range(self.wanted.shape[-1])]
            padded = tf.concat([targets, tf.zeros_like(targets[..., :1])], axis=-1)  # -1: a label that is not there
            return tf.gather(padded, [n % (len(self.places) + 1) for n in order], axis=-1)
        ignored, unknown = self.given.ignore, self.wanted.ignore or 0
        is_ignored = None if ignored is None else tf.equal(targets, tf.cast(ignored, targets.dtype))
        numbers = tf.cast(targets, tf.int32)
        if is_ignored is not None:
            numbers = tf.where(is_ignored, 0, numbers)
        found = tf.gather(tf.constant([unknown if n is None else n for n in self.places]), numbers)
        if is_ignored is not None:
            found = tf.where(is_ignored, ignored, found)
        if self.given.kind == self.wanted.kind:
            return tf.cast(found, targets.dtype)
        return found[..., 0] if self.given.kind == "binary" else tf.cast(found[..., None], tf.float32)


def match_source(source: Source, earlier: EarlierState) -> Source:
    """Returns a source whose outputs are those of an earlier run: the same kinds, and the same classes in their order.

    Raises ConfigError if the source violates its interface, or its outputs are of other kinds.
    """
    check_contract(source)
    matches: dict[str, ClassMatch] = {}

    def match(name: str, given: Outputs) -> Outputs:
        found = match_outputs(name, given, earlier)
        if isinstance(found, ClassMatch):
            matches[name] = found
            return found.wanted
        return found

    outputs = map_named(match, source.outputs)
    return MatchedSource(source, outputs, matches) if outputs != source.outputs else source


def match_outputs(name: str, given: Outputs, earlier: EarlierState) -> Outputs | ClassMatch:
    """Returns how the targets of an output change, or the output if only its description does."""
    known = earlier.find_outputs(name)
    label = f"dataset: {label_leaf('targets', name)}"
    if known is None or known == given:
        return given
    if not is_alike(known, given):
        if earlier.extends:
            return given
        raise ConfigError(
            f"{label} are {given.kind} of shape {given.target_shape}, and those of the earlier run are {known.kind} of "
            f"shape {known.target_shape}"
        )
    if known.kind == "regression":
        return given if earlier.extends else replace(given, scaling=known.scaling)
    names = known.names, given.names
    if earlier.extends and not (known.names and given.names and set(known.names) & set(given.names)):
        return given  # another task
    from scaleflow.serving.cells import match_names  # it imports pyarrow and pandas

    if earlier.extends:
        known = extend_classes(known, given.names or ())
    places: Sequence[int | None] = match_names(list_classes(given), list_classes(known))
    if None in names and names != (None, None):
        if len(list_classes(given)) != len(list_classes(known)):
            raise ConfigError(
                f"{label} have {len(list_classes(given))} classes, and the earlier run knows "
                f"{len(list_classes(known))}; they can be told apart only if both have names: set Outputs.names"
            )
        places = range(len(list_classes(known)))
    shape = known.shape if known.is_one_class else (*given.shape[:-1], known.shape[-1])
    ignore = given.ignore if known.ignore is None else known.ignore
    return ClassMatch(given, replace(known, shape=shape, ignore=ignore), places)


def is_alike(known: Outputs, given: Outputs) -> bool:
    """Returns whether the targets mean the same. A class for each example may be one of two or of several."""
    if known.is_one_class or given.is_one_class:
        return known.is_one_class and given.is_one_class
    is_same = known.kind == given.kind and len(known.shape) == len(given.shape)
    return is_same and (known.kind not in ("regression", "binary") or known.shape == given.shape)


def list_classes(outputs: Outputs) -> tuple[str, ...]:
    """Returns the names of the classes or labels; their numbers if they have no names."""
    count = 2 if outputs.kind == "binary" else outputs.shape[-1]
    return tuple(outputs.names or map(str, range(count)))


class MatchedSource(SourceView):
    """A source with the classes of an earlier run.

    Args:
        source: the source.
        outputs: its outputs among the classes of the earlier run.
        matches: by the name of an output, how its targets change.
    """

    def __init__(self, source: Source, outputs: OutputStructure, matches: Mapping[str, ClassMatch]) -> None:
        super().__init__(source)
        self.outputs = outputs
        self._matches = matches
        absent = (note_absent_labels(name, match) for name, match in matches.items())
        self.notes = (*getattr(source, "notes", ()), *filter(None, absent))

    def load(self, split: str) -> Examples:
        """Returns the examples of a split. Raises ConfigError if some have a class that the earlier run lacks."""
        examples = to_rows(self.source.load(split)).check_targets(self.source.outputs, split)
        for name, match in self._matches.items():
            if match.unknown:
                refuse_unknown(split, examples, name, match=match)
        return cast(Examples, examples.map_targets(self._convert))

    def _convert(self, targets: Any) -> Any:
        def convert(name: str, each: Any) -> Any:
            return self._matches[name].convert(tf.convert_to_tensor(each)) if name in self._matches else each

        return map_named(convert, targets)


class LevelledSource(SourceView):
    """A source of numbers of which quantiles are predicted (`Outputs.levels`)."""

    def __init__(self, source: Source, levels: Sequence[float]) -> None:
        super().__init__(source)
        check_contract(source)
        self.outputs = map_leaves(lambda each: replace(each, levels=tuple(levels)), source.outputs)


def note_absent_labels(name: str, match: ClassMatch) -> str:
    """Says which labels the source does not have; empty if it has all. Classes that do not occur need no note."""
    absent = [each for n, each in enumerate(list_classes(match.wanted)) if n not in match.places]
    if match.given.kind != "multi_label" or not absent:
        return ""
    return (
        f"dataset: {label_leaf('targets', name)} do not have {show_classes(absent)}, which the earlier run knows: no "
        "example counts as having it"
    )


def refuse_unknown(split: str, examples: Rows, name: str, match: ClassMatch) -> None:
    """Raises ConfigError, with their classes and places, if examples of a split have classes that are not known."""
    found: dict[int, list[int]] = {}
    first = 0
    for batch, *_ in read_targets(split, examples):
        targets = np.asarray(name_leaves(batch)[name])
        rows = targets.reshape(len(targets), -1)
        for unknown in match.unknown:
            has = rows[:, unknown] > 0 if match.given.kind == "multi_label" else (rows == unknown).any(axis=1)
            if has.any():
                found.setdefault(unknown, []).extend((first + np.flatnonzero(has)).tolist())
        first += len(targets)
    if not found:
        return
    names = list_classes(match.given)
    parts = []
    for unknown, places in found.items():
        more = f" and {len(places) - MOST_EXAMPLES} more" if len(places) > MOST_EXAMPLES else ""
        parts.append(f"{names[unknown]} ({', '.join(examples.name_rows(places[:MOST_EXAMPLES]))}{more})")
    raise ConfigError(
        f"dataset: {label_leaf('targets', name)} of {split!r} have {show_classes(parts)}, expected a class of the "
        f"training split ({show_classes(list_classes(match.wanted))})"
    )


class WholeSource(SourceView):
    """A source whose split `train` has the examples of all splits of another source, each once.

    Args:
        source: the other source.
    """

    splits = ("train",)

    def load(self, split: str) -> Examples:
        return join_examples([self.source.load(each) for each in self.source.splits])


def join_examples(parts: list[Examples]) -> Examples:
    """Returns the examples of several splits as one; their weights are 1 where only others have weights."""
    if len(parts) == 1:
        return parts[0]
    rows = [to_rows(each) for each in parts]
    is_weighted = any(each.is_weighted for each in rows)
    arrays = [
        replace(each, weights=np.ones(len(each), np.float32)) if is_weighted and each.weights is None else each
        for each in rows
        if isinstance(each, Arrays)
    ]
    if len(arrays) == len(rows):
        joined = Arrays(*tf.nest.map_structure(lambda *parts: np.concatenate(parts), *(each.parts for each in arrays)))
        places = [each.rows for each in arrays if each.rows is not None]  # of a file from which splits are drawn
        return replace(joined, rows=np.concatenate(places)) if len(places) == len(arrays) else joined
    streams = [each.stream().map(add_weight) if is_weighted else each.stream() for each in rows]
    whole = functools.reduce(tf.data.Dataset.concatenate, streams)
    return Stream(whole, sum(map(len, rows)), faults=[fault for each in rows for fault in each.faults])


def add_weight(*example: Any) -> tuple[Any, ...]:
    return example if len(example) == 3 else (*example, tf.constant(1.0))
