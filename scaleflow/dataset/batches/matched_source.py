"""Views of sources: with the classes of an earlier run, with levels of quantiles, or with all splits as one."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import tensorflow as tf

from scaleflow.dataset.batches.rows import to_rows
from scaleflow.dataset.batches.source_checks import check_contract
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
    """Base of sources that change another source. Attributes that they do not define come from the other source.

    Attributes:
        source: the other source.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["source"], name)


def find_original(source: Any) -> Any:
    """Returns the source behind all views."""
    while isinstance(source, SourceView):
        source = source.source
    return source


def read_targets(split: str, examples: Rows) -> Iterator[Any]:
    """Yields (targets,) or (targets, weights) of a split in batches, in order: arrays [b, ...], or dicts of arrays.

    Raises:
        ConfigError: if an example cannot be read.
    """
    with refuse_unreadable(split, examples):
        yield from examples.iterate(lambda _, *rest: rest)


#: Maximum number of examples of an unknown class that a message names.
MAX_EXAMPLES = 5


@dataclass(frozen=True)
class ClassMatch:
    """How the targets of one output change."""

    source_output: Outputs
    wanted: Outputs  # the output with the classes of the earlier run
    places: Sequence[int | None]  # for each class or label of the source its index there; None if it is unknown

    @property
    def unknown(self) -> list[int]:
        """The classes of the source that are unknown and may not occur."""
        unknown_are_ignored = self.wanted.ignore is not None and self.source_output.ignore is None
        if unknown_are_ignored:
            return []
        return [number for number, place in enumerate(self.places) if place is None]

    def convert(self, targets: tf.Tensor) -> tf.Tensor:
        """Converts targets [..., *source_output.target_shape] to [..., *wanted.target_shape]."""
        if self.source_output.kind == "multi_label":
            return self._convert_labels(targets)
        numbers = tf.cast(targets, tf.int32)
        place_of_unknown = self.wanted.ignore or 0
        places = tf.constant([place_of_unknown if place is None else place for place in self.places])
        ignored = self.source_output.ignore
        if ignored is None:
            classes = tf.gather(places, numbers)
        else:
            is_ignored = tf.equal(targets, tf.cast(ignored, targets.dtype))
            classes = tf.gather(places, tf.where(is_ignored, 0, numbers))
            classes = tf.where(is_ignored, ignored, classes)
        if self.source_output.kind == self.wanted.kind:
            return tf.cast(classes, targets.dtype)
        if self.source_output.kind == "binary":
            return classes[..., 0]
        return tf.cast(classes[..., None], tf.float32)

    def _convert_labels(self, targets: tf.Tensor) -> tf.Tensor:
        """Orders the labels as the earlier run did. Labels that the source lacks are 0."""
        place_of_absent = len(self.places)
        with_absent = tf.concat([targets, tf.zeros_like(targets[..., :1])], axis=-1)
        order: list[int] = []
        for label in range(self.wanted.shape[-1]):
            order.append(self.places.index(label) if label in self.places else place_of_absent)
        return tf.gather(with_absent, order, axis=-1)


def match_source(source: Source, earlier: EarlierState) -> Source:
    """Returns a view of a source with the outputs of an earlier run: the same kinds, and the same classes in order.

    Raises ConfigError if the source violates its interface, or its outputs are of other kinds.
    """
    check_contract(source)
    matches: dict[str, ClassMatch] = {}

    def match(name: str, source_output: Outputs) -> Outputs:
        matched = match_outputs(name, source_output, earlier)
        if isinstance(matched, ClassMatch):
            matches[name] = matched
            return matched.wanted
        return matched

    outputs = map_named(match, source.outputs)
    return MatchedSource(source, outputs, matches) if outputs != source.outputs else source


