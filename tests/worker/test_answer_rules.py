"""What the validation rows decide is what every door answers: `evaluation.threshold`, `calibrate` and `interval`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import EvaluationOptions, Outputs, Plan
from tests.features.balance.test_balance import LINEAR, write_rare
from tests.training.fake_engine import ignore, make_session, run_apart


def answer(plan: Plan, x: Any, folder: Path) -> dict[str, Any]:
    """Trains, and returns what each door answers for inputs, the notes, and the test metrics."""
    import keras
    import tensorflow as tf

    from scaleflow import training
    from scaleflow.interfaces.events import Note
    from scaleflow.serving.loader import SavedModel
    from scaleflow.worker.build import build_training

    values: dict[str, float] = {}
    notes: list[str] = []

    def emit(event: Any) -> None:
        values.update(getattr(event, "values", None) or {})
        if isinstance(event, Note):
            notes.append(event.text)

    built = build_training(plan, ignore)
    sync = training.WorkerSync(built.runtime.strategy, 1, bool)
    make_session(plan, built, emit).run(lambda: built.learn_answers(sync, 0, emit))
    built = built.take_answers(SimpleNamespace(records=False))  # type: ignore[arg-type]
    built.export(folder)
    served = tf.saved_model.load(folder / "saved_model").signatures["serving_default"](tf.constant(x))
    flavour = SavedModel(str(folder / "saved_model"), built.facts.learned.to_json())
    return {
        "in training": np.asarray(built.engine.predict(x)),
        "keras": np.asarray(keras.models.load_model(folder / "model.keras", compile=False)(x)),
        "served": {name: each.numpy() for name, each in served.items()},
        "pyfunc": {name: each.to_numpy() for name, each in flavour.predict(x).items()},
        "chances": built.source.outputs.kind != "regression"
        and flavour.predict(x, {"output": "probabilities"}).to_numpy(),
        "outputs": built.facts.learned.outputs,
        "notes": notes,
        "values": values,
    }


def answer_all(cases: list[Any]) -> list[dict[str, Any]]:
    return run_apart(answer, cases)


def write_values(folder: Path) -> dict[str, Any]:
    random = np.random.default_rng(4)
    x = random.normal(size=(1200, 2)).astype(np.float32)
    y = (3 * x[:, :1] + random.standard_t(4, (1200, 1))).astype(np.float32)
    data = {"x_train": x[:800], "y_train": y[:800], "x_test": x[800:], "y_test": y[800:]}
    np.savez(folder / "values.npz", **data)
    return data


def write_many(folder: Path) -> dict[str, Any]:
    random = np.random.default_rng(5)
    x = random.normal(size=(2000, 2)).astype(np.float32)
    logits = x @ random.normal(size=(2, 20)) * 2
    y = (logits + random.gumbel(size=logits.shape)).argmax(axis=1)
    data = {"x_train": x[:1000], "y_train": y[:1000], "x_test": x[1000:], "y_test": y[1000:]}
    np.savez(folder / "many.npz", **data)
    return data


def test_every_door_answers_with_what_was_learned(
    isolated: Callable[..., Any], plan: Callable[..., Plan], tmp_path: Path
) -> None:
    from sklearn.linear_model import LogisticRegression, QuantileRegressor
    from sklearn.metrics import log_loss, mean_pinball_loss

    known, values = write_rare(tmp_path)["two"], write_values(tmp_path)
    wrong = ("dataset.balance=oversample", "dataset.prior_correction=false")
    sets, many = ("evaluation.sets=0.8", "dataset.validation=0.25"), write_many(tmp_path)
    cases = [
        ("two", *wrong, "evaluation.calibrate=auto", "evaluation.threshold={recall: 0.8}", "dataset.validation=0.25"),
        ("values", "evaluation.interval=0.9", "dataset.validation=0.25"),
        ("many", "evaluation.calibrate=auto", *sets),
        ("two", "evaluation.threshold={recall: 0.8}", *sets),
        (
            "values",
            "objective=quantiles",
            "dataset.validation=0.25",
            "training.epochs=60",
            "optimizer.learning_rate=0.1",
        ),
    ]
    plans = [plan(*LINEAR, "dataset=npz", f"dataset.data_dir={tmp_path / name}.npz", *words) for name, *words in cases]
    inputs = [known["x_test"], values["x_test"], many["x_test"], known["x_test"], values["x_test"]]
    folders = [tmp_path / str(n) for n in range(5)]
    two, one, *with_sets, quantiles = isolated(answer_all, list(zip(plans, inputs, folders, strict=True)))

    wanted = LogisticRegression(C=1e6).fit(known["x_train"], known["y_train"]).predict_proba(known["x_test"])
    assert abs(two["chances"] - wanted).mean() < 0.03  # oversampled, the mean probability of the rare class is doubled
    np.testing.assert_allclose(two["keras"], two["in training"], atol=1e-5)
    assert two["values"]["test/loss"] == pytest.approx(log_loss(known["y_test"], two["chances"][:, 1]), abs=1e-4)
    threshold = two["outputs"].threshold
    assert threshold is not None
    assert threshold < 0.4
    is_second = two["chances"][:, 1] >= threshold
    assert 0.7 < is_second[known["y_test"] == 1].mean() < 0.9
    for door in ("served", "pyfunc"):
        assert two[door]["prediction"].tolist() == is_second.astype(int).tolist()
        chosen = np.where(is_second, two["chances"][:, 1], two["chances"][:, 0])
        np.testing.assert_allclose(two[door]["probability"], chosen, atol=1e-5)
    assert two["notes"][0].startswith("evaluation.calibrate: logits are multiplied by ")
    assert two["notes"][1].startswith(
        f"evaluation.threshold: 1 from {threshold:.3g} on, as 1,000 validation rows say (precision "
    )

    (margin,) = one["outputs"].margins
    for door in ("served", "pyfunc"):
        np.testing.assert_allclose(one[door]["prediction"], one["in training"][:, 0], atol=1e-5)
        np.testing.assert_allclose(one[door]["prediction_high"] - one[door]["prediction"], margin, rtol=1e-4)
        inside = abs(one[door]["prediction"] - values["y_test"][:, 0]) <= margin
        assert 0.85 < inside.mean() < 0.95

    for found, target, rows in zip(with_sets, (many["y_test"], known["y_test"]), ("250", "1,000"), strict=True):
        least, predicted = found["outputs"].set_threshold, found["pyfunc"]["prediction"]
        chances = found["chances"]
        wanted = [sorted({*np.flatnonzero(row >= least), best}) for row, best in zip(chances, predicted, strict=True)]
        is_covered = np.mean([each in inside for each, inside in zip(target, wanted, strict=True)])
        assert 0.72 < is_covered < 0.88 or (least > 0.5 and is_covered > 0.8)  # the predicted class alone
        assert f"evaluation.sets=0.8: {rows} validation rows give" in found["notes"][-1]
        for door in ("served", "pyfunc"):
            assert [json.loads(each) for each in found[door]["prediction_set"]] == wanted

    losses = []
    for n, level in enumerate((0.1, 0.5, 0.9)):
        best = QuantileRegressor(quantile=level, alpha=0).fit(values["x_train"], values["y_train"][:, 0])
        losses.append(mean_pinball_loss(values["y_test"], best.predict(values["x_test"]), alpha=level))
        for door in ("served", "pyfunc"):
            found = quantiles[door][f"prediction_q{level * 100:g}"]
            np.testing.assert_allclose(found, quantiles["in training"][:, 0, n], rtol=1e-5)
            np.testing.assert_array_equal(quantiles[door]["prediction"], quantiles[door]["prediction_q50"])
    assert quantiles["values"]["test/loss"] == pytest.approx(np.mean(losses), rel=0.05)
    np.testing.assert_allclose(quantiles["keras"], quantiles["in training"], atol=1e-5)


@pytest.mark.slow
def test_two_replicas_learn_the_same_answers(
    isolated: Callable[..., Any], plan: Callable[..., Plan], tmp_path: Path
) -> None:
    known = write_rare(tmp_path)["two"]
    words = ("evaluation.calibrate=auto", "evaluation.threshold=auto", "dataset.validation=0.25", "dataset=npz")
    balance = ("dataset.balance=oversample", "dataset.prior_correction=false", f"dataset.data_dir={tmp_path}/two.npz")
    found = []
    for n, more in enumerate(((), ("strategy=mirrored", "hardware.logical_devices=2", "training.batch_size=32"))):
        case = plan(*LINEAR, *words, *balance, *more), known["x_test"], tmp_path / str(n)
        found += isolated(answer_all, [case])
    one, two = found
    np.testing.assert_allclose(two["in training"], one["in training"], atol=1e-4)
    np.testing.assert_allclose(two["keras"], two["in training"], atol=1e-5)
    assert two["outputs"].threshold == pytest.approx(one["outputs"].threshold, abs=1e-4)
    assert two["outputs"].calibration == pytest.approx(one["outputs"].calibration, rel=1e-3)
    assert two["values"]["test/loss"] == pytest.approx(one["values"]["test/loss"], abs=1e-4)


def check(options: EvaluationOptions, outputs: Outputs, rows: int) -> None:
    from scaleflow.worker.answer_rules import check_answers

    check_answers(options, outputs, rows)


TWO, MANY, REAL = Outputs("binary", (1,)), Outputs("classification", (5,)), Outputs("regression", (1,))


@pytest.mark.parametrize(
    ("options", "outputs", "rows", "reason"),
    [
        (
            EvaluationOptions(threshold=0.3),
            MANY,
            99,
            "is for two classes, and the dataset has classification",
        ),
        (
            EvaluationOptions(threshold="auto"),
            REAL,
            99,
            "is for two classes, and the dataset has regression",
        ),
        (EvaluationOptions(calibrate="auto"), REAL, 99, "calibrate: is for one class of each example"),
        (EvaluationOptions(calibrate="auto"), Outputs("multi_label", (3,)), 99, "calibrate: is for one class"),
        (EvaluationOptions(interval=0.9), TWO, 99, "interval: is for numbers, and the dataset has binary"),
        (EvaluationOptions(interval=0.9), REAL, 8, "needs 9 validation rows, and there are 8; use a lower one"),
        (EvaluationOptions(interval=0.9), Outputs("regression", (64, 64)), 99, "interval: is for numbers"),
        (
            EvaluationOptions(sets=0.9),
            REAL,
            99,
            "sets: is for one of up to 20 classes of each example, and the dataset has",
        ),
        (EvaluationOptions(sets=0.9), Outputs("multi_label", (3,)), 99, "sets: is for one of up to 20 classes"),
        (EvaluationOptions(sets=0.9), Outputs("classification", (21,)), 99, "sets: is for one of up to 20 classes"),
        (EvaluationOptions(sets=0.9), Outputs("classification", (8, 8, 3)), 99, "sets: is for one of up to 20 classes"),
        (EvaluationOptions(sets=0.99), MANY, 98, "needs 99 validation rows, and there are 98; use a lower one"),
    ],
)
def test_answers_that_outputs_do_not_have_are_refused(
    options: EvaluationOptions, outputs: Outputs, rows: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        check(options, outputs, rows)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("evaluation.threshold=1.5", "evaluation.threshold=1.5: expected"),
        ("'evaluation.threshold={recall: 1.2}'", "evaluation.threshold.recall=1.2: expected"),
        ("'evaluation.threshold={f2: 1}'", "evaluation.threshold.f2"),
        (
            "'evaluation.threshold={recall: 0.9, precision: 0.5}'",
            "evaluation.threshold={recall: 0.9, precision: 0.5}: a threshold has one goal",
        ),
        ("'evaluation.threshold={cost: [5, 0]}'", "expected a list such as [5, 1], above 0.0, or null"),
        ("'evaluation.threshold={cost: [5]}'", "of a miss and of a false alarm"),
        ("evaluation.interval=1", "evaluation.interval=1: expected"),
        ("evaluation.sets=0", "evaluation.sets=0: expected"),
        ("evaluation.sets=0.9 dataset.validation=null", "leave evaluation.sets null"),
        ("evaluation.calibrate=platt", "evaluation.calibrate=platt: expected auto"),
        ("evaluation.threshold=auto dataset.validation=null", "there are no validation rows to decide by"),
        ("evaluation.calibrate=auto dataset.fold=1/5", "both what decides and what is measured"),
        ("evaluation.metrics=[my_code.cost]", "write a function of yours as {_target_: my_code.cost}"),
        (
            "evaluation.metrics=[3]",
            "expected a list such as [sklearn.metrics.f1_score], or null",
        ),
        ("evaluation.interval=0.9 debug=overfit", "debug.overfit has no validation rows"),
    ],
)
def test_options_that_cannot_work_are_refused(plan: Callable[..., Plan], words: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        plan(*shlex.split(words))


@pytest.mark.parametrize("name", ["loss", "f1"])
def test_a_metric_of_the_users_has_a_name_of_its_own(name: str) -> None:
    from scaleflow.interfaces import Objective
    from scaleflow.interfaces.training import Measure
    from scaleflow.worker.build import check_metric_names

    goal = Objective(lambda *_: None, evaluation_measures=[Measure(("f1",), lambda *_: None, lambda *_: [])])
    check_metric_names({"cost": max}, goal)
    with pytest.raises(ConfigError, match=f"evaluation.metrics: the run has a metric {name} already"):
        check_metric_names({name: max}, goal)


def learn(options: EvaluationOptions, outputs: Outputs, target: Any, output: Any, weights: Any = None) -> Any:
    """What `learn_from` makes of rows that one worker collected."""
    import io

    from scaleflow.worker.answer_rules import learn_from

    content = io.BytesIO()
    arrays = {"example": np.arange(len(target)), "/target": target, "/output": output}
    np.savez(content, **arrays, **({} if weights is None else {"weight": weights}))
    return learn_from(options, outputs, [content.getvalue()])


@pytest.mark.parametrize(
    ("options", "outputs"),
    [
        (EvaluationOptions(threshold="auto", calibrate="auto"), TWO),
        (EvaluationOptions(sets=0.9), MANY),
        (EvaluationOptions(interval=0.9), REAL),
    ],
)
def test_nothing_is_learned_from_outputs_that_are_not_finite(options: EvaluationOptions, outputs: Outputs) -> None:
    output = np.random.default_rng(0).normal(size=(100, *outputs.shape)).astype(np.float32)
    output[:3] = np.nan
    target = np.zeros((100, *outputs.target_shape), np.float32)
    learned, notes = learn(options, outputs, target, output)
    assert learned == outputs
    assert (learned.threshold, learned.margins, learned.set_threshold, learned.calibration) == (None, None, None, None)
    assert "nothing is learned, as the outputs of 3 of 100 validation rows are NaN or infinite" in notes[0]


@pytest.mark.parametrize(
    ("options", "outputs"),
    [
        (EvaluationOptions(threshold="auto", calibrate="auto"), TWO),
        (EvaluationOptions(sets=0.9), MANY),
        (EvaluationOptions(interval=0.9), REAL),
    ],
)
def test_rows_of_weight_0_decide_nothing_whatever_their_outputs(options: EvaluationOptions, outputs: Outputs) -> None:
    random = np.random.default_rng(0)
    output = random.normal(size=(300, *outputs.shape))
    target = output + random.normal(size=output.shape)
    if outputs is TWO:
        target = (target > 0.5).astype(np.float64)
    elif outputs is MANY:
        target = target.argmax(axis=1)
    weights = random.uniform(0.5, 1.5, 300)
    weights[:20] = 0
    expected, _ = learn(options, outputs, target[20:], output[20:], weights[20:])
    output[:20] = np.nan
    learned, _ = learn(options, outputs, target, output, weights)
    assert learned == expected


IGNORED = -999


def test_an_interval_does_not_need_outputs_for_values_without_a_target() -> None:
    outputs = Outputs("regression", (2,), ignore=IGNORED)
    output = np.random.default_rng(0).normal(size=(200, 2))
    target = output + np.linspace(0, 1, 200)[:, None]
    expected, _ = learn(EvaluationOptions(interval=0.9), outputs, target[100:], output[100:])
    target[:100, 0], output[:100, 0] = IGNORED, np.nan
    learned, notes = learn(EvaluationOptions(interval=0.9), outputs, target, output)
    assert learned.margins is not None
    assert expected.margins is not None
    assert learned.margins[0] == expected.margins[0]
    assert "nothing is learned" not in notes[0]


@pytest.mark.parametrize(
    ("options", "outputs"),
    [
        (EvaluationOptions(threshold="auto", calibrate="auto"), TWO),
        (EvaluationOptions(sets=0.9, calibrate="auto"), MANY),
        (EvaluationOptions(interval=0.9), REAL),
    ],
)
def test_rows_whose_target_does_not_count_decide_nothing(options: EvaluationOptions, outputs: Outputs) -> None:
    random = np.random.default_rng(0)
    output = random.normal(size=(300, *outputs.shape))
    target = output + random.normal(size=output.shape)
    if outputs is TWO:
        target = (target > 0.5).astype(np.float64)
    elif outputs is MANY:
        target = target.argmax(axis=1)
    weights = random.uniform(0.5, 1.5, 300)
    expected, _ = learn(options, outputs, target[100:], output[100:], weights[100:])
    target[:100], output[50:100] = IGNORED, np.nan  # which does not count either
    outputs = replace(outputs, ignore=IGNORED)
    check(options, outputs, 300)
    learned, _ = learn(options, outputs, target, output, weights)
    assert vars(learned) == {**vars(expected), "ignore": IGNORED}
    assert learned.threshold or learned.margins or learned.set_threshold


def test_each_value_has_the_interval_of_its_own_rows() -> None:
    random = np.random.default_rng(0)
    errors = random.normal(size=(400, 2)) * [1, 10]
    target = -errors
    target[:390, 0] = IGNORED
    target[200:, 1] = IGNORED
    outputs = Outputs("regression", (2,), ignore=IGNORED)
    learned, (note,) = learn(EvaluationOptions(interval=0.9), outputs, target, np.zeros((400, 2)))
    assert learned.margins is not None
    wanted = [np.sort(np.abs(errors[390:, 0]))[9], np.sort(np.abs(errors[:200, 1]))[180]]  # number ceil((n + 1) x 0.9)
    assert learned.margins == pytest.approx(wanted)
    assert "the 10 of 400 validation rows with a target give" in note
    target[:392, 0] = IGNORED
    learned, (note,) = learn(EvaluationOptions(interval=0.9), outputs, target, np.zeros((400, 2)))
    assert learned.margins is None
    assert "8 validation rows have a target, and 9 are needed" in note
