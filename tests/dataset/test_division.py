"""How rows are divided: groups stay together, classes keep their share, times keep their order."""

import numpy as np
import pytest

from scaleflow.dataset.reading.division import Division, assign_folds, draw_strata, hold_out, read_keys
from scaleflow.errors import ConfigError
from scaleflow.interfaces import DivisionKeys, Split


def test_groups_are_in_one_split_and_have_the_share_of_the_rows() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        sizes = random.integers(1, 30, random.integers(20, 200))
        groups = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
        rest, held_out = hold_out(Split("group"), DivisionKeys(groups), len(groups), 0.2, (int(random.integers(99)), 1))
        assert (rest == ~held_out).all()
        assert not {*groups[rest]} & {*groups[held_out]}
        assert abs(held_out.mean() - 0.2) < 30 / len(groups)


def test_groups_with_a_stratum_have_the_share_of_each_class() -> None:
    groups = np.repeat(np.arange(200), 5)
    strata = (np.arange(200) % 10 == 0).astype(int)[groups]
    _, held_out = hold_out(Split("group"), DivisionKeys(groups, strata=strata), 1000, 0.2, (3, 1))
    assert abs(held_out[strata == 1].mean() - 0.2) <= 0.05
    assert abs(held_out[strata == 0].mean() - 0.2) <= 0.02


def test_each_class_with_two_rows_is_in_train_and_test() -> None:
    random = np.random.default_rng(1)
    for _ in range(50):
        strata = random.permutation(np.repeat(np.arange(20), random.integers(1, 40, 20)))
        drawn = draw_strata(strata, 0.2, (int(random.integers(99)), 1), least=1)
        for number in range(20):
            count, held_out = (strata == number).sum(), drawn[strata == number].sum()
            assert (1 <= held_out <= count - 1) if count > 1 else held_out == 0
            assert abs(held_out - 0.2 * count) <= 1
        assert abs(drawn.sum() - 0.2 * len(strata)) <= 20


def test_the_latest_rows_are_held_out_with_a_gap_before_them() -> None:
    times = np.random.default_rng(2).permutation(np.repeat(np.arange(100) * 86400.0, 3))
    rest, held_out = hold_out(Split("time", gap="7d"), DivisionKeys(times=times), 300, 0.2, (0, 1))
    assert held_out.sum() == 60
    assert times[held_out].min() - times[rest].max() == 8 * 86400
    ties = np.array([1.0, 1, 1, 1, 2])
    assert hold_out(Split("time"), DivisionKeys(times=ties), 5, 0.5, (0, 1))[1].tolist() == [False] * 4 + [True]


def test_a_hash_keeps_a_row_in_its_split_when_the_file_grows() -> None:
    names = np.array([f"row {n}" for n in range(5000)])
    rule = Split("hash", "id")
    masks = [
        Division(rule).draw(read_keys(rule, lambda _, some=names[:count]: some, str), count) for count in (2000, 5000)
    ]
    assert (masks[0]["test"] == masks[1]["test"][:2000]).all()
    assert abs(masks[1]["test"].mean() - 0.2) < 0.02


def test_a_column_names_the_splits() -> None:
    rule = Split("column", "part")
    masks = Division(rule).draw(read_keys(rule, lambda _: np.array(["train", "Val", "test", "train"]), str), 4)
    assert {name: np.flatnonzero(mask).tolist() for name, mask in masks.items()} == {
        "train": [0, 3],
        "validation": [1],
        "test": [2],
    }
    with pytest.raises(ConfigError, match="has 'holdout'; its values are train, validation, test"):
        read_keys(rule, lambda _: np.array(["train", "holdout"]), str)


def test_folds_have_whole_groups_equal_classes_or_an_order() -> None:
    random = np.random.default_rng(4)
    groups = random.permutation(np.repeat(np.arange(30), random.integers(1, 20, 30)))
    folds = assign_folds(Split("group"), DivisionKeys(groups), len(groups), 5, (0, 1))
    assert all(len({*folds[groups == group]}) == 1 for group in range(30))
    assert np.ptp(np.bincount(folds)) <= 3
    assert {*folds} == {*range(5)}
    strata = random.integers(0, 3, 100)
    folds = assign_folds(Split("stratum"), DivisionKeys(strata=strata), 100, 5, (0, 1))
    assert all(np.ptp(np.bincount(folds[strata == each], minlength=5)) <= 1 for each in range(3))
    times = random.permutation(600) * 1.0
    folds = assign_folds(Split("time"), DivisionKeys(times=times), 600, 5, (0, 1))
    assert np.bincount(folds + 1).tolist() == [100] * 6
    assert all(times[folds < fold].max() < times[folds == fold].min() for fold in range(5))


@pytest.mark.parametrize(
    ("rule", "keys", "words"),
    [
        (Split("group", "c"), DivisionKeys(np.zeros(9, int)), "all rows have the same value in the column c"),
        (Split("time", "c"), DivisionKeys(times=np.zeros(9)), "all rows have the same value in the column c"),
        (Split("group"), DivisionKeys(), "gives groups in its Arrays or Stream"),
        (Split("time", "c", gap=99), DivisionKeys(times=np.arange(9.0)), "leaves nothing to train on of 9 rows"),
    ],
)
def test_a_split_that_cannot_be_is_refused(rule: Split, keys: DivisionKeys, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        hold_out(rule, keys, 9, 0.2, (0, 1))


@pytest.mark.parametrize("text", ["2024-13-01", "31/01/2024", "soon"])
def test_times_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the time"):
        read_keys(Split("time", "day"), lambda _: np.array(["2024-01-31 10:00", text]), str)


def test_missing_values_and_too_few_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="the column c has 1 missing values, the first in row 1"):
        read_keys(Split("group", "c"), lambda _: np.array(["a", None], object), lambda row: f"row {row}")
    with pytest.raises(ConfigError, match="has 3 groups, fewer than 5 folds"):
        assign_folds(Split("group", "c"), DivisionKeys(np.arange(9) % 3), 9, 5, (0, 1))