def match_outputs(name: str, source_output: Outputs, earlier: EarlierState) -> Outputs | ClassMatch:
    """Returns how the targets of an output change. If they do not, returns the output, whose description may change."""
    known = earlier.find_outputs(name)
    label = f"dataset: {label_leaf('targets', name)}"
    if known is None or known == source_output:
        return source_output
    if not is_alike(known, source_output):
        if earlier.extends:
            return source_output
        raise ConfigError(
            f"{label} are {source_output.kind} of shape {source_output.target_shape}, and those of the earlier run are "
            f"{known.kind} of shape {known.target_shape}"
        )
    if known.kind == "regression":
        return source_output if earlier.extends else replace(source_output, scaling=known.scaling)
    has_one_names_only = (known.names is None) != (source_output.names is None)
    if earlier.extends:
        if not set(known.names or ()) & set(source_output.names or ()):
            return source_output  # another task
        known = extend_classes(known, source_output.names or ())
    places = match_classes(label, source_output, known, has_names=not has_one_names_only)
    shape = known.shape if known.is_one_class else (*source_output.shape[:-1], known.shape[-1])
    ignore = source_output.ignore if known.ignore is None else known.ignore
    return ClassMatch(source_output, replace(known, shape=shape, ignore=ignore), places)


def match_classes(label: str, source_output: Outputs, known: Outputs, has_names: bool) -> Sequence[int | None]:
    """Returns for each class of the source its index in the earlier run; None if it is unknown.

    Args:
        label: names the targets in messages.
        source_output: the output of the source.
        known: the output of the earlier run.
        has_names: whether both have names of classes, or neither. Otherwise, equal numbers are equal classes.
    """
    from scaleflow.serving.cells import match_names  # it imports pyarrow and pandas

    source_classes = list_classes(source_output)
    known_classes = list_classes(known)
    if has_names:
        places: Sequence[int | None] = match_names(source_classes, known_classes)
        return places
    if len(source_classes) != len(known_classes):
        raise ConfigError(
            f"{label} have {len(source_classes)} classes, and the earlier run knows {len(known_classes)}; they can be "
            "told apart only if both have names: set Outputs.names"
        )
    return range(len(known_classes))


def is_alike(known: Outputs, source_output: Outputs) -> bool:
    """Returns whether two outputs are of the same kind. One class per example may be one of two or of several."""
    if known.is_one_class or source_output.is_one_class:
        return known.is_one_class and source_output.is_one_class
    if known.kind != source_output.kind or len(known.shape) != len(source_output.shape):
        return False
    return known.kind not in ("regression", "binary") or known.shape == source_output.shape


def list_classes(outputs: Outputs) -> tuple[str, ...]:
    """Returns the names of the classes or labels, or their numbers if they have no names."""
    count = 2 if outputs.kind == "binary" else outputs.shape[-1]
    return tuple(outputs.names or map(str, range(count)))


class MatchedSource(SourceView):
    """A source with the classes of an earlier run.

    Args:
        source: the other source.
        outputs: its outputs, with the classes of the earlier run.
        matches: the changes of targets, by the name of the output.
    """

    def __init__(self, source: Source, outputs: OutputStructure, matches: Mapping[str, ClassMatch]) -> None:
        super().__init__(source)
        self.outputs = outputs
        self._matches = matches
        notes = list(getattr(source, "notes", ()))
        for name, match in matches.items():
            note = describe_absent_labels(name, match)
            if note:
                notes.append(note)
        self.notes = tuple(notes)

    def load(self, split: str) -> Examples:
        """Returns the examples of a split. Raises ConfigError if some have a class that the earlier run lacks."""
        examples = to_rows(self.source.load(split)).check_targets(self.source.outputs, split)
        for name, match in self._matches.items():
            if match.unknown:
                refuse_unknown(split, examples, name, match=match)
        return cast(Examples, examples.map_targets(self._convert))

    def _convert(self, targets: Any) -> Any:
        def convert(name: str, leaf: Any) -> Any:
            if name not in self._matches:
                return leaf
            return self._matches[name].convert(tf.convert_to_tensor(leaf))

        return map_named(convert, targets)


class LevelledSource(SourceView):
    """A source of numbers whose quantiles are predicted (`Outputs.levels`)."""

    def __init__(self, source: Source, levels: Sequence[float]) -> None:
        super().__init__(source)
        check_contract(source)
        self.outputs = map_leaves(lambda outputs: replace(outputs, levels=tuple(levels)), source.outputs)


