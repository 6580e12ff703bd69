"""Describes outputs with classes, and matches their names with those that an earlier run knows. No TensorFlow."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Literal

from scaleflow.interfaces import Kind, Outputs

#: The kinds of a target that is one class or number.
OneKind = Literal["auto", "classification", "binary", "regression"]

#: A string that is a number.
IS_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?$"

#: The most classes that a message names.
MOST_CLASSES_NAMED = 10


def describe_outputs(kind: Kind | Literal["auto"], count: int, names: Sequence[str] = ()) -> Outputs:
    """Describes outputs with so many classes, labels or values. With `auto`, two classes are `binary`."""
    if kind == "auto":
        kind = "binary" if count == 2 else "classification"
    return Outputs(kind, (1,) if kind == "binary" else (count,), tuple(names) or None)


def match_names(names: Sequence[str], known: Sequence[str]) -> list[int | None]:
    """Returns the index among the `known` names of each name; None for a name that is not known.

    A number may be written in another way (`1.0` for `1`), and so may `true` and `false`, if only one known name has
    that value.
    """
    exact = {name: index for index, name in enumerate(known)}
    counts = Counter(map(normalise_name, known))
    similar: Mapping[Decimal | str, int] = {
        normalise_name(name): index for name, index in exact.items() if counts[normalise_name(name)] == 1
    }
    return [exact.get(name, similar.get(normalise_name(name))) for name in names]


def normalise_name(name: str) -> Decimal | str:
    """Returns a number with all its digits, `true` and `false` in lower case, another name unchanged."""
    if re.match(IS_NUMBER, name):
        return Decimal(name)  # floats would make ids of 17 digits equal
    return name.lower() if name.lower() in ("true", "false") else name


def show_classes(names: Sequence[str]) -> str:
    """Returns the first classes for a message."""
    return ", ".join(names[:MOST_CLASSES_NAMED]) + (", ..." if len(names) > MOST_CLASSES_NAMED else "")
