"""Data is not said to differ from itself: each split against itself, a half of itself, and the rest of a split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scaleflow.dataset.column_kinds import ARRAY, CATEGORY, DATE, NUMBER, TEXT
from scaleflow.dataset.schema import SplitSample, make_schema
from scaleflow.features.checks.drift import DRIFT, DriftCounter, compare_sample, select_level
from scaleflow.features.predict.bad_rows import RowReport
from scaleflow.interfaces import Inputs, LearnedState, Outputs
from tests.features.checks.made import WORDS, cut, replace_some

Array = np.ndarray[Any, Any]

SEEDS = 50

KINDS = {
    **dict.fromkeys(("text",), TEXT),
    **dict.fromkeys(("colour", "word", "seldom"), CATEGORY),
    **dict.fromkeys(("number", "gaps", "few gaps", "count", "tail", "zeros", "constant"), NUMBER),
    "date": DATE,
    "array": ARRAY,
}


def make_hard_table(seed: int, rows: int) -> SplitSample:
    """Columns of which random halves look different: gaps of some 10 %, long tails, many categories, a rare class."""
    random = np.random.default_rng(seed)
    texts = np.array([" ".join(random.choice(WORDS, random.integers(1, 20))) for _ in range(rows)], object)
    normal = random.normal(size=(3, rows))
    columns: dict[str, Array] = {
        "text": replace_some(texts, random, random.uniform(0.08, 0.12), ""),
        "colour": random.choice(np.array(["red", "green", "blue"], object), rows),
        "word": np.array([f"word {n}" for n in random.zipf(1.5, rows) % 5000], object),
        "seldom": replace_some(np.full(rows, "usual", object), random, 0.1, ""),
        "number": normal[0],
        "gaps": replace_some(normal[1], random, 0.095, np.nan),
        "few gaps": replace_some(normal[2], random, 0.015, np.nan),
        "count": random.poisson(1, rows).astype(np.float64),
        "tail": random.pareto(1, rows),
        "zeros": replace_some(np.zeros(rows), random, 0.09, 5.0),
        "constant": np.ones(rows),
        "date": np.array([f"2024-01-{day:02}" for day in random.integers(1, 28, rows)], object),
        "array": random.normal(size=(rows, 3, 3)),
    }
    target = np.where(random.random(rows) < 0.06, "yes", "no").astype(object)
    return SplitSample(columns, KINDS, {"": target}, rows, is_table=True)


def find_drift(known: SplitSample, now: SplitSample) -> list[str]:
    return [each.text for each in select_level(compare_sample(make_schema(known), now), DRIFT)]


@pytest.mark.parametrize("rows", [60, 300, 1500])
@pytest.mark.slow
def test_data_is_not_said_to_differ_from_itself(rows: int) -> None:
    for seed in range(SEEDS):
        whole = make_hard_table(seed, rows)
        order = np.random.default_rng([seed, 1]).permutation(rows)
        first, last, half = (
            cut(whole, order[part]) for part in (slice(rows * 4 // 5), slice(rows * 4 // 5, None), slice(rows // 2))
        )
        for known, now in ((whole, whole), (whole, half), (half, whole), (first, last), (last, first)):
            assert find_drift(known, now) == [], seed


@pytest.mark.parametrize("values", [5, 150, 1300, 2500, 5000])
@pytest.mark.parametrize(("before", "now"), [(1600, 400), (2000, 8000), (300, 3000)])
def test_a_column_of_many_values_is_not_said_to_differ_from_itself(values: int, before: int, now: int) -> None:
    for seed in range(3):
        random = np.random.default_rng(seed)
        rates = random.dirichlet(np.full(values, 50 if seed else 0.3))
        words = np.array([f"w{each}" for each in random.choice(values, before + now, p=rates)], object)
        known, new = (
            SplitSample({"word": each}, {"word": CATEGORY}, {}, len(each)) for each in (words[:before], words[before:])
        )
        counter = DriftCounter(make_schema(known))
        counter.add("word", new.columns["word"])
        assert [each.text for each in counter.find() if each.rule == "drift"] == [], seed


def test_a_column_of_many_values_that_changes_is_found() -> None:
    random = np.random.default_rng(0)
    words = np.array([f"w{each}" for each in random.integers(400, size=2000)], object)
    known = SplitSample({"word": words}, {"word": CATEGORY}, {}, 2000)
    counter = DriftCounter(make_schema(known))
    counter.add("word", np.array([f"w{each}" for each in random.integers(200, size=2000)], object))
    assert "drift" in [each.rule for each in counter.find()]


@pytest.mark.parametrize(("before", "now"), [(6400, 1600), (20_000, 300)])
@pytest.mark.parametrize("value", ["new", "w7"])
def test_a_value_that_a_schema_does_not_list_and_that_becomes_frequent_is_found(
    before: int, now: int, value: str
) -> None:
    random = np.random.default_rng(0)
    words = np.array([f"w{each}" for each in random.integers(2600, size=before)], object)
    schema = make_schema(SplitSample({"word": words}, {"word": CATEGORY}, {}, before))
    new = np.array([f"w{each}" for each in random.integers(2600, size=now)], object)
    new[: now // 5] = value
    counter = DriftCounter(schema)
    for part in np.array_split(new, 3):
        counter.add("word", part)
    assert "drift" in [each.rule for each in counter.find()]


def make_report(schema: dict[str, Any]) -> RowReport:
    inputs = {"text": Inputs((), "string"), "number": Inputs((), "float32")}
    return RowReport("raise", str, LearnedState(inputs, Outputs("regression", (1,)), {}, schema=schema))


def test_prediction_s_inputs_are_not_said_to_differ_from_training_s() -> None:
    for seed in range(SEEDS):
        whole = make_hard_table(seed, 600)
        chosen = {name: whole.columns[name] for name in ("text", "number")}
        report = make_report(make_schema(SplitSample(chosen, KINDS, {}, 600)))
        for start in range(0, 600, 200):
            report.add_inputs({name: values[start : start + 200] for name, values in chosen.items()})
        assert report.find_drift() == []
        shorter = {**chosen, "text": np.array([text[:20] for text in chosen["text"]], object)}
        report.add_inputs(shorter)
        report.add_inputs(shorter)
        assert [each.columns for each in report.find_drift() if each.rule == "drift"] == [["text"]]


def test_a_schema_of_an_early_version_counts_empty_texts_with_the_others() -> None:
    for seed in range(5):
        whole = make_hard_table(seed, 600)
        chosen = {name: whole.columns[name] for name in ("text", "number")}
        schema = make_schema(SplitSample(chosen, KINDS, {}, 600))
        lengths = np.array([len(text) for text in chosen["text"]], np.float64)
        early = NUMBER.describe(lengths) | {"kind": TEXT.name, "missing": float((lengths == 0).mean())}
        report = make_report({**schema, "columns": {**schema["columns"], "text": early}})
        report.add_inputs(chosen)
        assert report.find_drift() == []


def test_more_gaps_than_chance_gives_are_found_in_small_data_too() -> None:
    for seed in range(SEEDS):
        whole = make_hard_table(seed, 300)
        random = np.random.default_rng(seed)
        gaps = cut(whole, slice(None))
        columns = {**gaps.columns, "number": replace_some(gaps.columns["number"], random, 0.25, np.nan)}
        (text,) = find_drift(whole, SplitSample(columns, KINDS, gaps.targets, 300, is_table=True))
        assert text == "number: 25.0% of the values are missing, 0.0% in training"