def describe_absent_labels(name: str, match: ClassMatch) -> str:
    """Returns a note about labels that the source lacks; "" if it has all. Absent classes need no note."""
    if match.source_output.kind != "multi_label":
        return ""
    absent = [label for number, label in enumerate(list_classes(match.wanted)) if number not in match.places]
    if not absent:
        return ""
    return (
        f"dataset: {label_leaf('targets', name)} do not have {show_classes(absent)}, which the earlier run knows: no "
        "example counts as having it"
    )


def refuse_unknown(split: str, examples: Rows, name: str, match: ClassMatch) -> None:
    """Raises ConfigError if examples of a split have unknown classes. The message names the classes and examples."""
    places_by_class = find_unknown_classes(split, examples, name, match=match)
    if not places_by_class:
        return
    names = list_classes(match.source_output)
    parts: list[str] = []
    for unknown, places in places_by_class.items():
        shown = ", ".join(examples.name_rows(places[:MAX_EXAMPLES]))
        rest = f" and {len(places) - MAX_EXAMPLES} more" if len(places) > MAX_EXAMPLES else ""
        parts.append(f"{names[unknown]} ({shown}{rest})")
    raise ConfigError(
        f"dataset: {label_leaf('targets', name)} of {split!r} have {show_classes(parts)}, expected a class of the "
        f"training split ({show_classes(list_classes(match.wanted))})"
    )


def find_unknown_classes(split: str, examples: Rows, name: str, match: ClassMatch) -> dict[int, list[int]]:
    """Returns the places of the examples with unknown classes, by class."""
    places_by_class: dict[int, list[int]] = {}
    first = 0
    for batch, *_ in read_targets(split, examples):
        targets = np.asarray(name_leaves(batch)[name])
        rows = targets.reshape(len(targets), -1)
        for unknown in match.unknown:
            has_class = (rows == unknown).any(axis=1)
            if match.source_output.kind == "multi_label":
                has_class = rows[:, unknown] > 0
            if has_class.any():
                places = first + np.flatnonzero(has_class)
                places_by_class.setdefault(unknown, []).extend(places.tolist())
        first += len(targets)
    return places_by_class


class WholeSource(SourceView):
    """A source whose split `train` has the examples of all splits of another source.

    Args:
        source: the other source.
    """

    splits = ("train",)

    def load(self, split: str) -> Examples:
        return join_examples([self.source.load(name) for name in self.source.splits])


def join_examples(parts: list[Examples]) -> Examples:
    """Joins the examples of several splits. If only some have weights, the weights of the others are 1."""
    if len(parts) == 1:
        return parts[0]
    splits = [to_rows(part) for part in parts]
    is_weighted = any(split.is_weighted for split in splits)
    arrays = [split for split in splits if isinstance(split, Arrays)]
    if len(arrays) == len(splits):
        return join_arrays(arrays, is_weighted)
    streams: list[tf.data.Dataset] = []
    faults: list[str] = []
    for split in splits:
        stream = split.stream()
        streams.append(stream.map(add_weight) if is_weighted else stream)
        faults.extend(split.faults)
    whole = functools.reduce(tf.data.Dataset.concatenate, streams)
    return Stream(whole, sum(len(split) for split in splits), faults=faults)


def join_arrays(splits: Sequence[Arrays], is_weighted: bool) -> Arrays:
    """Joins splits that are all in memory. `is_weighted`: whether one of them has weights."""
    parts: list[Any] = []
    places: list[Any] = []  # in the file that the splits are drawn from
    for split in splits:
        if is_weighted and split.weights is None:
            parts.append(replace(split, weights=np.ones(len(split), np.float32)).parts)
        else:
            parts.append(split.parts)
        if split.rows is not None:
            places.append(split.rows)
    joined = Arrays(*tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *parts))
    if len(places) < len(splits):
        return joined
    return replace(joined, rows=np.concatenate(places))


def add_weight(*example: Any) -> tuple[Any, ...]:
    return example if len(example) == 3 else (*example, tf.constant(1.0))
