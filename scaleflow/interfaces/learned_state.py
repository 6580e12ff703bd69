"""The learned state of a run: the facts that it learned from its data before training, in one record.

It is written once, and later commands read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any

from scaleflow.interfaces.data import ANSWERS, Inputs, InputStructure, Outputs, OutputStructure, map_named, name_leaves

#: The files of the record, in a run's folder, in each checkpoint and next to the Keras file in each exported model.
LEARNED_FILES = LEARNED_STATE, LEARNED_ARRAYS = "learned_state.json", "learned_state.npz"

#: The version of the record. A newer version is an error.
FORMAT = 1

#: Maximum number of new words or classes in a message.
NAMED = 5


@dataclass(frozen=True)
class LearnedPreprocessing:
    """The learned state of a `Preprocessing`."""

    path: str  # the dotted name of its class
    options: Mapping[str, Any]  # its attributes as JSON values
    learned: Any  # the result of its method `learn` as a JSON value


@dataclass(frozen=True)
class LearnedState:
    """Facts that a run learned from its data before training.

    Attributes:
        inputs: the source's inputs, before preprocessing.
        outputs: the source's outputs: kinds, names of classes in order, scales of targets.
        preprocessing: the learned preprocessing, by input name.
        source: the dotted name of the source's class.
        reading: how the source read its files, from its attribute `reading`: for a table the kinds of its columns, the
            delimiter and so on.
        splits: the number of examples and the digest of each split, by name.
        pictures: the names of inputs that are read from encoded pictures, such as JPEG files.
        schema: the properties of each column and target in a sample of the training split: kinds, ranges, categories,
            histograms. `dataset/schema.py` makes it; empty with `dataset.check=none`.
        sizes: the values of the model's arguments that can be `by_size`: layers of other sizes cannot be extended.
        split: the rule `dataset.split` that divided the rows.
    """

    inputs: InputStructure
    outputs: OutputStructure
    preprocessing: Mapping[str, LearnedPreprocessing] = field(default_factory=dict)
    source: str = ""
    reading: Mapping[str, Any] = field(default_factory=dict)
    splits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pictures: Sequence[str] = ()
    schema: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    split: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Converts the record to values that JSON can hold."""
        return {
            "format": FORMAT,
            "inputs": [{"name": name, **asdict(inputs)} for name, inputs in name_leaves(self.inputs).items()],
            "outputs": [{"name": name, **asdict(output)} for name, output in name_leaves(self.outputs).items()],
            "preprocessing": {name: asdict(step) for name, step in self.preprocessing.items()},
            "source": self.source,
            "reading": dict(self.reading),
            "splits": {name: dict(split) for name, split in self.splits.items()},
            "pictures": list(self.pictures),
            "schema": dict(self.schema),
            "sizes": dict(self.sizes),
            "split": dict(self.split),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> LearnedState:
        """Parses a result of `to_json`. Raises ValueError if it is invalid or of a newer version."""
        try:
            if record["format"] > FORMAT:
                raise ValueError(f"it has the format {record['format']}, and this version reads up to {FORMAT}")
            return cls(
                parse_leaves(record["inputs"], Inputs),
                parse_leaves(record["outputs"], Outputs),
                {name: LearnedPreprocessing(**step) for name, step in record["preprocessing"].items()},
                source=record["source"],
                reading=record["reading"],
                splits=record["splits"],
                pictures=tuple(record["pictures"]),
                schema=record["schema"],
                sizes=record["sizes"],
                split=record["split"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is not a record of scaleflow ({error})") from error


@dataclass(frozen=True)
class EarlierState:
    """The learned state of an earlier run, for a dataset that must not learn anew.

    Attributes:
        state: the record of that run.
        extends: whether new classes, words and columns extend the known ones, for fine-tuning. Otherwise data that is
            not in the record is an error.
        unknown_class: the target of an example whose class is unknown, for outputs with one class per example and no
            ignored class. None: such an example is an error.
        counts_words: whether new words and missing values are only counted in a note, because the model could not
            distinguish them.
    """

    state: LearnedState
    extends: bool = False
    unknown_class: int | None = None
    counts_words: bool = False

    def find_outputs(self, name: str = "") -> Outputs | None:
        """Returns the earlier run's description of an output; None if it has no such output."""
        outputs: Outputs | None = name_leaves(self.state.outputs).get(name)
        if outputs is None:
            return None
        cleared: Mapping[str, Any] = dict.fromkeys(ANSWERS)  # the new model finds its own values of these fields
        outputs = replace(outputs, calibration=None, **cleared)
        if not outputs.is_one_class or outputs.ignore is not None:
            return outputs
        return replace(outputs, ignore=self.unknown_class)

    def take_answers(self, outputs: OutputStructure) -> OutputStructure:
        """Returns outputs with the fields that belong to the earlier run's model (`ANSWERS`)."""
        before: Mapping[str, Outputs] = name_leaves(self.state.outputs)

        def take(name: str, output: Outputs) -> Outputs:
            old = before.get(name, output)
            return replace(output, **{key: getattr(old, key) for key in ANSWERS})

        with_answers: OutputStructure = map_named(take, outputs)
        return with_answers

    def find_reading(self, source: object) -> Mapping[str, Any]:
        """Returns how a source of the same class read its files; empty if the class differs."""
        return self.state.reading if self.state.source == name_class(source) else {}


def extend_classes(outputs: Outputs, classes: Iterable[str]) -> Outputs:
    """Returns outputs with new class names after the known ones. Two classes may become several."""
    known = outputs.names or ()
    new = [name for name in classes if name not in known]
    if not new:
        return outputs
    return replace(outputs, kind="classification", shape=(len(known) + len(new),), names=(*known, *new))


def describe_extension(old: LearnedPreprocessing, learned: Any) -> str:
    """Describes the data's additions to a learned preprocessing, such as `2 new words (a, b)`;
    empty without additions.
    """
    if not isinstance(learned, list):  # of numbers: the only addition is that values may be missing now
        return "" if learned == old.learned else "missing values"
    noun = "category" if old.path.endswith(".Category") else "word"
    return count_new(learned[len(old.learned) :], noun)


def count_new(names: Sequence[Any], noun: str) -> str:
    """Returns `1 new category (Paris)`; empty if there are no names."""
    if not names:
        return ""
    shown = ", ".join(str(name) or "a blank" for name in names[:NAMED]) + (", ..." if len(names) > NAMED else "")
    plural = {"category": "categories", "class": "classes"}.get(noun, f"{noun}s")
    return f"{len(names):,} new {noun if len(names) == 1 else plural} ({shown})"


def name_class(value: object) -> str:
    """Returns the dotted name of an object's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def to_plain(value: Any) -> Any:
    """Returns a value after a round trip through JSON. Dataclasses become dicts; other objects become their `repr`."""

    def convert(item: Any) -> Any:
        return asdict(item) if is_dataclass(item) and not isinstance(item, type) else repr(item)

    return json.loads(json.dumps(value, default=convert))


def parse_leaves(entries: Sequence[Mapping[str, Any]], make: Callable[..., Any]) -> Any:
    """Builds the structure of the leaves that the entries describe. Their names are keys joined with `/`."""
    structure: dict[str, Any] = {}
    for entry in entries:
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        *parents, leaf = str(values.pop("name")).split("/")
        place = structure
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = make(**values)
    return structure[""] if list(structure) == [""] else structure


@dataclass(frozen=True)
class LearnedChanges:
    """The differences between the learned states of two runs."""

    old: LearnedState  # of the run whose weights are loaded
    new: LearnedState  # of the run that starts with these weights
    is_anew: bool  # whether the new run learned everything itself; otherwise it kept or extended the old state
    maps_rows: bool  # whether it is known which rows of the weights belong to a word, as in scaleflow's own models

    @cached_property
    def other_inputs(self) -> Collection[str]:
        """The names of inputs whose features have another meaning than in the old run."""
        before = self.old.preprocessing
        after = self.new.preprocessing

        def differs(name: str) -> bool:
            if name not in before or name not in after:
                return name in before or name in after
            old = before[name]
            new = after[name]
            return old.path != new.path or (self.is_anew and old.learned != new.learned)

        return {name for name in name_leaves(self.new.inputs) if differs(name)}

    @cached_property
    def grown_inputs(self) -> Collection[str]:
        """The names of inputs whose features may have new entries after the old ones."""
        return {name for name in self.new.preprocessing if name in self.old.preprocessing} - set(self.other_inputs)

    def find_old(self, name: str) -> Outputs | None:
        """Returns the old run's description of an output; None if it had no such output, or another target column."""
        is_same = self.old.reading.get("target") == self.new.reading.get("target")
        old: Outputs | None = name_leaves(self.old.outputs).get(name)
        return old if is_same else None

    @cached_property
    def other_outputs(self) -> Collection[str]:
        """The names of outputs that differ from the old run's outputs."""
        outputs = name_leaves(self.new.outputs)
        return {name for name, output in outputs.items() if not is_same_output(self.find_old(name), output)}

    @property
    def is_other(self) -> bool:
        """Whether inputs or outputs differ from the old run, in name or meaning."""
        has_same_names = set(name_leaves(self.old.inputs)) == set(name_leaves(self.new.inputs))
        return not has_same_names or bool(self.other_inputs or self.other_outputs)

    def describe(self) -> str:
        """Describes the differences for a message; empty if there are no differences."""
        return "; ".join((*self._describe_inputs(), *self._describe_outputs()))

    def _describe_inputs(self) -> Iterator[str]:
        before = name_leaves(self.old.inputs)
        after = name_leaves(self.new.inputs)
        for name in after:
            label = name or "inputs"
            if name not in before:
                yield f"{label}: new"
            elif name in self.other_inputs:
                yield f"{label}: learned anew"
            elif name in self.grown_inputs:
                added = describe_extension(self.old.preprocessing[name], self.new.preprocessing[name].learned)
                if added:
                    yield f"{label}: {added}"
        for name in before:
            if name not in after:
                yield f"{name or 'inputs'}: dropped"

    def _describe_outputs(self) -> Iterator[str]:
        for name, new in name_leaves(self.new.outputs).items():
            old = self.find_old(name)
            label = name or self.new.reading.get("target") or "outputs"
            known = set(() if old is None else old.names or ())
            new_classes = [name_of_class for name_of_class in new.names or () if name_of_class not in known]
            added = count_new(new_classes, "class") if known else ""
            if added:
                yield f"{label}: {added}"
            elif name in self.other_outputs:
                yield f"{label}: learned anew"


def is_same_output(old: Outputs | None, new: Outputs) -> bool:
    """Returns whether two outputs mean the same."""
    if old is None:
        return False
    return all(getattr(old, key) == getattr(new, key) for key in ("kind", "shape", "names", "scaling", "levels"))
