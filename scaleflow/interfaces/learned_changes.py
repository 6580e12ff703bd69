"""What a run learned otherwise than the run whose weights it begins with."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from scaleflow.interfaces.data import Outputs
from scaleflow.interfaces.learned_state import LearnedState, count_new, describe_extension
from scaleflow.interfaces.structures import name_leaves


@dataclass(frozen=True)
class LearnedChanges:
    """What two runs learned.

    Attributes:
        old: by the run whose weights are taken.
        new: by the run that begins with them.
        is_anew: whether the new run learned everything itself; else it kept or extended what the old one learned.
        maps_rows: whether it is known which rows of the weights belong to a word: in scaleflow's own models.
    """

    old: LearnedState
    new: LearnedState
    is_anew: bool
    maps_rows: bool

    @cached_property
    def other_inputs(self) -> Collection[str]:
        """The names of the inputs whose features mean something else than in the old run."""
        before, after = self.old.preprocessing, self.new.preprocessing

        def differs(name: str) -> bool:
            if name not in before or name not in after:
                return name in before or name in after
            old, new = before[name], after[name]
            return old.path != new.path or (self.is_anew and old.learned != new.learned)

        return {name for name in name_leaves(self.new.inputs) if differs(name)}

    @cached_property
    def grown_inputs(self) -> Collection[str]:
        """The names of the inputs whose features may have new entries after the old ones."""
        return {name for name in self.new.preprocessing if name in self.old.preprocessing} - set(self.other_inputs)

    def find_old(self, name: str) -> Outputs | None:
        """Returns the old run's description of an output; None if it had none, or its target was another column."""
        is_same = self.old.reading.get("target") == self.new.reading.get("target")
        found: Outputs | None = name_leaves(self.old.outputs).get(name)
        return found if is_same else None

    @cached_property
    def other_outputs(self) -> Collection[str]:
        """The names of the outputs that are not those of the old run."""
        outputs = name_leaves(self.new.outputs)
        return {name for name, each in outputs.items() if not is_same_output(self.find_old(name), each)}

    @property
    def is_other(self) -> bool:
        """Whether inputs or outputs are not those of the old run, or mean something else."""
        names = (set(name_leaves(each.inputs)) for each in (self.old, self.new))
        return len(set(map(frozenset, names))) > 1 or bool(self.other_inputs or self.other_outputs)

    def describe(self) -> str:
        """Describes the differences for a message; empty if there are none."""
        return "; ".join((*self._describe_inputs(), *self._describe_outputs()))

    def _describe_inputs(self) -> Iterator[str]:
        before, after = name_leaves(self.old.inputs), name_leaves(self.new.inputs)
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
        yield from (f"{name or 'inputs'}: dropped" for name in before if name not in after)

    def _describe_outputs(self) -> Iterator[str]:
        for name, new in name_leaves(self.new.outputs).items():
            old, label = self.find_old(name), name or self.new.reading.get("target") or "outputs"
            known = set(() if old is None else old.names or ())
            if added := count_new([each for each in new.names or () if each not in known], "class") if known else "":
                yield f"{label}: {added}"
            elif name in self.other_outputs:
                yield f"{label}: learned anew"


def is_same_output(old: Outputs | None, new: Outputs) -> bool:
    """Returns whether two outputs mean the same."""
    return old is not None and all(
        getattr(old, key) == getattr(new, key) for key in ("kind", "shape", "names", "scaling")
    )
