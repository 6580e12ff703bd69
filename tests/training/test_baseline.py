"""What a model has to beat, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Kind, ObjectiveOptions, Outputs


def split(targets: Any, dtype: str = "float32") -> Any:
    return np.asarray(targets, dtype)


def found(cases: list[tuple[Outputs, Any, Any, Any]]) -> list[dict[str, float]]:
    from scaleflow.training import baselines

    names = ("train", "validation", "test")
    return [
        dict(baselines(outputs, {name: part for name, part in zip(names, splits, strict=True) if part is not None}))
        for outputs, *splits in cases
    ]


def test_each_kind_has_the_baseline_of_its_training_targets(isolated: Callable[..., Any]) -> None:
    classes = split([0, 1, 1, 1], "uint64"), split([1, 1, 0, 1, 0], "int64")
    ones = split([[0], [0], [1], [0]]), split([[1], [0]])
    labels = split([[0, 1], [1, 1], [0, 0]]), split([[0, 1], [1, 1]])
    values = split([[1.0], [3.0]]), split([[2.0], [5.0], [2.0]])
    of: dict[Kind, tuple[int, tuple[Any, Any]]] = {
        "classification": (3, classes),
        "binary": (1, ones),
        "multi_label": (2, labels),
        "regression": (1, values),
    }
    cases = [(Outputs(kind, (size,)), train, tested, None) for kind, (size, (train, tested)) in of.items()]
    scaled = Outputs("regression", (1,), scaling=(2.0, 10.0))
    *rest, of_scaled = isolated(found, [*cases, (scaled, *values, None)])
    by_kind = dict(zip(of, rest, strict=True))
    log = np.log
    wanted = {
        "classification": {
            "accuracy": 3 / 5,
            "balanced_accuracy": 1 / 2,
            "loss": -(3 * log(3 / 4) + 2 * log(1 / 4)) / 5,
        },
        "binary": {"accuracy": 1 / 2, "balanced_accuracy": 1 / 2, "loss": -(log(1 / 4) + log(3 / 4)) / 2},
        "multi_label": {"accuracy": 3 / 4, "exact_match": 1 / 2, "loss": -(3 * log(2 / 3) + log(1 / 3)) / 4},
        "regression": {"loss": 3.0, "mae": 1.0, "rmse": 3**0.5, "r2": -0.5},
    }
    for kind, values_wanted in wanted.items():
        assert by_kind[kind] == pytest.approx({f"baseline/{k}": v for k, v in values_wanted.items()}), kind
    assert of_scaled == pytest.approx({**by_kind["regression"], "baseline/loss": 0.03})  # as the loss is minimised


def test_above_a_thousand_classes_there_is_no_balanced_accuracy(isolated: Callable[..., Any]) -> None:
    classes = Outputs("classification", (1001,))
    (values,) = isolated(found, [(classes, split([0, 1, 1], "int32"), split([1, 0], "int32"), None)])
    assert set(values) == {"baseline/accuracy", "baseline/loss"}


def test_with_validation_and_test_each_has_its_own(isolated: Callable[..., Any]) -> None:
    train, validation, test = split([1, 1, 0], "int32"), split([1, 0], "int32"), split([0, 2], "int32")
    values, of_test, nothing = isolated(
        found,
        [
            (Outputs("classification", (3,)), train, validation, test),
            (Outputs("classification", (3,)), train, None, test),
            (Outputs("classification", (3,)), train, None, None),
        ],
    )
    loss = -(np.log(2 / 3) + np.log(1 / 3)) / 2
    # A class that the training split never had is infinitely improbable.
    accuracies = {"baseline/accuracy": 0.5, "baseline/balanced_accuracy": 0.5}
    of_the_test = {"baseline/test/accuracy": 0.0, "baseline/test/balanced_accuracy": 0.0}
    assert values == pytest.approx({**accuracies, "baseline/loss": loss, **of_the_test})
    assert of_test == {"baseline/accuracy": 0.0, "baseline/balanced_accuracy": 0.0}
    assert nothing == {}


def several() -> dict[str, float]:
    """Two outputs with positions, ignored targets and weights."""
    from scaleflow.training import baselines

    outputs = {"words": Outputs("classification", (2, 3), ignore=-1), "age": Outputs("regression", (1,))}
    train = {"words": split([[0, 1], [1, -1]], "int32"), "age": split([[1], [3]])}
    tested = {"words": split([[1, -1], [0, 1], [-1, -1]], "int32"), "age": split([[2], [4], [0]])}
    options = ObjectiveOptions(loss_weights={"age": 0.5}), {"train": None, "test": np.array([1, 2, 1])}
    return dict(baselines(outputs, {"train": train, "test": tested}, *options))


def test_several_outputs_have_each_its_own_over_what_counts_and_by_weight(isolated: Callable[..., Any]) -> None:
    # Of the words, 1 is predicted: weights 1 and 2 find it, weight 2 has 0. The second example's loss is a mean of two.
    words = {"accuracy": 3 / 5, "balanced_accuracy": 1 / 2}
    words["loss"] = -(np.log(2 / 3) + 2 * (np.log(1 / 3) + np.log(2 / 3)) / 2) / 4
    age = {"loss": 3.0, "mae": 1.5, "rmse": 3**0.5, "r2": 1 - 12 / (0.25 + 2 * 2.25 + 6.25)}
    wanted = {f"baseline/words/{k}": v for k, v in words.items()} | {f"baseline/age/{k}": v for k, v in age.items()}
    assert isolated(several) == pytest.approx({**wanted, "baseline/loss": words["loss"] + 1.5})


def find_asked() -> dict[str, dict[str, float]]:
    """The baselines of metrics that the user asked for, by kind, computed in one process."""
    from scaleflow import objective
    from scaleflow.config.targets import bind_target, locate_target
    from scaleflow.training import baselines

    random = np.random.default_rng(0)
    yes = split(random.random((400, 1)) < 0.7)
    classes = split(random.choice(3, 400, p=[0.2, 0.5, 0.3]), "int32")
    values = split(random.normal(3, 2, (400, 1)))
    cases = {
        "binary": (Outputs("binary", (1,)), yes, ["auc", "f1", "precision", "recall"]),
        "classification": (Outputs("classification", (3,)), classes, ["f1"]),
        "regression": (Outputs("regression", (1,)), values, ["mape"]),
    }
    found = {}
    for kind, (outputs, targets, names) in cases.items():
        options = ObjectiveOptions(metrics=names)
        loader = objective.Loader(locate_target, bind_target)
        goal = objective.make_objective(outputs, options, loader=loader)
        splits = {"train": targets[:300], "test": targets[300:]}
        found[kind] = dict(baselines(outputs, splits, options, objective=goal))
    return found


def test_metrics_that_the_user_asked_for_have_baselines(isolated: Callable[..., Any]) -> None:
    """The right values are scikit-learn's, of the constant answer."""
    from sklearn import metrics

    found = isolated(find_asked)
    random = np.random.default_rng(0)
    yes = (random.random((400, 1)) < 0.7)[:, 0]
    classes = random.choice(3, 400, p=[0.2, 0.5, 0.3])
    values = random.normal(3, 2, (400, 1)).astype("float32")
    tested, all_yes = yes[300:], np.ones(100, bool)
    assert found["binary"] == pytest.approx(
        {
            **{name: found["binary"][name] for name in found["binary"] if "accuracy" in name or "loss" in name},
            "baseline/auc": 0.5,
            "baseline/f1": metrics.f1_score(tested, all_yes),
            "baseline/precision": tested.mean(),
            "baseline/recall": 1.0,
        },
        abs=1e-6,
    )
    most = np.full(100, np.bincount(classes[:300]).argmax())
    f1 = metrics.f1_score(classes[300:], most, average="macro")
    assert found["classification"]["baseline/f1"] == pytest.approx(f1, abs=1e-6)
    share = 100 * metrics.mean_absolute_percentage_error(values[300:], np.full(100, values[:300].mean()))
    (mape,) = (value for name, value in found["regression"].items() if "percentage" in name or "mape" in name)
    assert mape == pytest.approx(share, rel=1e-4)
