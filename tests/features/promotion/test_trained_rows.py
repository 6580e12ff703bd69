"""Which rows of a split another run was trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.features.promotion.trained_rows import digest_rows, find_common_inputs, identify


class Columns:
    """`Rows` that are in one batch, without TensorFlow."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = columns

    def iterate(self, pick: Any) -> Iterator[Any]:
        yield pick(self._columns, None)


def make_rows(**inputs: object) -> Any:
    return Columns({name: np.array(values) for name, values in inputs.items()})


def test_a_row_is_the_same_whatever_its_types_and_further_columns_are() -> None:
    rows = make_rows(area=[1, 2, 3], town=["Aa", "Bb", "Aa"], price=[5.0, 6.0, 7.0])
    others = make_rows(area=[3.0, 2.0, np.nan], town=[b"Aa", b"Aa", b"Bb"])
    names = find_common_inputs(rows, others)
    assert names == ["area", "town"]
    known = set(identify(others, None, names))
    assert [each in known for each in identify(rows, None, names)] == [False, False, True]
    with pytest.raises(ConfigError, match=r"no inputs in common; train both with evaluation\.id=COLUMN"):
        find_common_inputs(rows, make_rows(area=["1", "2"]))


def test_values_do_not_run_into_each_other() -> None:
    pairs = [np.array([each], object) for each in ("ab", "c", "a", "bc")]
    assert list(digest_rows(pairs[:2])) != list(digest_rows(pairs[2:]))
    words = np.array([["a", "b"], ["b", "a"]])
    assert len(set(digest_rows([words]))) == 2
