"""Which columns of a table the options name, or an earlier run read. The launcher checks them before TensorFlow is
imported.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scaleflow.dataset.reading.finite_targets import check_weights_name
from scaleflow.errors import ConfigError, find_similar
from scaleflow.interfaces import EarlierState
from scaleflow.interfaces.formatting import join_first
from scaleflow.interfaces.options import Words, check_option, check_options
from scaleflow.serving.cells import CATEGORY, NUMBER, TEXT

#: The keys that say what columns are taken for.
KEYS = {NUMBER: "dataset.numeric", CATEGORY: "dataset.categorical", TEXT: "dataset.text"}


#: The most columns that a note names for one reason.
MOST_NAMED = 12

#: The name of a column that pandas or R made of a table's index.
INDEX = re.compile(r"|rownames|row\.names|__index_level_\d+__|Unnamed: \d+(\.\d+)*")


@check_options("dataset")
def choose_columns(
    names: Sequence[str],
    target: Any,
    columns: Words | None,
    drop: Words | None,
    kinds: Mapping[str, Any],
    roles: Mapping[str, str] = {},
) -> list[str]:
    """Returns the names of the input columns. Dropped columns may have any names, and so may those with a role.

    `roles` has columns by the key of an option; they are inputs only if `columns` names them, and weights never.

    An index, and a column with a / in its name, are no inputs, unless `columns` or the options of `kinds` name them.
    """
    dropped = find_columns(drop or (), names, "dataset.drop")
    left = [name for name in names if name not in dropped]
    find_columns([target], names, "dataset.target")
    find_columns([target], left, "dataset.target", "dataset.drop leaves it out")
    selected = find_columns(columns or (), names, "dataset.columns")
    for key, name in roles.items():
        find_columns([name], names, key)
    left = [name for name in left if name in selected or name not in roles.values()]
    if target in selected:
        raise ConfigError(f"dataset.columns: {target} is the target, which cannot be an input; remove it")
    check_weights_name(roles.get("dataset.weights"), selected, target, "dataset.columns")
    named = [
        *selected,
        *(name for value in kinds.values() for name in (value if isinstance(value, list | tuple) else ())),
    ]
    left = [name for name in left if name in named or not find_name_problem(name)]
    inputs = [name for name in left if name != target and (not selected or name in selected)]
    if not inputs:
        unused = describe_left_out({name: each for name in names if (each := find_name_problem(name))})
        raise ConfigError(f"dataset.columns: no column is left besides the target{unused and f'; not used: {unused}'}")
    for name in inputs:
        if not name or "/" in name:
            problem = "has no name" if not name else f"has a / in its name, {name}"
            raise ConfigError(f"dataset.data_dir: a column {problem}; rename it, or use dataset.drop=['{name}']")
    return inputs


def find_name_problem(name: str) -> str:
    """Returns why a column of this name is no input, unless an option names it; "" if it can be one."""
    return "an index has such a name" if INDEX.fullmatch(name) else "rename it: it has a /" if "/" in name else ""


def describe_left_out(reasons: Mapping[str, str]) -> str:
    """Returns a text on the columns that are not used, by the reason."""
    names = {each: [name or "''" for name, reason in reasons.items() if reason == each] for each in reasons.values()}
    return "; ".join(f"{join_first(names[each], MOST_NAMED)} ({each})" for each in names)


def find_columns(
    given: Sequence[Any], names: Sequence[str], key: str, problem: str = "there is no such column"
) -> list[str]:
    for name in given:
        if name not in names:
            similar = find_similar(str(name), names)
            hint = f"; did you mean {similar}? The columns are" if similar else "; the columns are"
            raise ConfigError(f"{key}={name}: {problem}{hint} {', '.join(names)}")
    return list(given)


def parse_column_kinds(names: Sequence[str], options: Mapping[str, Any]) -> dict[str, str]:
    """Returns what the options say that a column is taken for, by its name."""
    given: dict[str, str] = {}
    for kind, value in options.items():
        key = KEYS[kind]
        check_option(value, Words | None, key)
        for name in find_columns(value or (), names, key, "is not an input column"):
            if name in given:
                raise ConfigError(f"{key}: {name} is in {KEYS[given[name]]}, too; name it in one of the two")
            given[name] = kind
    return given


def find_categories(kinds: Mapping[str, str], earlier: EarlierState | None) -> dict[str, Sequence[str]]:
    """Returns the categories that an earlier run learned, by the name of the column."""
    learned = {} if earlier is None else earlier.state.preprocessing
    return {name: learned[name].learned for name, kind in kinds.items() if kind == CATEGORY and name in learned}


def check_known_columns(known: Sequence[str], names: Sequence[str], data_dir: str) -> None:
    """Rejects a table without a column that an earlier run read; others do not matter."""
    missing = [name for name in known if name not in names]
    if not missing:
        return
    similar = difflib.get_close_matches(missing[0], [name for name in names if name not in known], n=1)
    more = f" and {', '.join(missing[1:])}" if missing[1:] else ""
    raise ConfigError(
        f"dataset.data_dir={data_dir}: has no column {missing[0]}{more}, which the earlier run read"
        f"{f'; did you mean {similar[0]}? The' if similar else '; the'} columns are {', '.join(names)}"
    )


def find_new(unused: Sequence[str], reading: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line about the columns that an earlier run's table did not have; nothing if that is not known."""
    if new := [name for name in unused if name not in reading.get("unused", unused)]:
        yield f"new columns, which the data of the run did not have, are not used: {join_first(new, MOST_NAMED)}"
