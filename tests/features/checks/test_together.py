"""Rows that belong together are found, and independent rows and useful categories are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scaleflow.dataset.column_kinds import CATEGORY, DATE, NUMBER
from scaleflow.dataset.schema import GROUPS, SplitSample
from scaleflow.features.checks.rules import find_duplicates
from scaleflow.features.checks.together import find_together
from scaleflow.interfaces import DivisionKeys, Split
from tests.features.checks.made import cut

Array = np.ndarray[Any, Any]
AUTO = Split("auto")


def write(values: Any) -> Array:
    return np.array([str(each) for each in values], object)


def make_days(numbers: Array) -> Array:
    return write(np.datetime64("2024-01-01") + numbers.astype(int))


def make(columns: dict[str, Array], target: Array, others: dict[str, Array], seed: int = 0) -> dict[str, SplitSample]:
    """The samples of a table that is divided row by row."""
    kinds = {name: NUMBER if values.dtype != object else CATEGORY for name, values in columns.items()}
    kinds |= {name: DATE for name in columns if name == "date"}
    whole = SplitSample(columns, kinds, {"": target}, len(target), True, others)
    is_train = np.random.default_rng([seed, 9]).random(len(target)) < 0.8
    return {"train": cut(whole, is_train), "test": cut(whole, ~is_train)}


def find(splits: dict[str, SplitSample], rule: Split = AUTO) -> list[str]:
    return [each.text for each in find_together(splits, sum(map(len, splits.values())), rule)]


def make_visits(
    seed: int, customers: int = 60, visits: int = 20, noise: float = 0.0, values: bool = False, is_input: bool = False
) -> dict[str, SplitSample]:
    """Visits of customers. What a customer is like, and the answer, hardly change from visit to visit."""
    random = np.random.default_rng(seed)
    of = random.permutation(np.repeat(np.arange(customers), visits))
    columns = {f"c{n}": random.normal(size=customers)[of] + noise * random.normal(size=len(of)) for n in range(5)}
    columns |= {f"v{n}": random.normal(size=len(of)) for n in range(3)}
    answer = random.normal(size=customers)[of] if values else write(random.integers(2, size=customers)[of])
    ids = {"customer": write(f"K{each:04d}" for each in of)}
    return make({**columns, **ids} if is_input else columns, answer, {} if is_input else ids, seed)


FOUND: dict[str, Callable[[int], dict[str, SplitSample]]] = {
    "answers": make_visits,
    "values": lambda seed: make_visits(seed, values=True),
    "other values at each visit": lambda seed: make_visits(seed, noise=0.3),
    "an input": lambda seed: make_visits(seed, is_input=True),
    "few visits": lambda seed: make_visits(seed, 400, 3),
    "few customers": lambda seed: make_visits(seed, 30, 40),
}


@pytest.mark.parametrize("kind", FOUND)
def test_customers_are_found_and_the_finding_says_what_to_type(kind: str) -> None:
    for seed in range(3):
        (text,) = find(FOUND[kind](seed))
        assert text.startswith("rows of one customer are alike (")
        assert text.endswith("new customers: dataset.split='{by: group, column: customer}'")
        if kind == "answers":
            assert "(20 each); test figures are too good for" in text


def test_what_is_divided_by_customer_already_is_not_found() -> None:
    splits = make_visits(0)
    whole = {name: each.others["customer"] for name, each in splits.items()}
    by_group = {
        "train": cut(splits["train"], whole["train"] < "K0045"),
        "test": cut(splits["test"], whole["test"] >= "K0045"),
    }
    assert find(splits, Split("time", "v0")) == []
    assert find(by_group, Split("group", "customer")) == []
    assert find(by_group) == []  # as the user's own files are


def test_groups_of_an_own_dataset_are_found() -> None:
    splits = make_visits(0)
    own = {}
    for name, each in splits.items():
        given = {GROUPS: np.unique(each.others["customer"], return_inverse=True)[1]}
        own[name] = replace(each, is_table=False, others=given)
    assert find(own)[0].endswith("new groups: dataset.split='{by: group}'")


def make_houses(seed: int, towns: int, has_place: bool, drops: bool, has_copy: bool) -> dict[str, SplitSample]:
    """Prices that depend on the town, whose part follows from where it lies."""
    random = np.random.default_rng(seed)
    town = random.choice(towns, 1500, p=random.dirichlet(np.ones(towns)))
    at = random.normal(size=(2, towns))
    area, age = random.lognormal(4, 0.4, 1500), random.integers(0, 100, 1500).astype(float)
    price = at[0][town] + np.sin(3 * at[1][town]) + np.log(area) - age / 60 + random.normal(0, 0.5, 1500)
    columns = {"area": area, "age": age, "rooms": random.poisson(3, 1500).astype(float)}
    columns |= {f"at{n}": at[n][town] + random.normal(0, 0.05, 1500) for n in range(2) if has_place}
    columns |= {"code": random.permutation(towns)[town] * 7.0 + 1000} if has_copy else {}
    name = {"town": write(f"Town {n}" for n in town)}
    return make({**columns, **({} if drops else name)}, price, name if drops else {}, seed)


@pytest.mark.parametrize("towns", [5, 100])
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(("has_place", "has_copy"), [(False, False), (True, False), (False, True)])
def test_a_useful_category_is_no_group(towns: int, drops: bool, has_place: bool, has_copy: bool) -> None:
    assert [find(make_houses(seed, towns, has_place, drops, has_copy)) for seed in range(3)] == [[], [], []]


def make_people(random: np.random.Generator) -> dict[str, SplitSample]:
    """As in a census: categories, a code with many values, numbers that repeat, row numbers that are dropped."""
    n, job = 2000, random.zipf(1.4, 2000) % 60
    columns = {"age": random.integers(17, 90, n).astype(float), "job": write(f"job {each}" for each in job)}
    columns |= {"hours": np.clip(random.normal(40, 9, n).round(), 1, 99), "sex": random.choice(write("mf"), n)}
    signal = columns["age"] / 20 + (job % 7) + random.normal(size=n)
    return make(columns, write(signal > 5), {"number": write(range(n)), "weight": write(random.integers(1, 900, n))})


def make_rides(random: np.random.Generator) -> dict[str, SplitSample]:
    """By the hour, with the same pattern in each week."""
    hour = np.arange(2000)
    columns = {"hour": hour % 24.0, "day": hour // 24 % 7.0, "date": make_days(hour // 24)}
    columns["warm"] = 10 + 5 * np.sin(hour / 24 * 6.28) + random.normal(0, 4, 2000)
    return make(columns, columns["warm"] + 9 * (columns["hour"] > 7) + random.normal(0, 3, 2000), {})


def make_passengers(random: np.random.Generator) -> dict[str, SplitSample]:
    """Tickets of few people each, cabins that are mostly missing, names."""
    n = 900
    columns = {"class": random.integers(1, 4, n).astype(float), "fare": random.lognormal(3, 1, n).round(2)}
    columns |= {"age": np.where(random.random(n) < 0.2, np.nan, random.integers(1, 80, n))}
    others = {"ticket": write(random.integers(0, 700, n)), "name": write(f"n{each}" for each in range(n))}
    others["cabin"] = np.where(random.random(n) < 0.8, "", write(f"C{each}" for each in random.integers(0, 120, n)))
    return make(columns, write(random.random(n) < 0.7 - 0.15 * columns["class"]), others)


def make_sales(random: np.random.Generator) -> dict[str, SplitSample]:
    """Integer codes of products as an input, of which each has its price level."""
    product = random.zipf(1.2, 2000) % 300
    level = random.normal(size=300)[product]
    columns = {"product": product.astype(float), "amount": random.poisson(3, 2000).astype(float)}
    return make({**columns, "channel": random.choice(write("abc"), 2000)}, level + random.normal(0, 0.3, 2000), {})


def make_marks(random: np.random.Generator) -> dict[str, SplitSample]:
    """The mark that the target follows from is dropped."""
    mark = random.integers(0, 100, 1500)
    columns = {"test": mark + random.normal(0, 10, 1500), "hours": random.normal(size=1500)}
    return make(columns, write(mark > 50), {"mark": write(mark)})


@pytest.mark.parametrize("table", [make_people, make_rides, make_passengers, make_sales, make_marks])
def test_tables_as_they_are_give_no_alarm(table: Callable[[np.random.Generator], dict[str, SplitSample]]) -> None:
    assert [find(table(np.random.default_rng(seed))) for seed in range(3)] == [[], [], []]


def make_independent(seed: int) -> dict[str, SplitSample]:
    """Columns of any kind that have nothing to do with each other, nor with the target."""
    random = np.random.default_rng(seed)
    n = int(random.integers(60, 2000))
    few = int(random.integers(2, n))
    kinds: list[Callable[[], Array]] = [
        lambda: random.normal(size=n),
        lambda: random.poisson(30, n).astype(float),
        lambda: write(random.integers(0, few, n)),
        lambda: write(f"w{each}" for each in random.zipf(1.3, n) % 1000),
        lambda: random.integers(0, few, n).astype(float),
        lambda: np.where(random.random(n) < 0.3, np.nan, random.integers(0, few, n)),
        lambda: make_days(random.integers(0, 300, n)),
        lambda: np.where(random.random(n) < 0.2, "", write(random.integers(0, max(2, n // 4), n))),
    ]
    targets: list[Callable[[], Array]] = [
        lambda: random.normal(size=n),
        lambda: random.pareto(1, n),
        lambda: write(random.integers(0, 2, n)),
        lambda: write(random.random(n) < 0.03),
        lambda: write(random.integers(0, 10, n)),
    ]
    columns = {"date": kinds[6](), "x": kinds[0]()}
    columns |= {f"x{k}": kinds[random.integers(len(kinds))]() for k in range(random.integers(1, 9))}
    others = {f"o{k}": kinds[random.integers(2, len(kinds))]() for k in range(random.integers(1, 5))}
    return make(columns, targets[random.integers(len(targets))](), others, seed)


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_independent_tables_give_no_alarm(count: int) -> None:
    assert [text for seed in range(count) for text in find(make_independent(seed))] == []


def make_orders(seed: int, customers: int, rows: int = 2000, stay: float = 1.0) -> dict[str, SplitSample]:
    """Orders of customers in a year, at random days; customers who `stay` a part of the year come and go."""
    random = np.random.default_rng(seed)
    day = np.sort(random.integers(0, 365, rows))
    first = random.random(customers) * (1 + stay) - stay if stay < 1 else np.full(customers, -0.1)
    last = first + (stay if stay < 1 else 1.2)
    active = [np.flatnonzero((first < each) & (each < last)) for each in np.arange(365) / 365]
    of = np.array([random.choice(active[each]) for each in day])
    columns = {"customer": write(f"K{each}" for each in of), "date": make_days(day)}
    columns |= {"price": random.lognormal(3, 1, rows), "product": write(random.zipf(1.5, rows) % 700)}
    return make(columns, write(random.integers(2, size=rows)), {}, seed)


@pytest.mark.parametrize("customers", [30, 300, 1600, 6000])
def test_customers_who_order_at_random_days_do_not_drift(customers: int) -> None:
    found = [text for seed in range(5) for text in find(make_orders(seed, customers))]
    assert [text for text in found if "drift" in text] == []


@pytest.mark.parametrize("customers", [30, 300])
def test_customers_who_come_and_go_drift(customers: int) -> None:
    (text,) = [text for text in find(make_orders(0, customers, stay=0.3)) if "drift" in text]
    assert text.startswith("along date, there is a drift of customer;")


@pytest.mark.parametrize("is_input", [True, False])
@pytest.mark.parametrize("what", ["the target", "an input"])
def test_a_drift_along_a_date_is_found(is_input: bool, what: str) -> None:
    random = np.random.default_rng(3)
    day, rate = random.integers(0, 300, 1500), random.normal(size=1500)
    late = np.where(day > 200, 1.2, 0.0)
    columns = {"rate": rate + (late if what == "an input" else 0), "year": 2024 + day / 365.0}
    target = random.normal(size=1500) + (late if what == "the target" else 0)
    dates = {"date": make_days(day)}
    splits = make({**columns, **(dates if is_input else {})}, target, {} if is_input else dates)
    (text,) = find(splits)
    drifting = "target" if what == "the target" else "rate"
    assert text.startswith(f"along date, there is a drift of {drifting}; a random split is too kind to later rows")
    assert text.endswith("dataset.split='{by: time, column: date}'")
    assert find(splits, Split("time", "date")) == []


def test_rows_that_are_equal_but_for_an_id_or_a_date_are_found_on_both_sides() -> None:
    random = np.random.default_rng(0)
    number = random.permutation(1000).astype(float)
    columns = {"number": number, "date": make_days(random.integers(0, 900, 1000))}
    columns |= {"a": random.normal(size=1000), "b": random.normal(size=1000), "town": random.choice(write("abc"), 1000)}
    splits = make(columns, random.normal(size=1000), {})
    assert list(find_duplicates(splits)) == []
    test = {**splits["test"].columns}
    for name in ("a", "b", "town"):
        test[name] = np.concatenate([splits["train"].columns[name][:20], test[name][20:]])
    (finding,) = find_duplicates(splits | {"test": replace(splits["test"], columns=test)})
    assert finding.text == f"20 of the {len(splits['test'])} rows of test are in train, too, but for number, date"


def test_groups_and_times_of_files_that_are_named_after_splits_are_compared() -> None:
    made, of = make_visits(0), {"train": np.arange(60), "test": np.arange(12)}

    def find_between(rule: Split, **parts: Any) -> list[str]:
        keys = {
            name: DivisionKeys(**{"times" if rule.by == "time" else "groups": each}) for name, each in parts.items()
        }
        return [each.text for each in find_together(made, 1200, rule, keys)]

    by_group, by_time = Split("group", "customer"), Split("time", "day")
    (text,) = find_between(by_group, train=of["train"], test=of["test"] + 50)
    assert text.startswith("10 of 12 groups of customer in the files of test are in train, too: put all rows into")
    assert find_between(by_group, train=of["train"], test=of["test"] + 60) == []
    (text,) = find_between(by_time, train=of["train"], test=of["test"] + 58)
    assert text.startswith("2 of 12 rows in the files of test are no later than train")
    assert find_between(by_time, train=of["train"], test=of["test"] + 60) == []


@pytest.mark.slow
@pytest.mark.parametrize("is_drifting", [False, True])
def test_one_of_many_pairs_of_a_date_and_a_column_looks_like_a_drift_by_chance(is_drifting: bool) -> None:
    """60 dates and 1,500 columns, drawn at random: of these, one pair has an index above what 1 in 1,000 have."""
    random = np.random.default_rng(1)
    columns: dict[str, Array] = {f"c{n}": random.normal(size=400) for n in range(1500)}
    days = {f"d{n}": random.integers(0, 900, 400) for n in range(60)}
    if is_drifting:
        columns["c7"] += 5 * (days["d3"] > 500)
    dates = {name: make_days(each) for name, each in days.items()}
    splits = make(columns, write(random.integers(2, size=400)), others=dates)
    assert bool([each for each in find(splits) if "drift" in each]) == is_drifting
