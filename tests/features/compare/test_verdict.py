"""Whether a run gave the results of another one, and whether a difference is more than noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from sklearn.metrics import balanced_accuracy_score, log_loss

from scaleflow.evaluation.predictions import PREDICTIONS, Predictions, save_predictions
from scaleflow.features.compare.examples import PairedPredictions, compare_examples
from scaleflow.features.compare.results import compare_metrics, judge_runs, measure_repeats
from scaleflow.features.compare.runs import compare_loaded
from scaleflow.features.compare.tables import render_metric
from scaleflow.interfaces import Outputs
from scaleflow.runs import RunFolder
from scaleflow.runs.run import Run
from tests.features.compare import fake_run

Points = Mapping[str, Sequence[tuple[int, float]]]


def make_run(points: Points, weights: str = "", folder: Path = Path("gone"), **more: Any) -> Run:
    return fake_run(folder, points=points, weights=weights, **more)


FIRST: Points = {"train/loss": [(1, 2.0), (8, 1.0), (16, 0.5)], "val/loss": [(16, 0.25)], "perf/step_ms": [(16, 3.0)]}


@pytest.mark.parametrize(
    ("points", "weights", "text"),
    [
        (FIRST, "w", "equal bits"),
        ({**FIRST, "perf/step_ms": [(16, 4.0)], "system/cpu": [(1, 1.0)]}, "w", "equal bits"),
        ({**FIRST, "train/loss": [(1, 2.0), (9, 7.0), (16, 0.5)]}, "w", "equal bits"),  # another speed
        ({**FIRST, "baseline/accuracy": [(0, 0.5)]}, "w", "equal bits"),
        (FIRST, "", "equal bits"),
        (FIRST, "other", "equal to 1e-6"),
        ({**FIRST, "val/loss": [(16, 0.25 + 5e-7)]}, "w", "equal to 1e-6"),
        ({**FIRST, "train/loss": [(1, 2.0), (8, 1.1)]}, "w", "differs from step 8 on: train/loss was 1 and is 1.1"),
        ({**FIRST, "val/loss": [(16, math.nan)]}, "w", "differs from step 16 on: val/loss was 0.25 and is nan"),
        ({"train/loss": FIRST["train/loss"]}, "w", "differs from step 16 on: val/loss is only in the first run"),
        ({}, "", "differs from step 1 on: the first run has 16 steps, the second 0"),
    ],
)  # fmt: skip
def test_the_verdict_names_equal_bits_or_the_first_step_that_differs(points: Points, weights: str, text: str) -> None:
    judged = judge_runs(make_run(FIRST, "w"), make_run(points, weights))
    assert judged.text == text
    assert judged.is_equal == text.startswith("equal")
    assert judged.weights == {"w": "equal", "": "not known", "other": "differ"}[weights]


def test_costs_are_compared_only_if_both_runs_count_with_the_same() -> None:
    def compare(first: Any, second: Any) -> tuple[bool | None, str]:
        points = [{"test/cost_at_threshold": [(8, value)]} for value in (6.5, 0.65)]
        runs = [
            make_run(each, config={"evaluation": section})
            for each, section in zip(points, (first, second), strict=True)
        ]
        (found,) = compare_metrics(*runs)
        return found.is_better, found.basis

    goal, decided = {"threshold": {"cost": [50, 10]}}, {"threshold": 0.2, "miss_cost": 50.0, "alarm_cost": 10.0}
    assert compare(goal, decided)[0] is True  # as in a refit
    for other in ({"threshold": {"cost": [5, 1]}}, {"threshold": 0.2, "miss_cost": 5.0}, {"threshold": 0.2}):
        is_better, basis = compare(goal, other)
        assert is_better is None
        assert basis.endswith("the runs count with other costs")


def test_finished_runs_of_different_lengths_differ() -> None:
    longer: Points = {**FIRST, "train/loss": [*FIRST["train/loss"], (24, 0.4)]}
    judged = judge_runs(make_run(FIRST, "w"), make_run(longer, "w"))
    assert judged.text == "differs from step 17 on: the first run has 16 steps, the second 24"
    assert judge_runs(make_run(FIRST, status="KILLED"), make_run(longer)).text == "equal bits"


def test_without_anything_to_compare_nothing_is_equal() -> None:
    judged = judge_runs(make_run({}), make_run({}))
    assert (judged.text, judged.is_equal) == ("not known: the runs have no metrics in common", False)
    nan: Points = {"val/loss": [(1, math.nan)]}
    assert judge_runs(make_run(nan), make_run(nan)).text == "equal bits"


CLASSES = ("a", "b", "c")


def save_classes(folder: Path, chances: np.ndarray[Any, Any], targets: np.ndarray[Any, Any], **more: Any) -> RunFolder:
    """Keeps predictions as a run does; `more` columns, and a digest."""
    files = RunFolder(folder)
    files.evaluation.mkdir(parents=True)
    names = np.array(CLASSES, object)
    digest = more.pop("digest", "d")
    columns = {
        "example": np.arange(len(targets)),
        "target": names[targets],
        "target_probability": chances[np.arange(len(targets)), targets].astype(np.float32),
        "prediction": names[chances.argmax(axis=1)],
        **more,
    }
    outputs = Outputs("classification", (len(CLASSES),), names=CLASSES)
    kept = Predictions(pyarrow.table(columns), outputs, "test", len(targets), digest)
    save_predictions(files.evaluation / PREDICTIONS, kept)
    return files


@pytest.fixture
def pair(tmp_path: Path) -> tuple[list[Run], np.ndarray[Any, Any], list[np.ndarray[Any, Any]]]:
    """Two runs that were tested on the same 400 examples, the second one clearly better; targets; probabilities."""
    random = np.random.default_rng(0)
    targets = random.integers(3, size=400)
    runs, chances = [], []
    for number, strength in enumerate((0.5, 2.5)):
        logits = random.normal(size=(400, 3)) + strength * np.eye(3)[targets]
        chance = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        files = save_classes(tmp_path / str(number), chance, targets)
        metrics = {
            "test/accuracy": float((chance.argmax(axis=1) == targets).mean()),
            "test/loss": float(log_loss(targets, chance)),
            "test/balanced_accuracy": float(balanced_accuracy_score(targets, chance.argmax(axis=1))),
            "test/auc": 0.5 + number / 10,
            "val/loss": 1.0 - number / 10,
            "train/loss": 1.0,
        }
        runs.append(make_run({name: [(9, value)] for name, value in metrics.items()}, folder=files.path))
        chances.append(chance)
    return runs, targets, chances


def test_a_difference_is_real_if_the_same_examples_show_it(pair: Any) -> None:
    (first, second), targets, chances = pair
    found = {each.name: each for each in compare_metrics(first, second)}
    for name in ("test/accuracy", "test/loss", "test/balanced_accuracy"):
        each = found[name]
        assert each.basis == "400 test examples, paired"
        assert each.is_real
        assert each.is_better
        assert render_metric(each)[-1].startswith("yes, better: ")
        assert each.low < each.difference < each.high
    correct = [(chance.argmax(axis=1) == targets).astype(float) for chance in chances]
    error = (correct[1] - correct[0]).std() / math.sqrt(400)  # of a mean of paired differences
    accuracy = found["test/accuracy"]
    assert accuracy.high - accuracy.low == pytest.approx(2 * 1.96 * error, rel=0.15)
    back = {each.name: each for each in compare_metrics(second, first)}
    assert render_metric(back["test/loss"])[-1].startswith("yes, worse: ")
    assert [back[f"test/{name}"].is_better for name in ("loss", "accuracy", "auc")] == [False] * 3
    assert found["test/auc"].basis == "not known: kept predictions do not give this metric"
    assert found["val/loss"].basis == "not known: the runs kept predictions for test"
    assert (found["train/loss"].basis, found["train/loss"].is_real) == ("equal", False)
    same = compare_metrics(first, make_run({**first.points, "test/accuracy": [(9, 0.1)]}, folder=second.files.path))
    assert "do not give this metric" in {each.name: each for each in same}["test/accuracy"].basis


def test_the_interval_of_a_difference_is_paired(pair: Any) -> None:
    (first, second), _, _ = pair
    pairs = PairedPredictions(first, second)
    parts = pairs.find("accuracy", (first.metrics["test/accuracy"], second.metrics["test/accuracy"]))
    assert parts is not None
    assert compare_examples(*parts) == compare_examples(*parts)
    assert compare_examples(parts[0], parts[0]) == (0.0, 0.0)


def test_predictions_for_other_examples_are_not_paired(tmp_path: Path) -> None:
    chances, targets = np.full((4, 3), 1 / 3), np.array([0, 1, 2, 0])

    def run_of(name: str, **more: Any) -> Run:
        return make_run({}, folder=save_classes(tmp_path / name, chances, targets, **more).path)

    first, other = run_of("a", id=np.array([4, 3, 2, 1])), run_of("b", digest="e")
    by_id = run_of("c", digest="e", id=np.array([1, 2, 3, 9]))
    assert PairedPredictions(first, other).reason == "the runs were tested on other examples"
    assert PairedPredictions(first, by_id).count == 3
    assert PairedPredictions(make_run({}), other).reason == "the first run kept no predictions"
    (tmp_path / "a/evaluation/predictions.parquet").write_bytes(b"half")
    assert "cannot be read" in PairedPredictions(first, other).reason


def test_repeats_say_what_is_noise() -> None:
    def run_of(*values: float) -> Run:
        return make_run({"test/loss": [(9, values[0])]}, repeats=[{"test/loss": value} for value in values])

    low, high, basis = measure_repeats(run_of(1.0, 1.1, 0.9), run_of(2.0, 2.1, 1.9), "test/loss") or (0.0, 0.0, "")
    assert basis == "3 and 3 repeats, means 1 and 2"
    error = 2.776 * 0.1 * math.sqrt(2 / 3)  # Student's t with 4 degrees of freedom
    assert (low, high) == pytest.approx((1 - error, 1 + error), rel=1e-3)
    assert measure_repeats(run_of(1.0), run_of(2.0), "test/loss") is None
    assert measure_repeats(run_of(1.0, 1.0), run_of(2.0, 2.0), "test/loss") is None, "one seed"
    alone = measure_repeats(run_of(1.0, 1.1), make_run({"test/loss": [(9, 1.05)]}), "test/loss")
    assert alone is not None
    assert alone[0] < 0 < alone[1]


def test_a_comparison_is_printed_and_shown_in_a_notebook() -> None:
    found = (({"test/loss": [(1, 2.0)]}, "<8>"), ({"test/loss": [(1, 1.0)]}, "9"))
    compared = compare_loaded(*(make_run(points, settings={"model.units": units}) for points, units in found))
    lines = str(compared).splitlines()
    assert ["model.units", "<8>", "9"] in [line.split() for line in lines]
    assert any(line.split()[:4] == ["test/loss", "2", "1", "-1"] for line in lines)
    page = compared._repr_html_()
    assert page.startswith("<pre")
    assert "&lt;8&gt;" in page
    assert "<html" not in page
