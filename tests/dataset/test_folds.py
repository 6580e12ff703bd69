"""Validation out of fold: which rows each member leaves out, and when it is possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scaleflow.dataset.reading.division import choose_validation, hold_out_fold
from scaleflow.errors import ConfigError
from scaleflow.interfaces import FOLD, Arrays, Dataset, DivisionKeys, Inputs, Outputs, Split, Target

TABLE = {"a": Inputs((1,)), "b": Inputs((1,))}

REGRESSION, CLASSES = Outputs("regression", (1,)), Outputs("classification", (3,))

AUTO_RULE = Split("auto")


def options(**changes: Any) -> Dataset:
    return Dataset(Target("dataset", ""), **{"validation": "auto", **changes})


@pytest.mark.parametrize(
    ("changes", "inputs", "examples", "folds", "chosen"),
    [
        ({}, TABLE, 500, 8, (None, 8)),
        ({}, TABLE, 20_000, 8, (0.1, 0)),
        ({"validation": "out_of_fold"}, TABLE, 20_000, 8, (None, 8)),
        ({}, TABLE, 500, 0, (0.1, 0)),
        ({}, TABLE, 10, 8, (0.1, 0)),
        ({}, Inputs((2,)), 500, 8, (0.1, 0)),
        ({"cache": "none"}, TABLE, 500, 8, (0.1, 0)),
        ({"validation": 0.3}, TABLE, 500, 8, (0.3, 0)),
        ({"validation": "validation"}, TABLE, 500, 8, ("validation", 0)),
        ({"validation": None}, TABLE, 500, 8, (None, 0)),
    ],
)
def test_folds_are_chosen_where_members_rows_and_memory_allow(
    changes: dict[str, Any], inputs: Any, examples: int, folds: int, chosen: tuple[Any, int]
) -> None:
    assert choose_validation(options(**changes), inputs, examples, folds) == chosen


@pytest.mark.parametrize(
    ("changes", "inputs", "folds", "why"),
    [
        ({}, TABLE, 0, "use model=tabular"),
        ({}, Inputs((2,)), 8, "a single input"),
        ({"cache": "none"}, TABLE, 8, "dataset.cache=none keeps no examples in memory"),
        ({"shards": 2}, TABLE, 8, "dataset.shards reads while training"),
    ],
)
def test_folds_that_cannot_be_are_refused_in_words(changes: dict[str, Any], inputs: Any, folds: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        choose_validation(options(validation="out_of_fold", **changes), inputs, 500, folds)


def test_a_feature_can_say_why_there_are_no_folds() -> None:
    why = "dataset.augment mixes examples of several folds"
    assert choose_validation(options(), TABLE, 500, 8, no_folds=why) == (0.1, 0)
    with pytest.raises(ConfigError, match=f"dataset.validation=out_of_fold: {why}; or use dataset.validation=0.1"):
        choose_validation(options(validation="out_of_fold"), TABLE, 500, 8, no_folds=why)


def divide(targets: Any, outputs: Outputs, rule: Split = AUTO_RULE, **keys: Any) -> Any:
    """Returns the fold of each example, for validation out of fold."""
    from scaleflow.dataset.batches.rows import to_rows
    from scaleflow.dataset.batches.splits import Splits, divide_into_folds

    rows = to_rows(Arrays({"a": np.zeros((len(targets), 1))}, targets, **keys))
    test = to_rows(Arrays({"a": np.zeros((4, 1))}, targets[:4]))
    splits = Splits(rows, None, test, inputs=TABLE, outputs=outputs, sample=None)
    divided = divide_into_folds(splits, 8, rule, raw=rows)
    assert divided.test is not None
    assert (divided.test.inputs[FOLD] == -1).all()  # type: ignore[attr-defined]
    assert divided.validation is divided.train
    return divided.train.inputs[FOLD]  # type: ignore[attr-defined]


def test_folds_are_equal_in_size_and_in_their_targets() -> None:
    targets = np.random.default_rng(0).uniform(size=(83, 1)).astype("f")
    folds = divide(targets, REGRESSION)
    assert sorted(np.bincount(folds)) == [10] * 5 + [11] * 3
    means = [targets[folds == fold].mean() for fold in range(8)]
    assert np.std(means) < 0.5 * targets.std() / np.sqrt(10), "much less than in folds drawn at random"
    assert (folds == divide(targets, REGRESSION)).all()


@pytest.mark.parametrize("by", ["auto", "random", "stratum", "group", "hash"])
def test_members_leave_out_the_same_folds_as_the_jobs_of_a_sweep(by: Any) -> None:
    random = np.random.default_rng(1)
    targets = random.integers(0, 3, 200)
    groups = random.integers(0, 60, 200).astype(np.uint64) if by in ("group", "hash") else None
    keys = DivisionKeys(strata=targets) if groups is None else DivisionKeys(groups)
    rule = Split(by)
    folds = divide(targets, CLASSES, rule, groups=groups)
    for number in range(8):
        _, held_out = hold_out_fold(rule, keys, 200, fold=(number, 8))
        assert (held_out == (folds == number)).all()
