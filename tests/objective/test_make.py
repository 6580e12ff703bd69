"""Short names of losses and metrics: what they mean for each kind of target, and which are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Kind, ObjectiveOptions, Outputs
from tests.objective.test_kinds import draw, to_tensors
from tests.objective.test_losses import SHAPES, make, sigmoid, softmax
from tests.objective.test_metrics import CLASSES, SEVERAL

Array = np.ndarray[Any, Any]

#: Four classes, of which the last one occurs neither as a target nor as a prediction.
FOUR = Outputs("classification", (4,))


def drawn(kind: Kind) -> tuple[Array, Array]:
    if kind != "classification":
        return draw(kind, 400, SHAPES[kind])
    targets, outputs = draw(kind, 400, (3,))
    return targets, np.concatenate([outputs, np.full([400, 1], -9, np.float32)], axis=1)


def measure(described: Outputs, names: list[str]) -> tuple[dict[str, float], dict[str, Any]]:
    """The values of metrics over several batches, and their directions."""
    from scaleflow.training import baseline, measure_outputs

    baseline.MAX_VALUES_AT_ONCE = 500
    objective = make(described, ObjectiveOptions(metrics=names))
    return measure_outputs(objective, *drawn(described.kind)), dict(objective.modes)


def found() -> dict[str, Any]:
    from scaleflow.errors import ConfigError

    scores = ["auc", "pr_auc", "f1", "precision", "recall"]
    values = {
        "classification": measure(FOUR, [*scores, "top2", "mean_iou", "perplexity", "accuracy"]),
        "binary": measure(Outputs("binary", (1,)), [*scores, "BinaryAccuracy"]),
        "multi_label": measure(Outputs("multi_label", (4,)), scores),
        "regression": measure(Outputs("regression", (2,)), ["mae", "mape", "MeanSquaredError", "log_cosh_error"]),
    }
    losses = {}
    for name, described in (
        ("focal", CLASSES),
        ("focal", Outputs("binary", (1,))),
        ("huber", Outputs("regression", (2,), scaling=(10.0, 4.0))),
        ("mape", Outputs("regression", (2,), scaling=(10.0, 4.0))),
        ("mean_absolute_error", Outputs("regression", (2,))),
        ("CategoricalCrossentropy", CLASSES),
    ):
        batch = [to_tensors(each) for each in draw(described.kind, 8, described.shape)]
        losses[name, described.kind] = np.asarray(make(described, ObjectiveOptions(loss=name)).loss(*batch)).tolist()
    refused = {}
    for name, (outputs, options, _) in WRONG.items():
        with pytest.raises(ConfigError) as error:
            make(outputs, options)
        refused[name] = str(error.value)
    return {"values": values, "losses": losses, "refused": refused}


#: What is described, the options, and what the refusal has to say.
WRONG: Mapping[str, tuple[Any, ObjectiveOptions, str]] = {
    "typo": (
        CLASSES,
        ObjectiveOptions(metrics=["acu"]),
        "objective.metrics=acu: there is no such name; did you mean auc?",
    ),
    "typo of Keras's": (
        CLASSES,
        ObjectiveOptions(metrics=["top_k"]),
        "(auc, pr_auc, f1, precision, recall, mean_iou, ",
    ),
    "always 1": (CLASSES, ObjectiveOptions(metrics=["top5"]), "objective.metrics=top5: is always 1, since there are 3"),
    "top of two": (
        Outputs("binary", (1,)),
        ObjectiveOptions(metrics=["top2"]),
        "top2: has no meaning for binary targets",
    ),
    "of classes": (
        Outputs("regression", (1,)),
        ObjectiveOptions(metrics=["auc"]),
        "objective.metrics=auc: has no meaning for regression targets; use a metric such as mape",
    ),
    "twice": (CLASSES, ObjectiveOptions(metrics=["auc", "AUC"]), "two values would have the name auc"),
    "loss": (CLASSES, ObjectiveOptions(loss="hubr"), "objective.loss=hubr: there is no such name; did you mean Huber?"),
    "focal": (
        SEVERAL,
        ObjectiveOptions(loss={"age": "focal"}),
        "objective.loss.age=focal: is for classes or labels, and the dataset's targets are regression; use a loss such",
    ),
    "for several": (
        SEVERAL,
        ObjectiveOptions(loss="huber"),
        "has the outputs age, kind; write objective.loss={age: ...",
    ),
}


def test_short_names_are_macro_averages_as_in_scikit_learn(isolated: Callable[..., Any]) -> None:
    from sklearn import metrics as sk

    result = isolated(found)
    targets, outputs = drawn("classification")
    chosen, one_hot, shares = outputs.argmax(-1), np.eye(4)[targets][:, :3], softmax(outputs)[:, :3]
    values, modes = result["values"]["classification"]
    assert values["f1"] == pytest.approx(sk.f1_score(targets, chosen, average="macro"), abs=1e-5)
    assert values["precision"] == pytest.approx(sk.precision_score(targets, chosen, average="macro"), abs=1e-5)
    assert values["recall"] == pytest.approx(sk.recall_score(targets, chosen, average="macro"), abs=1e-5)
    assert values["auc"] == pytest.approx(sk.roc_auc_score(one_hot, shares), abs=1e-6)
    assert values["pr_auc"] == pytest.approx(sk.average_precision_score(one_hot, shares), abs=1e-6)
    assert values["top2"] == pytest.approx(sk.top_k_accuracy_score(targets, outputs, k=2, labels=range(4)))
    assert values["perplexity"] == pytest.approx(np.exp(values["loss"]), rel=1e-4)
    assert {modes[name] for name in ("auc", "pr_auc", "f1", "precision", "recall", "top2", "mean_iou")} == {"max"}
    targets, outputs = drawn("binary")
    values, _ = result["values"]["binary"]
    assert values["f1"] == pytest.approx(sk.f1_score(targets, outputs > 0), abs=1e-5)
    assert values["precision"] == pytest.approx(sk.precision_score(targets, outputs > 0), abs=1e-5)
    assert values["auc"] == pytest.approx(sk.roc_auc_score(targets, sigmoid(outputs)), abs=1e-6)
    assert values["binary_accuracy"] == pytest.approx(values["accuracy"])
    targets, outputs = drawn("multi_label")
    values, _ = result["values"]["multi_label"]
    assert values["f1"] == pytest.approx(sk.f1_score(targets, outputs > 0, average="macro"), abs=1e-5)
    assert values["recall"] == pytest.approx(sk.recall_score(targets, outputs > 0, average="macro"), abs=1e-5)
    assert values["auc"] == pytest.approx(sk.roc_auc_score(targets, sigmoid(outputs)), abs=1e-6)
    targets, outputs = drawn("regression")
    values, modes = result["values"]["regression"]
    assert values["mape"] == pytest.approx(100 * sk.mean_absolute_percentage_error(targets, outputs), rel=1e-4)
    assert values["mae"] == pytest.approx(sk.mean_absolute_error(targets, outputs), rel=1e-5)
    assert {"mean_squared_error", "logcosh"} <= set(values)
    assert (modes["mape"], modes["mae"]) == ("min", "min")

    def by_hand(name: str, kind: Kind, loss: Callable[[Array, Array], Array]) -> None:
        targets, outputs = (each.astype(np.float64) for each in draw(kind, 8, SHAPES[kind]))
        assert result["losses"][name, kind] == pytest.approx(loss(targets, outputs), rel=1e-3), (name, kind)

    classes = draw("classification", 8, (3,))
    true = np.take_along_axis(softmax(classes[1]), classes[0][:, None], -1)[:, 0]
    assert result["losses"]["focal", "classification"] == pytest.approx(
        -0.25 * (1 - true) ** 2 * np.log(true), rel=1e-3
    )
    assert result["losses"]["CategoricalCrossentropy", "classification"] == pytest.approx(-np.log(true), rel=1e-3)
    by_hand("mean_absolute_error", "regression", lambda t, x: abs(t - x).mean(-1))
    by_hand("mape", "regression", lambda t, x: 100 * abs((t - x) / t).mean(-1))  # in the target's unit
    by_hand(  # of standardised values, as the default loss
        "huber", "regression", lambda t, x: np.where(abs(t - x) < 4, (t - x) ** 2 / 32, abs(t - x) / 4 - 0.5).mean(-1)
    )
    assert min(result["losses"]["focal", "binary"]) > 0
    for name, (_, _, wanted) in WRONG.items():
        assert wanted in result["refused"][name], (name, result["refused"][name])
