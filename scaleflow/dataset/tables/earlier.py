"""How a table follows what an earlier run read of another one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scaleflow.dataset.tables.options import MOST_NAMED
from scaleflow.errors import ConfigError
from scaleflow.interfaces import EarlierState
from scaleflow.interfaces.formatting import join_first
from scaleflow.serving.cells import CATEGORY


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
