"""Reports: their files, slices, findings and mistakes; and what runs make."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from scaleflow.evaluation.outputs import analyse_output
from scaleflow.features.report.findings import KnownOfRun
from scaleflow.features.report.slices import divide_values, find_slices
from scaleflow.interfaces import Outputs
from scaleflow.interfaces.formatting import to_json
from tests.conftest import Command
from tests.dataset.files import write
from tests.evaluation.made import (
    BINARY,
    CLASSES,
    LABELS,
    PRICE,
    TWO,
    draw_predictions,
    draw_values,
    make_predictions,
)
from tests.event_log import events_in
from tests.features.report.made import Reader, report_in

KINDS = {"classes": CLASSES, "two classes": BINARY, "labels": LABELS, "a value": PRICE, "two values": TWO}


def read_table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


@pytest.mark.parametrize("name", [*KINDS, "two outputs"])
def test_a_report_is_one_page_that_loads_nothing_and_its_tables(tmp_path: Path, name: str) -> None:
    outputs = {"kind": CLASSES, "price": PRICE} if name == "two outputs" else KINDS[name]
    predictions = draw_predictions(outputs, 300)
    colour = np.array(["red", "blue", "<b>"], object)[np.arange(300) % 3]
    report = report_in(tmp_path, predictions, Reader(colour=colour))
    page = (tmp_path / "evaluation" / "report.html").read_text()
    assert {str(path) for path in report.files} <= {str(p.relative_to(report.folder)) for p in report.folder.rglob("*")}
    assert "all 300 examples of the test split" in page
    outside = re.findall(r"(?:src|href|url)\W+(?!data:)[\w:/.]+", page) + re.findall(r"https?://(?!www\.w3\.org)", page)
    assert outside == []
    assert "<b>" not in page.replace("<b>labels", "").replace("<b>weak", "").replace("<b>calibration", "")
    assert page.count("<svg") == len([path for path in report.files if path.suffix == ".svg"]) >= 1
    assert page.count("<section>") == page.count("</section>")
    recorded = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    for output, values in recorded["outputs"].items():
        for metric, estimate in values["metrics"].items():
            assert estimate["value"] == report.estimates[f"{output}/{metric}" if output else metric].value
            assert estimate["low"] is None or estimate["low"] <= estimate["value"] <= estimate["high"]
    assert {
        row["slice"] for row in read_table(tmp_path / "evaluation" / "slices.csv") if row["column"] == "colour"
    } == {
        "red",
        "blue",
        "<b>",
    }
    mistakes = read_table(tmp_path / "evaluation" / "mistakes.csv")
    assert len(mistakes) >= 24
    assert mistakes[0]["colour"] == colour[int(mistakes[0]["example"])]


def test_slices_are_measured_as_the_figures_of_their_name(tmp_path: Path) -> None:
    predictions = draw_predictions(replace(BINARY, threshold=0.3), 300)
    report = report_in(tmp_path, predictions, Reader(colour=np.array(["red"] * 300, object)))
    metrics = {row["metric"] for row in read_table(tmp_path / "evaluation" / "slices.csv")}
    assert metrics == {"accuracy_at_threshold"}
    assert "accuracy_at_threshold" in report.estimates


@pytest.mark.parametrize("calibrate", [None, "auto"])
def test_a_calibration_is_advised_if_it_was_not_tried(tmp_path: Path, calibrate: Any) -> None:
    predictions = draw_predictions(BINARY, 300)
    sure = predictions.table.set_column(
        predictions.table.column_names.index("probability"), "probability", pyarrow.array(np.ones(300, np.float32))
    )
    report = report_in(tmp_path, replace(predictions, table=sure), calibrate=calibrate)
    (text,) = (each.text for each in report.findings if each.rule == "calibration")
    assert text.endswith("try evaluation.calibrate=auto") == (calibrate is None)


def test_a_sample_and_no_intervals_are_said(tmp_path: Path) -> None:
    predictions = draw_predictions(CLASSES, 100)
    object.__setattr__(predictions, "examples", 5000)
    report = report_in(tmp_path, predictions, intervals=0, worst=0)
    page = (tmp_path / "evaluation" / "report.html").read_text()
    assert "a fixed sample of 100 of the 5,000 examples" in page
    assert "In brackets" not in page
    assert np.isnan(report.estimates["accuracy"].low)
    assert not (tmp_path / "evaluation" / "mistakes.csv").exists()


def test_mistakes_are_shown_with_their_pictures_and_the_surest_first(tmp_path: Path) -> None:
    predictions = draw_predictions(CLASSES, 200)
    pictures = np.random.default_rng(0).integers(256, size=(200, 10, 20, 3), dtype=np.uint8)
    report_in(tmp_path, predictions, Reader(pictures), worst=5)
    page = (tmp_path / "evaluation" / "report.html").read_text()
    assert (tmp_path / "evaluation" / "mistakes.png").read_bytes().startswith(b"\x89PNG")
    rows = read_table(tmp_path / "evaluation" / "mistakes.csv")
    surest = [float(row["target_probability"]) - float(row["probability"]) for row in rows]
    suspected = [row["suspected_label"] == "True" for row in rows]
    assert suspected == sorted(suspected, reverse=True)
    assert surest[suspected.count(True) :] == sorted(surest[suspected.count(True) :])
    assert page.count('class="sheet"') == len(rows)
    assert all(row["target"] != row["prediction"] for row in rows)


# ---------------------------------------------------------------------------------------------
# Slices
# ---------------------------------------------------------------------------------------------


def slice_example(seed: int, is_planted: bool) -> list[dict[str, Any]]:
    """The slices of a model that is worse in one town, or nowhere."""
    random = np.random.default_rng(seed)
    town = np.array([f"town {n}" for n in range(8)], object)[random.integers(8, size=1200)]
    values = draw_values(CLASSES, 1200, seed, skill=4.0)
    if is_planted:
        bad = (town == "town 3") & (random.random(1200) < 0.4)
        values["output"][bad] = np.roll(values["output"][bad], 1, axis=1)
    kept = make_predictions(CLASSES, {"": values})
    analysis = analyse_output(kept, "", CLASSES, 0)
    columns = {"town": town, "size": random.normal(size=1200), "age": random.integers(5, size=1200)}
    return find_slices(kept, analysis, columns, np.arange(1200), 100)


def test_a_planted_weak_slice_is_found_and_others_are_not() -> None:
    for seed in range(10):
        (first, *others) = slice_example(seed, is_planted=True)
        assert (first["column"], first["slice"], first["is_weak"]) == ("town", "town 3", True)
        assert first["low"] <= first["value"] <= first["high"] < first["value"] - first["difference"]
        assert not any(row["is_weak"] for row in others if row["column"] != "class")
    false_alarms = [row for seed in range(20) for row in slice_example(seed, is_planted=False) if row["is_weak"]]
    assert len(false_alarms) <= 1


@pytest.mark.parametrize("answer", ["threshold", "sets", "labels", "a value", "two values"])
def test_the_weak_slice_comes_first_for_each_measure(tmp_path: Path, answer: str) -> None:
    outputs = {
        "threshold": replace(BINARY, threshold=0.3),
        "sets": replace(CLASSES, set_threshold=0.2),
        "labels": LABELS,
        "a value": PRICE,
        "two values": TWO,
    }[answer]
    random = np.random.default_rng(1)
    town = np.array([f"town {n}" for n in range(6)], object)[random.integers(6, size=1800)]
    values = draw_values(outputs, 1800, skill=4.0)
    is_bad = town == "town 3"
    mean = values["output"].mean(axis=0)
    values["output"][is_bad] = 2 * mean - values["output"][is_bad]  # the opposite answer
    if answer == "sets":
        values["output"][is_bad] = np.roll(values["output"][is_bad], 1, axis=1)
    report = report_in(tmp_path, make_predictions(outputs, {"": values}), Reader(town=town))
    rows = [row for row in read_table(tmp_path / "evaluation" / "slices.csv") if row["column"] == "town"]
    weak = [(row["slice"], row["metric"]) for row in rows if row["is_weak"] == "True"]
    measures = {"threshold": ["accuracy_at_threshold"], "sets": ["accuracy", "coverage"], "labels": ["accuracy"]}
    wanted = measures.get(answer, ["mae" if answer == "a value" else "error in standard deviations"])
    assert sorted(weak) == [("town 3", measure) for measure in wanted]
    assert rows[0]["slice"] == "town 3"
    (finding, *_) = [each.text for each in report.findings if each.rule == "weak slice" and "town" in each.text]
    assert "town=town 3" in finding


def test_columns_are_divided_by_values_by_quantiles_and_by_lengths() -> None:
    numbers = np.append(np.arange(100.0), np.nan)
    assert [name for name, _ in divide_values(numbers)] == [
        "missing",
        "up to 19.8",
        "above 19.8 up to 39.6",
        "above 39.6 up to 59.4",
        "above 59.4 up to 79.2",
        "above 79.2",
    ]
    assert sum(int(inside.sum()) for _, inside in divide_values(numbers)) == 101
    assert [name for name, _ in divide_values(np.array([True, False, True]))] == ["0", "1"]
    texts = np.array([("word " * (n % 60)).encode() + str(n).encode() for n in range(200)], object)
    names = [name for name, _ in divide_values(texts)]
    assert len(names) == 5
    assert all(name.endswith(" characters") for name in names)
    assert [name for name, _ in divide_values(np.array(["a", None, "b"], object))] == ["missing", "a", "b"]


# ---------------------------------------------------------------------------------------------
# Findings
# ---------------------------------------------------------------------------------------------


def find_rules(folder: Path, predictions: Any, known: KnownOfRun | None = None) -> list[str]:
    return [each.rule for each in report_in(folder, predictions, known=known).findings]


def test_a_good_model_has_no_findings(tmp_path: Path) -> None:
    known = KnownOfRun(train={"accuracy": 0.99}, baseline={"accuracy": 0.25})
    random = np.random.default_rng(0)
    chances = random.dirichlet([0.05] * 4, 2000).clip(1e-6)
    targets = np.array([random.choice(4, p=row / row.sum()) for row in chances]).astype(np.int32)
    values = {"target": targets, "output": np.log(chances).astype(np.float32)}
    predictions = make_predictions(CLASSES, {"": values})
    accuracy = analyse_output(predictions, "", CLASSES, 0).estimates["accuracy"].value
    known = KnownOfRun(train={"accuracy": accuracy + 0.02}, baseline={"accuracy": 0.25})
    assert set(find_rules(tmp_path, predictions, known)) <= {"weak slice"}


def test_findings_name_their_rule_and_figure(tmp_path: Path) -> None:
    values = draw_values(CLASSES, 400, skill=0.0)
    values["output"][:, 3] -= 100
    predictions = make_predictions(CLASSES, {"": values})
    accuracy = analyse_output(predictions, "", CLASSES, 0).estimates["accuracy"].value
    known = KnownOfRun(
        train={"accuracy": accuracy + 0.2},
        baseline={"accuracy": accuracy - 0.005},
        doubts={"BatchNorm": "61% of the moving averages"},
    )
    found = {each.rule: each for each in report_in(tmp_path, predictions, known=known).findings}
    assert {"overfit", "baseline", "recall 0", "BatchNorm"} <= set(found)
    assert f"accuracy is {accuracy + 0.2:.4g} in training and {accuracy:.4g} (" in found["overfit"].text
    assert re.match(r"not found once: dog \(\d+ examples, never predicted\)", found["recall 0"].text)
    page = (tmp_path / "evaluation" / "report.html").read_text()
    assert page.index("BatchNorm") < page.index("<h2>Metrics")


def test_outputs_without_an_answer_and_examples_without_a_target_are_said(tmp_path: Path) -> None:
    outputs = Outputs("classification", (4,), names=CLASSES.names, ignore=-1)
    values = draw_values(outputs, 100)
    values["target"][:10] = -1
    values["output"][10:15] = np.nan
    report = report_in(tmp_path, make_predictions(outputs, {"": values}))
    assert report.findings[0].rule == "not finite"
    assert "no answer for 5 examples" in report.findings[0].text
    assert "90 of them have a target" in report.page


def test_a_metric_that_is_missing_is_a_finding(tmp_path: Path) -> None:
    report = report_in(tmp_path, draw_predictions(BINARY, 300), metrics={"accuracy": lambda targets, answers: 0.5})
    text = "accuracy is missing: the report has a figure of this name; use another"
    assert (report.findings[0].rule, report.findings[0].text) == ("metric", text)


def test_a_class_that_is_not_found_once_is_named_whatever_its_size(tmp_path: Path) -> None:
    targets = np.repeat([0, 1, 2, 3], [200, 150, 4, 1]).astype(np.int32)
    predicted = np.where(targets == 3, 0, np.where(targets == 2, 3, targets))  # class 2 never, class 3 wrongly
    values = {"target": targets, "output": (9 * np.eye(4)[predicted]).astype(np.float32)}
    (found,) = (
        each
        for each in report_in(tmp_path, make_predictions(CLASSES, {"": values})).findings
        if each.rule == "recall 0"
    )
    names = CLASSES.names
    assert names is not None
    assert found.text == f"not found once: {names[2]} (4 examples, never predicted), {names[3]} (1 examples)"


def test_learning_curves_and_the_learning_rate_are_drawn(tmp_path: Path) -> None:
    curves = {
        "train/accuracy": [(1.0, 0.5), (2.0, 0.7)],
        "train/loss": [(1.0, 2.0), (2.0, float("nan")), (3.0, 1.0)],
        "val/loss": [(1.0, 2.5), (3.0, 1.5)],
        "train/once": [(1.0, 1.0)],
        "train/learning_rate": [(0.0, 0.0), (3.0, 0.1)],
        "train/gradient_norm": [(0.0, 2.0), (3.0, 1.0)],
    }
    report = report_in(tmp_path, draw_predictions(CLASSES, 100), known=KnownOfRun(curves=curves))
    page = (tmp_path / "evaluation" / "report.html").read_text()
    section = page.partition("<h2>Learning curves")[2].partition("</section>")[0]
    assert re.findall(r"<h3>(.*?)</h3>", section) == ["loss", "accuracy", "learning rate", "gradient norm"]
    assert "Training: 1 at the end; validation, dashed: 1.5 at the end" in section
    assert section.count('class="line other"') == 1
    assert {"curve_loss.svg", "curve_learning_rate.svg"} <= {path.name for path in report.files}
    assert "Learning curves" not in report_in(tmp_path, draw_predictions(CLASSES, 100)).page


def test_words_of_tables_stay_whole_and_charts_fit_their_page(tmp_path: Path) -> None:
    report_in(tmp_path, draw_predictions(BINARY, 100))
    page = (tmp_path / "evaluation" / "report.html").read_text()
    assert "overflow-wrap: anywhere" not in page
    for width, least, most in re.findall(r'<svg [^>]*width="(\d+)"[^>]*min-width:(\d+)px;max-width:(\d+)px', page):
        assert int(least) < int(width) < int(most)
    assert "Thresholds of the probability of yes" in page
    assert "least cost (a miss costs 1, a false alarm 1)" in page


def test_a_badly_calibrated_model_is_found_and_chance_is_not(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(400, 1)).astype(np.float32)
    targets = (random.random((400, 1)) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    fair = make_predictions(BINARY, {"": {"target": targets, "output": logits}})
    sure = make_predictions(BINARY, {"": {"target": targets, "output": 8 * logits}})
    assert "calibration" not in find_rules(tmp_path, fair)
    assert "calibration" in find_rules(tmp_path, sure)


def test_json_has_no_nan() -> None:
    assert to_json({"a": [float("nan"), 1.5], "b": float("inf")}) == {"a": [None, 1.5], "b": None}


# ---------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which a run on a table was trained and evaluated, and what the run printed."""
    folder = tmp_path_factory.mktemp("trained")
    random = np.random.default_rng(0)
    lines = ["area,town,noise,price"]
    for _ in range(1000):
        area, town = random.uniform(20, 200), random.integers(3)
        error = random.normal() * (40 if town == 2 else 2)
        lines.append(f"{area:.2f},{('ulm', 'bonn', 'kiel')[town]},{random.random():.3f},{area + error:.2f}")
    write(folder / "house.csv", "\n".join(lines) + "\n")
    command = Command(folder)
    words = ("dataset=table", "dataset.data_dir=house.csv", "dataset.target=price", "training.epochs=8")
    done = command(*words, "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_a_run_makes_the_report_and_names_its_findings(trained: tuple[Path, str]) -> None:
    folder, printed = trained
    findings = json.loads((folder / "run" / "evaluation" / "findings.json").read_text())
    assert any("town=kiel" in each["text"] for each in findings)
    assert "town=kiel" in printed
    assert re.search(r"^test mae +\S+ \(\S+ to \S+; baseline ", printed, re.M)
    assert re.search(r"^report +run/evaluation/report.html$", printed, re.M)
    charts = folder / "run" / "evaluation" / "charts"
    assert {"curve_loss.svg", "curve_learning_rate.svg"} <= {path.name for path in charts.iterdir()}
    assert not re.search(r"mae.low", printed)
    columns = read_table(folder / "run" / "evaluation" / "importance.csv")
    assert columns[0]["column"] == "area"
    assert {row["column"] for row in columns if row["is_useless"] == "True"} >= {"noise"}
    assert float(columns[0]["importance_low"]) > 0


def test_the_store_has_the_report_and_the_intervals(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    (artifacts,) = folder.glob("mlartifacts/*/*/artifacts/evaluation")
    assert {"report.html", "predictions.parquet", "findings.json", "slices.csv", "importance.csv", "charts"} <= {
        path.name for path in artifacts.iterdir()
    }
    events = events_in(folder / "run" / "events.jsonl")
    values = {name: value for event in events for name, value in (event.get("values") or {}).items()}
    assert values["test/mae_low"] < values["test/mae"] < values["test/mae_high"]
    assert "test/loss_low" not in values, "the loss is that of scaled targets"


@pytest.mark.slow
def test_evaluate_makes_a_report_of_its_own(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    command = Command(folder)
    command.module = "scaleflow evaluate"
    done = command("run", "evaluation.slices=[town]")
    assert done.returncode == 0, done.stderr
    assert re.search(r"evaluate/table/mae +\S+ \(\S+ to \S+\)", done.stdout)
    (page,) = folder.glob("mlartifacts/*/*/artifacts/evaluate/table/report.html")
    assert "town" in page.read_text()
    refused = command("run", "evaluation.slices=[twon]")
    assert refused.returncode == 2
    assert "evaluation.slices=twon: there is no such column; did you mean town?" in refused.stderr


@pytest.mark.slow
def test_full_shows_what_mattered(tmp_path: Path) -> None:
    command = Command(tmp_path)
    tiny = ("tracking=none", "checkpoint=none", "training.max_steps=30", "evaluation=full")
    assert command(*tiny, "hydra.run.dir=digits").returncode == 0
    assert "what is dark did not matter" in (tmp_path / "digits" / "evaluation" / "report.html").read_text()
    assert command(*tiny, "dataset=tickets", "model=dlrm", "hydra.run.dir=tickets").returncode == 0
    page = (tmp_path / "tickets" / "evaluation" / "report.html").read_text()
    assert "words mattered most" in page
    assert "text-decoration:underline" in page


@pytest.mark.slow
def test_a_report_that_fails_ends_no_run(tmp_path: Path) -> None:
    write(
        tmp_path / "broken" / "mine.py",
        "import scaleflow.features.report.page as report\n"
        "def fail(*arguments, **named):\n    raise ValueError('no room')\n"
        "report.make_report = fail\n"
        "from scaleflow.dataset.digits import Digits\n",
    )
    write(tmp_path / "broken" / "dataset" / "mine.yaml", "_target_: mine.Digits\n")
    done = Command(tmp_path)("--config-dir", "broken", "dataset=mine", "tracking=none", "training.max_steps=3")
    assert done.returncode == 0, done.stderr
    assert "note: evaluation: there is no report (ValueError: no room (broken/mine.py, line 3, in fail))" in done.stdout


def test_a_metric_of_many_labels_needs_no_report(tmp_path: Path) -> None:
    wide = Outputs("regression", (100,))
    sums = {"positions": np.full(50, 100), "mean_error": np.arange(50.0), "squared_error": np.arange(50.0) ** 2}
    report = report_in(tmp_path, make_predictions(wide, {"": sums}))
    assert report.estimates["mae"].value == pytest.approx(24.5)
