"""Describes outputs with classes, and matches their names with those that an earlier run knows. No TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from scaleflow.interfaces import Kind, Outputs

#: The kinds of a target that is one class or number.
OneKind = Literal["auto", "classification", "binary", "regression"]

#: The most classes that a message names.
MOST_CLASSES_NAMED = 10


def describe_outputs(kind: Kind | Literal["auto"], count: int, names: Sequence[str] = ()) -> Outputs:
    """Describes outputs with so many classes, labels or values. With `auto`, two classes are `binary`."""
    if kind == "auto":
        kind = "binary" if count == 2 else "classification"
    return Outputs(kind, (1,) if kind == "binary" else (count,), tuple(names) or None)


def show_classes(names: Sequence[str]) -> str:
    """Returns the first classes for a message."""
    return ", ".join(names[:MOST_CLASSES_NAMED]) + (", ..." if len(names) > MOST_CLASSES_NAMED else "")
