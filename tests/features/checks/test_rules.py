"""Planted faults are found, and data without faults gives no alarm."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from scaleflow.dataset.column_kinds import CATEGORY, KINDS, NUMBER
from scaleflow.dataset.schema import SplitSample, make_sample, make_schema
from scaleflow.features.checks.data_page import make_data_page, sort_findings
from scaleflow.features.checks.drift import (
    DRIFT,
    FAULT,
    HINT,
    DataFinding,
    compare_columns,
    compare_sample,
    select_level,
)
from scaleflow.features.checks.rules import find_duplicates, find_faults
from scaleflow.interfaces import Inputs, Outputs
from tests.features.checks.made import (
    FAULTS,
    Splits,
    copy_rows,
    cut,
    find_everything,
    make_pictures,
    make_table,
    make_texts,
    put,
)

#: Data without faults.
CLEAN: dict[str, Callable[[int], Splits]] = {
    "classes": make_table,
    "values": lambda seed: make_table(seed, "values"),
    "pictures": make_pictures,
    "texts": make_texts,
}


def list_found(kind: str, seed: int) -> set[str]:
    rule, make, plant = FAULTS[kind]
    planted = find_everything(plant(make(seed), np.random.default_rng([seed, 1])))
    assert rule not in {each.rule for each in find_everything(make(seed))}
    return {each.rule for each in planted}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_planted_fault_is_found(kind: str) -> None:
    assert FAULTS[kind][0] in list_found(kind, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_planted_fault_is_found_in_ten_data_sets(kind: str) -> None:
    assert all(FAULTS[kind][0] in list_found(kind, seed) for seed in range(10))


@pytest.mark.parametrize("kind", CLEAN)
def test_clean_data_gives_no_alarm(kind: str) -> None:
    assert [each for seed in range(5) for each in find_everything(CLEAN[kind](1000 + seed))] == []


@pytest.mark.slow
def test_clean_data_gives_an_alarm_in_at_most_one_of_twenty_runs() -> None:
    runs = [find_everything(make(seed)) for make in CLEAN.values() for seed in range(50)]
    assert sum(map(bool, runs)) <= len(runs) / 20


def test_a_finding_names_its_column_its_figure_and_its_rule() -> None:
    splits = put(make_table(3), "copy", NUMBER, lambda each: each.columns["age"])
    (finding,) = find_faults(splits["train"])
    assert (finding.rule, finding.level, finding.columns) == ("duplicate columns", FAULT, ["age", "copy"])
    assert finding.text == "copy is a copy of age"
    assert finding.because == "equal in every row"


def test_few_rows_are_not_judged() -> None:
    splits = put(make_table(3, rows=20), "x", NUMBER, lambda each: np.full(len(each), 1.0))
    assert find_faults(splits["train"]) == []


def test_unseen_categories_are_named_with_counts() -> None:
    splits = make_table(5)
    schema = make_schema(splits["train"])
    towns = splits["test"].columns["town"].copy()
    towns[:30], towns[30:33] = "Paris", "Rom"
    changed = put(splits, "town", CATEGORY, lambda _: towns, "test")["test"]
    (finding,) = [each for each in compare_sample(schema, changed) if each.rule == "unseen"]
    assert finding.text.endswith("33 of 500 values are not in training: 'Paris' (30), 'Rom' (3)")
    assert finding.level == DRIFT


@pytest.mark.parametrize(("before", "now"), [("date", "category"), ("category", "date"), ("number", "category")])
def test_a_column_of_another_type_is_a_fault(before: str, now: str) -> None:
    schema = {"columns": {"day": {"kind": before}}}
    (finding,) = compare_columns(schema, {"day": KINDS[now]})
    assert (finding.level, finding.text) == (FAULT, f"day: is {now}, and was {before} in training")
    assert not list(compare_columns(schema, {"day": KINDS[before]}))


def test_a_source_says_what_a_column_is_or_its_values_do() -> None:
    days = np.array(["2024-01-31", "2024-02-01"], object)
    inputs = {"day": Inputs((), "string", kind="date"), "word": Inputs((), "string")}
    sample = make_sample(inputs, Outputs("regression", (1,)), (dict.fromkeys(inputs, days), np.zeros((2, 1))), 2)
    assert sample.kinds == {"day": KINDS["date"], "word": CATEGORY}


def test_levels_are_ordered() -> None:
    found = find_everything(FAULTS["two units"][2](make_table(0), np.random.default_rng(0)))
    assert {each.level for each in found} == {HINT}
    assert select_level(found, HINT) == found
    assert select_level(found, DRIFT) == select_level(found, FAULT) == []


def test_a_schema_survives_json() -> None:
    schema = make_schema(make_table(1)["train"])
    again = json.loads(json.dumps(schema))
    assert again == schema
    assert schema["columns"]["town"]["values"]["Bern"] > 300
    assert sum(schema["columns"]["age"]["counts"]) == schema["rows"] == 1000
    assert schema["columns"]["share"]["missing"] == pytest.approx(0.05, abs=0.02)
    assert schema["targets"]["target"]["distinct"] == 3


def test_equal_rows_of_few_columns_may_be_chance() -> None:
    random = np.random.default_rng(0)
    age = random.normal(40, 10, 1200).round(2)
    columns = {"age": age, "town": random.choice(np.array(["Bern", "Chur"], object), 1200)}
    target = np.array(["no", "yes"], object)[random.integers(0, 2, 1200)]
    kinds = {"age": NUMBER, "town": CATEGORY}
    whole = SplitSample(columns, kinds, {"": target}, 1200, is_table=True)
    splits = {"train": cut(whole, slice(0, 800)), "test": cut(whole, slice(800, 1200))}
    assert list(find_duplicates(splits)) == []
    copied = copy_rows(splits, random, "train", "test", 0.5)
    assert "duplicates across splits" in {each.rule for each in find_duplicates(copied)}


@pytest.mark.parametrize("kind", CLEAN)
def test_a_page_shows_findings_columns_and_examples(kind: str) -> None:
    splits = CLEAN[kind](7)
    found = sort_findings([DataFinding("a", HINT, "the <first>", "x"), DataFinding("b", FAULT, "the second", "y")])
    pictures = {"ant": splits["train"].columns["input"]} if kind == "pictures" else {}
    page = make_data_page("Data: mine", found, splits, pictures=pictures)
    assert page.index("the second") < page.index("the &lt;first&gt;")
    assert page.count('<img src="data:image/png;base64,') == len(pictures)
    titles = "Distributions by split" if kind == "values" else "Distributions by class"
    assert titles in page
    assert all(f"<td>{name}</td>" in page for name in splits["train"].columns)
    assert 'src="http' not in page
