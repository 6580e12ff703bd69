"""The generated datasets: what they promise, the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import name_leaves
from tests.processes import call


def load_all() -> dict[str, tuple[Any, Any, Any]]:
    """Returns each dataset's (train, train again, train with another seed), after a check of its contract."""
    from scaleflow.dataset.examples import Clicks, Shapes, Tickets
    from scaleflow.testing import check_dataset

    found = {}
    for make in (Shapes, Tickets, Clicks):
        check_dataset(make(examples=200))
        found[make.__name__] = tuple(make(examples=200, seed=seed).load("train") for seed in (0, 0, 1))
    return found


def load_ink() -> tuple[Any, Any]:
    from scaleflow.dataset.examples import DigitsWithInk
    from scaleflow.testing import check_dataset

    source = DigitsWithInk()
    check_dataset(source)
    return source.load("test").inputs, source.load("test").targets


@pytest.fixture(scope="module")
def loaded() -> Any:
    return call(load_all)


def test_the_seed_decides(loaded: Any) -> None:
    for name, given in loaded.items():
        first, again, other = ([array for part in each.parts for array in name_leaves(part).values()] for each in given)
        assert len(given[0]) == 160, name
        assert all(map(np.array_equal, first, again)), name
        assert not any(map(np.array_equal, first, other)), name


def test_both_classes_and_all_shapes_occur(loaded: Any) -> None:
    shapes, tickets, clicks = (loaded[name][0].targets for name in ("Shapes", "Tickets", "Clicks"))
    assert all(set(np.unique(image)) >= {0, 2} for image in shapes)
    assert (shapes == 1).any(axis=(1, 2)).mean() > 0.8  # a square may hide a disc
    assert 0.3 < tickets.mean() < 0.5
    assert 0.2 < clicks.mean() < 0.5


def test_ink_is_the_mean_of_the_pixels(isolated: Callable[..., Any]) -> None:
    images, targets = isolated(load_ink)
    np.testing.assert_allclose(targets["ink"][:, 0], images.reshape(len(images), -1).mean(axis=1), rtol=1e-6)
    assert set(targets["digit"]) == set(range(10))


def refusals() -> list[str]:
    from scaleflow.dataset.examples import Clicks, Shapes
    from scaleflow.errors import ConfigError

    found = []
    for make, wrong in ((Shapes, {"size": 8}), (Clicks, {"users": 0}), (Clicks, {"examples": 1})):
        with pytest.raises(ConfigError) as refusal:
            make(**wrong)
        found.append(str(refusal.value))
    return found


def test_invalid_sizes_of_examples_are_refused(isolated: Callable[..., Any]) -> None:
    assert isolated(refusals) == [
        "dataset.size=8: expected an integer, at least 16",
        "dataset.users=0: expected an integer, at least 1",
        "dataset.examples=1: expected an integer, at least 2",
    ]
