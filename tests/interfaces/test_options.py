"""Options are checked by the annotations of the parameters that take them."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces.options import Fraction, Positive, TestFraction, Words, at_least, check_options


@check_options("dataset")
def take(
    name: str,
    count: Annotated[int, at_least(3)] = 3,
    most: Positive | None = None,
    rate: Fraction = 0.0,
    test: TestFraction = 0.2,
    kind: Literal["auto", "binary"] = "auto",
    words: Words | None = None,
    is_on: bool = False,
) -> Any:
    return name, count, most, rate, test, kind, words, is_on


def test_what_fits_is_passed_on() -> None:
    assert take("a", 4, most=1, rate=0, words=("a",)) == ("a", 4, 1, 0, 0.2, "auto", ("a",), False)
    assert take(5) == (5, 3, None, 0.0, 0.2, "auto", None, False)  # type: ignore[arg-type]  # `str` says nothing
    assert list(inspect.signature(take).parameters)[:2] == ["name", "count"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 2}, "dataset.count=2: expected an integer, at least 3"),
        ({"count": True}, "dataset.count=True: expected an integer, at least 3"),
        ({"count": None}, "dataset.count=None: expected an integer, at least 3"),
        ({"most": 0}, "dataset.most=0: expected an integer, at least 1"),
        ({"rate": 1}, "dataset.rate=1: expected a number from 0 to less than 1"),
        ({"rate": "0.5"}, "dataset.rate=0.5: expected a number from 0 to less than 1"),
        ({"rate": float("nan")}, "dataset.rate=nan: expected a number from 0 to less than 1"),
        (
            {"test": 1.0},
            "dataset.test=1.0: expected a number from 0 to less than 1; scaleflow evaluate --split all evaluates "
            "every example",
        ),
        ({"test": -0.1}, "dataset.test=-0.1: expected a number from 0 to less than 1"),
        ({"kind": "both"}, "dataset.kind=both: expected one of auto, binary"),
        ({"kind": ["auto"]}, "dataset.kind=['auto']: expected one of auto, binary"),
        ({"words": "abc"}, "dataset.words=abc: expected a list such as [a, b]; type 'dataset.words=[abc]'"),
        ({"words": [1]}, "dataset.words=[1]: expected a list such as [a, b]"),
        ({"is_on": 1}, "dataset.is_on=1: expected true or false"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        take("a", **options)
    assert str(refusal.value) == message
