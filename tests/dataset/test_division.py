"""How rows are divided: groups stay together, classes keep their share, times keep their order."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from scaleflow.dataset.reading.division import (
    Division,
    assign_folds,
    draw_strata,
    hold_out_fold,
    is_by_target,
    read_keys,
    read_path_keys,
)
from scaleflow.errors import ConfigError
from scaleflow.interfaces import DivisionKeys, Split


def test_groups_are_in_one_split_and_have_the_share_of_the_rows() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        sizes = random.integers(1, 30, random.integers(20, 200))
        groups = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
        rest, held_out = Division(Split("group"), 0.2, int(random.integers(99))).hold_out(
            DivisionKeys(groups), len(groups), draw=1
        )
        assert (rest == ~held_out).all()
        assert not {*groups[rest]} & {*groups[held_out]}
        assert abs(held_out.mean() - 0.2) < 30 / len(groups)


def test_groups_with_a_stratum_have_the_share_of_each_class() -> None:
    groups = np.repeat(np.arange(200), 5)
    strata = (np.arange(200) % 10 == 0).astype(int)[groups]
    _, held_out = Division(Split("group"), 0.2, 3).hold_out(DivisionKeys(groups, strata=strata), 1000, draw=1)
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
    rest, held_out = Division(Split("time", gap="7d"), 0.2, 0).hold_out(DivisionKeys(times=times), 300, draw=1)
    assert held_out.sum() == 60
    assert times[held_out].min() - times[rest].max() == 8 * 86400
    ties = np.array([1.0, 1, 1, 1, 2])
    assert Division(Split("time"), 0.5, 0).hold_out(DivisionKeys(times=ties), 5, draw=1)[1].tolist() == [False] * 4 + [
        True
    ]


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
    folds = assign_folds(Split("group"), DivisionKeys(groups), len(groups), 5)
    assert all(len({*folds[groups == group]}) == 1 for group in range(30))
    assert np.ptp(np.bincount(folds)) <= 3
    assert {*folds} == {*range(5)}
    strata = random.integers(0, 3, 100)
    folds = assign_folds(Split("stratum"), DivisionKeys(strata=strata), 100, 5)
    assert all(np.ptp(np.bincount(folds[strata == each], minlength=5)) <= 1 for each in range(3))
    times = random.permutation(600) * 1.0
    folds = assign_folds(Split("time"), DivisionKeys(times=times), 600, 5)
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
        Division(rule, 0.2, 0).hold_out(keys, 9, draw=1)


@pytest.mark.parametrize("text", ["2024-13-01", "31/01/2024", "soon"])
def test_times_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the time"):
        read_keys(Split("time", "day"), lambda _: np.array(["2024-01-31 10:00", text]), str)


def test_missing_values_and_too_few_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="the column c has 1 missing values, the first in row 1"):
        read_keys(Split("group", "c"), lambda _: np.array(["a", None], object), lambda row: f"row {row}")
    with pytest.raises(ConfigError, match="has rows for 3 of 5 folds; use fewer"):
        assign_folds(Split("group", "c"), DivisionKeys(np.arange(9) % 3), 9, 5)


def test_groups_do_not_depend_on_the_order_of_rows_and_keep_their_share() -> None:
    random = np.random.default_rng(7)
    names = np.array([f"Kunde Ä {n} " for n in np.repeat(np.arange(40), random.lognormal(2, 1.2, 40).astype(int) + 1)])
    order, rule = random.permutation(len(names)), Split("group", "c")
    divided = [
        Division(rule, 0.2, 5).hold_out(read_keys(rule, lambda _, some=some: some, str), len(names), draw=1)[1]
        for some in (names, names[order])
    ]
    assert (divided[0][order] == divided[1]).all()
    assert abs(divided[0].mean() - 0.2) <= 1 / len(names)
    own_strata = DivisionKeys(np.repeat(np.arange(60), 20), strata=np.repeat(np.arange(60), 20))
    assert Division(rule, 0.2, 0).hold_out(own_strata, 1200, draw=1)[1].sum() == 240, (
        "no two groups have a stratum in common"
    )


def test_a_stratum_of_many_whole_numbers_is_drawn_from_their_ranges() -> None:
    ages, rule = np.random.default_rng(3).integers(0, 10_000, 1000), Split("stratum", "age")
    for column in (ages, ages.astype(str)):  # as in a CSV file
        _, held_out = Division(rule, 0.2, 0).hold_out(read_keys(rule, lambda _, some=column: some, str), 1000, draw=1)
        upper = ages > np.median(ages)
        assert abs(held_out[upper].mean() - 0.2) < 0.02 > abs(held_out[~upper].mean() - 0.2)
    with pytest.raises(ConfigError, match="leaves nothing to hold out of 9 rows"):
        Division(rule, 0.2, 0).hold_out(DivisionKeys(strata=np.arange(9)), 9, draw=1)


@pytest.mark.parametrize(
    ("by", "column", "words"),
    [
        ("group", pyarrow.array([[1], [2]]), "the column c has list<item: int64>; rows are divided by single values"),
        ("group", pyarrow.array([b"\xff", b"a"]), "has values that are no texts"),
        ("group", np.array([1, "a"], object), "the column c has several types"),
        ("time", pyarrow.array([1, 2], pyarrow.time32("s")), "needs dates or numbers, and the column has time32"),
        ("time", np.array([1, 2]), "gap=7d: the times are numbers, such as 1, .* as a number in their unit"),
        ("time", np.array(["20240131", "20240201"]), "gap=7d: the times are numbers"),
    ],
)
def test_columns_by_which_rows_cannot_be_divided_are_refused(by: Any, column: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_keys(Split(by, "c", gap="7d" if by == "time" else None), lambda _: column, str)


@pytest.mark.filterwarnings("error")
def test_times_with_zones_are_those_of_utc() -> None:
    texts = np.array(["2024-01-31T10:00:00+02:00", "2024-01-31 08:00:01Z", "2024-01-31 08:00:02"])
    times = read_keys(Split("time", "day", gap="1s"), lambda _: texts, str).times
    assert times is not None
    assert (times - times[0]).tolist() == [0, 1, 2]


def test_a_fold_without_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="has rows for 5 of 10 folds; use fewer"):
        hold_out_fold(Split("random"), DivisionKeys(), 5, fold=(8, 10))
    with pytest.raises(ConfigError, match=r"the fold 1/4 leaves nothing to train on of 9 rows; use .* a smaller gap"):
        hold_out_fold(Split("time", gap=99), DivisionKeys(times=np.arange(9.0)), 9, fold=(0, 4))


def test_a_pattern_says_the_stratum_and_a_column_that_of_groups(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"p{n // 4}_{n}_site{n % 2}.png") for n in range(8)]
    rows = [f"{Path(path).name},{'ab'[n // 2 % 2]}" for n, path in enumerate(paths)]
    (tmp_path / "metadata.csv").write_text("\n".join(["file_name,kind", *rows]), encoding="utf-8")
    by_site = Split("stratum", pattern=r"(site\d)")
    assert not is_by_target(by_site)
    keys = read_path_keys(by_site, tmp_path, paths)
    assert keys.strata is not None
    assert keys.strata.tolist() == [0, 1] * 4
    keys = read_path_keys(Split("group", stratum="kind", pattern=r"(p\d)_"), tmp_path, paths)
    assert keys.groups is not None
    assert keys.strata is not None
    assert len({*keys.groups[:4]}) == len({*keys.groups[4:]}) == 1
    assert keys.strata.tolist() == [0, 0, 1, 1] * 2
