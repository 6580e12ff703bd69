"""Intervals and comparisons of rows that belong together: whole groups, or blocks in time, are drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import csv
from scipy import stats
from sklearn import metrics

from scaleflow.evaluation.comparison import compare_predictions, list_differences, pair_scores
from scaleflow.evaluation.intervals import Intervals
from scaleflow.evaluation.measures import measure_one, rank_scores
from scaleflow.evaluation.outputs import analyse_output
from scaleflow.evaluation.predictions import GROUP, TIME, Predictions, load_predictions
from scaleflow.evaluation.resampling import BLOCKS, Resamples, Units, number_blocks
from scaleflow.interfaces.estimate import Estimate
from tests.conftest import Command
from tests.evaluation.made import BINARY, CLASSES, draw_values, make_predictions

Array = np.ndarray[Any, Any]


def group(numbers: Array) -> Units:
    return Units(numbers, "group", " of customer")


def make_visits(is_right: Array, column: str = GROUP, keys: Array | None = None) -> Predictions:
    """Predictions of two classes for 20 visits of each customer, all of them right or all wrong."""
    random = np.random.default_rng(len(is_right))
    right = np.repeat(is_right, 20)
    target = random.integers(2, size=len(right)).astype(np.float32)[:, None]
    output = np.where((target[:, 0] > 0) == right, 1.0, -1.0)[:, None].astype(np.float32)
    made = make_predictions(BINARY, {"": {"target": target, "output": output}})
    keys = np.repeat(np.arange(len(is_right)), 20) if keys is None else keys
    table = made.table.append_column(column, pyarrow.array(keys))
    return replace(made, table=table, digest="d", divided_by="customer")


@pytest.mark.slow
def test_whole_groups_add_up() -> None:
    """The squares of the sums of groups are the variance: that of the bootstrap of groups, with few of them wider."""
    random = np.random.default_rng(5)
    sizes = random.integers(1, 40, size=60)
    members, rows = np.repeat(np.arange(60), sizes), int(sizes.sum())
    weights = random.uniform(0.5, 2, rows)
    likeness = random.normal(size=60)[members]
    scores = likeness + random.normal(size=rows)
    is_yes, errors = scores + random.normal(size=rows) > 0.4, likeness + random.normal(size=rows)
    intervals = Intervals(rows, weights, group(members + 7))
    places = list(Resamples(rows, group(members)).draw(600))

    def compare(found: Estimate, compute: Any) -> None:
        low, high = np.percentile([compute(each) for each in places], [2.5, 97.5])
        assert 0.9 <= (found.high - found.low) / (high - low) <= 1.4
        assert found.low < found.value < found.high

    compare(intervals.mean(is_yes), lambda n: np.average(is_yes[n], weights=weights[n]))
    found = measure_one(scores, errors, intervals)
    compare(found["mae"], lambda n: np.average(abs(errors[n]), weights=weights[n]))
    compare(found["rmse"], lambda n: np.average(errors[n] ** 2, weights=weights[n]) ** 0.5)
    compare(found["r2"], lambda n: metrics.r2_score(scores[n], (scores + errors)[n], sample_weight=weights[n]))
    ranking = rank_scores(scores, is_yes, intervals)
    compare(ranking.auc, lambda n: metrics.roc_auc_score(is_yes[n], scores[n], sample_weight=weights[n]))
    ap = ranking.average_precision
    compare(ap, lambda n: metrics.average_precision_score(is_yes[n], scores[n], sample_weight=weights[n]))


def test_groups_of_one_row_are_rows() -> None:
    values = np.random.default_rng(0).normal(size=100)
    assert Intervals(100, units=group(np.arange(100))).mean(values) == Intervals(100).mean(values)


def test_one_group_has_no_interval_and_a_rate_without_spread_has_that_of_its_groups() -> None:
    right = np.ones(240, bool)
    assert np.isnan(Intervals(240, units=group(np.zeros(240, int))).mean(right).low)
    twelve = Intervals(240, units=group(np.repeat(np.arange(12), 20)))
    least = 12 / (12 + stats.t.ppf(0.975, 11) ** 2)  # Wilson's with as many rows as groups
    assert twelve.mean(right) == pytest.approx((1, least, 1), rel=1e-3)
    assert twelve.mean(~right) == pytest.approx((0, 0, 1 - least), rel=1e-3)
    assert twelve.mean(right.astype(float)) == (1, 1, 1), "a mean that is no rate"
    ranking = rank_scores(np.repeat([0.1, 0.9], 120), np.repeat([False, True], 120), twelve)
    assert ranking.auc.low < least


def test_rows_in_time_are_drawn_in_blocks_and_those_of_one_time_stay_together() -> None:
    times = np.random.default_rng(0).permutation(1000)
    blocks = number_blocks(times)
    assert (np.bincount(blocks) == 1000 // BLOCKS).all()
    assert all(np.ptp(times[blocks == n]) == 1000 // BLOCKS - 1 for n in range(BLOCKS))
    days = np.repeat([1.0, 2.0, 3.0], [500, 10, 490])
    assert [len(np.unique(number_blocks(days)[days == day])) for day in (1, 2, 3)] == [1, 1, 1]
    made = make_visits(np.ones(5, bool), TIME, np.arange(100).astype("M8[D]"))
    assert made.units is not None
    assert made.units.describe() == "10 blocks in the order of customer"


# ---------------------------------------------------------------------------------------------
# Coverage
# ---------------------------------------------------------------------------------------------


def draw_sizes(how: str, count: int, random: np.random.Generator, spread: float = 1) -> Array:
    if how == "equal":
        return np.full(count, 20)
    if how == "one half":
        return np.array([20 * (count - 1), *[20] * (count - 1)])
    return np.maximum(1, np.exp(random.normal(2.3, spread, count))).astype(int)


def count_hits(
    kind: str, how: str, count: int, likeness: float, rate: float = 0.7, spread: float = 1, simulations: int = 100
) -> int:
    """Returns how many intervals hold the truth of new groups, whose rows are alike: fully with a likeness of 1."""
    random, hits = np.random.default_rng(count), 0
    for _ in range(simulations):
        sizes = draw_sizes(how, count, random, spread)
        members, rows = np.repeat(np.arange(count), sizes), int(sizes.sum())
        intervals = Intervals(rows, units=group(members))
        errors = likeness**0.5 * random.normal(size=count)[members] + (1 - likeness) ** 0.5 * random.normal(size=rows)
        if kind == "accuracy":
            truth, found = rate, intervals.mean(errors < NormalDist().inv_cdf(rate))
        elif kind == "auc":
            is_yes = random.random(rows) < 0.5 if likeness < 1 else np.arange(count)[members] % 2 == 0
            truth, found = NormalDist().cdf(0.5**0.5), rank_scores(errors + is_yes, is_yes, intervals).auc
        else:
            truth = 1.0 if kind == "rmse" else (2 / np.pi) ** 0.5
            found = measure_one(random.normal(size=rows), errors, intervals)[kind]
        hits += found.low <= truth <= found.high
    return hits


@pytest.mark.slow
def test_the_interval_of_60_customers_with_20_visits_holds_the_accuracy_on_new_ones() -> None:
    """The answer is the same for all visits of a customer; 12 of the customers are the test."""
    hits = {"groups": 0, "rows": 0}
    for seed in range(100):
        made = make_visits(np.random.default_rng(seed).random(12) < 0.55)
        for name, each in (("groups", made), ("rows", replace(made, table=made.table.drop_columns([GROUP])))):
            found = analyse_output(each, "", BINARY, 300).estimates["accuracy"]
            hits[name] += found.low <= 0.55 <= found.high
    assert hits["groups"] >= 90 > 60 > hits["rows"]


def test_the_interval_of_a_high_rate_in_very_unequal_groups_holds_it() -> None:
    assert count_hits("accuracy", "lognormal", 30, 1.0, rate=0.9, spread=1.5) >= 90
    assert count_hits("rmse", "equal", 12, 1.0, simulations=400) >= 360


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["accuracy", "auc", "mae", "rmse"])
def test_90_of_100_intervals_over_groups_hold_the_truth(kind: str) -> None:
    few = {
        (how, count, likeness): count_hits(kind, how, count, likeness)
        for how in ("equal", "lognormal", "one half")
        for count in (12, 20, 40)
        for likeness in (0.3, 1.0)
    }
    assert min(few.values()) >= 84, few  # squares of few values that are alike are the worst: 86
    assert np.mean(list(few.values())) >= 92, few


@pytest.mark.slow
def test_90_of_100_intervals_over_blocks_hold_the_truth_of_a_series_in_time() -> None:
    hits, rows, random = {0.0: 0, 0.5: 0, 0.8: 0}, 1000, np.random.default_rng(0)
    for likeness in hits:
        for _ in range(100):
            values = random.normal(size=rows)
            for n in range(1, rows):
                values[n] = likeness * values[n - 1] + (1 - likeness**2) ** 0.5 * values[n]
            found = Intervals(rows, units=Units(number_blocks(np.arange(rows)), "block", "")).mean(values)
            hits[likeness] += found.low <= 0 <= found.high
    assert min(hits.values()) >= 90, hits


# ---------------------------------------------------------------------------------------------
# Comparisons, reports, files
# ---------------------------------------------------------------------------------------------


def test_models_that_differ_by_the_luck_of_a_few_customers_do_not_differ() -> None:
    noise, better = {"groups": 0, "rows": 0}, {"groups": 0, "rows": 0}
    for seed in range(40):
        random = np.random.default_rng(seed)
        pair = [make_visits(random.random(12) < 0.6) for _ in range(2)]
        plain = [replace(each, table=each.table.drop_columns([GROUP])) for each in pair]
        for name, (first, second) in {"groups": pair, "rows": plain}.items():
            (found,) = compare_predictions(first, second)
            noise[name] += found.is_noise
            (scores,) = pair_scores(first, second)
            better[name] += scores.compare(0.95).gain.low > 0
    assert noise["groups"] >= 36 > 20 > noise["rows"]
    assert better["groups"] <= 3 < 10 < better["rows"]


def test_the_groups_of_either_model_count_and_so_do_customers_that_differ() -> None:
    first, second = (make_visits(np.arange(12) < right) for right in (12, 9))
    old = replace(second, table=second.table.drop_columns([GROUP]))
    for pair in ((first, second), (first, old), (old, first)):
        (scores,) = pair_scores(*pair)
        assert scores.units is not None
        assert (scores.count_differing(), len(scores.scores)) == (3, 240)
        assert scores.select(np.arange(240) < 220).units.describe() == "11 groups of customer"  # type: ignore[union-attr]
    rows = list_differences([("a", first), ("b", old)])
    assert [row["over"] for row in rows] == ["12 groups of customer"] * 2
    one = make_visits(np.array([True]))
    (found,) = compare_predictions(one, make_visits(np.array([False])))
    assert found.is_noise, "one customer shows nothing"


def test_chance_makes_a_larger_calibration_error_over_groups() -> None:
    values = draw_values(CLASSES, 240, skill=0.0)
    made = make_predictions(CLASSES, {"": values})
    grouped = replace(made, table=made.table.append_column(GROUP, pyarrow.array(np.arange(240) // 20)))
    errors = [analyse_output(each, "", CLASSES, 0).facts["chance error"] for each in (made, grouped)]
    assert errors[1] > 2 * errors[0]


def write_visits(folder: Path) -> tuple[str, ...]:
    """Writes files of 60 customers with 4 visits each; returns the words of a run."""
    random, customers = np.random.default_rng(0), np.repeat(np.arange(60), 4)
    columns = {"customer": [f"c{n:02}" for n in customers], "age": random.normal(size=240), "day": np.arange(240)}
    table = pyarrow.table({**columns, "bought": random.random(60)[customers] < 0.5})
    csv.write_csv(table, folder / "visits.csv")
    csv.write_csv(table.slice(0, 100), folder / "new.csv")
    csv.write_csv(table.slice(0, 100).drop_columns(["customer"]), folder / "other.csv")
    words = ("dataset=table", "dataset.data_dir=visits.csv", "dataset.target=bought", "training.max_steps=2")
    return (*words, "model=mlp", "hardware=cpu", "evaluation.seconds=1", "hydra.run.dir=run")


def test_a_run_keeps_the_groups_of_its_test(tmp_path: Path) -> None:
    split = "dataset.split={by: group, column: customer}"
    done = Command(tmp_path)(*write_visits(tmp_path), split, "tracking=none", "checkpoint=none")
    assert done.returncode == 0, done.stderr
    kept = load_predictions(tmp_path / "run" / "evaluation" / "predictions.parquet")
    customers, groups = (kept.column("row") - 1) // 4, kept.column(GROUP)
    assert len(np.unique(customers)) == len(np.unique(groups)) == 12
    assert len(set(zip(customers.tolist(), groups.tolist(), strict=True))) == 12, "a number for each customer"
    assert "over 12 groups of customer" in (tmp_path / "run" / "evaluation" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "column", "over"),
    [("group", "customer", "25 groups of customer"), ("time", "day", "10 blocks in the order of day")],
)
def test_an_evaluation_of_new_data_draws_groups_if_they_have_the_column(
    tmp_path: Path, by: str, column: str, over: str
) -> None:
    command = Command(tmp_path)
    done = command(*write_visits(tmp_path), f"dataset.split={{by: {by}, column: {column}}}")
    assert done.returncode == 0, done.stderr
    command.module = "scaleflow evaluate"
    for name in ("new", "other") if by == "group" else ("new",):
        done = command("run", f"dataset.data_dir={name}.csv")
        assert done.returncode == 0, done.stderr
        (page,) = tmp_path.glob("mlartifacts/*/*/artifacts/evaluate/table/report.html")
        assert (f"over {over}." in page.read_text()) == (name == "new")
