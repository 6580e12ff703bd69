"""Keras's metrics over a whole split on two replicas, against Keras's own value of it, and what is refused of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Arrays, Batching, Kind, ObjectiveOptions, Outputs, Target
from tests.objective.test_kinds import draw, to_tensors
from tests.objective.test_losses import OWN, SEVERAL, make, sigmoid, softmax

Array = np.ndarray[Any, Any]


def metric(path: str, /, **arguments: Any) -> Target:
    return Target("objective.metrics", path if "." in path else f"keras.metrics.{path}", arguments)


#: Of each kind: the metric, and what Keras's takes of it: targets (integers or one-hot) and outputs.
METRICS: Mapping[Kind, list[tuple[Target, str, str]]] = {
    "classification": [
        (metric("AUC"), "one-hot", "probabilities"),
        (metric("AUC", from_logits=True, name="auc_of_logits"), "one-hot", "logits"),
        (metric("AUC", multi_label=True, num_labels=3, curve="PR", name="pr"), "one-hot", "probabilities"),
        (metric("F1Score"), "one-hot", "probabilities"),
        (metric("F1Score", average="macro", name="f1"), "one-hot", "probabilities"),
        (metric("Precision", class_id=1, thresholds=[0.3, 0.6]), "one-hot", "probabilities"),
        (metric("RecallAtPrecision", precision=0.4), "one-hot", "probabilities"),
        (metric("SparseTopKCategoricalAccuracy", k=2, name="top2"), "integers", "probabilities"),
        (metric("TopKCategoricalAccuracy", k=2), "one-hot", "probabilities"),
        (metric("MeanIoU"), "integers", "classes"),
        (metric("OneHotMeanIoU", num_classes=3), "one-hot", "probabilities"),
        (metric("CategoricalHinge"), "one-hot", "logits"),
        (metric(f"{OWN}.MeanMargin"), "integers", "probabilities"),
        (metric(f"{OWN}.Extremes"), "integers", "probabilities"),
    ],
    "binary": [
        (metric("AUC"), "targets", "probabilities"),
        (metric("F1Score", threshold=0.3), "targets", "probabilities"),
        (metric("BinaryIoU"), "targets", "probabilities"),
        (metric("MeanIoU", num_classes=2), "targets", "classes"),
    ],
    "multi_label": [
        (metric("F1Score", threshold=0.4), "targets", "probabilities"),
        (metric("F1Score", name="f1"), "targets", "probabilities"),
        (metric("FBetaScore", beta=2.0, threshold=None), "targets", "probabilities"),
    ],
    "regression": [
        (metric("R2Score"), "targets", "logits"),
        (metric("MeanAbsolutePercentageError", name="mape"), "targets", "logits"),
    ],
}

SIZES: Mapping[Kind, int] = {"classification": 3, "binary": 1, "multi_label": 3, "regression": 2}


def made_by_keras(kind: Kind, target: Target) -> Any:
    from scaleflow.config.targets import bind_target

    arguments = {name: value for name, value in target.arguments.items() if value is not None}
    if target.path.endswith(".MeanIoU"):
        arguments = {"num_classes": 3, **arguments}
    if target.path.endswith("Score") and kind == "multi_label":
        arguments = {"threshold": 0.5, **arguments}
    return bind_target(replace(target, arguments=arguments))()


def by_keras(kind: Kind, target: Target, forms: tuple[str, str], targets: Array, outputs: Array) -> list[float]:
    """The results over the whole split at once."""
    probabilities = softmax(outputs) if kind == "classification" else sigmoid(outputs)
    classes = outputs.argmax(axis=-1) if kind == "classification" else outputs > 0
    y = np.eye(outputs.shape[-1])[targets] if forms[0] == "one-hot" else targets
    made = made_by_keras(kind, target)
    made.update_state(y, {"probabilities": probabilities, "classes": classes, "logits": outputs}[forms[1]])
    result = made.result()
    parts = list(result.values()) if isinstance(result, dict) else [result]
    return [float(value) for part in parts for value in np.ravel(part)]


def find_exact(kind: Kind, targets: Array, outputs: Array) -> dict[str, float]:
    """The values that evaluations compute from all scores and not at 200 thresholds, by scikit-learn."""
    from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score

    if kind == "binary":
        return {"auc": float(roc_auc_score(targets, outputs))}
    if kind != "classification":
        return {}
    one_hot, shares = np.eye(3)[targets], softmax(outputs.astype(np.float64))
    precision, recall, _ = precision_recall_curve(one_hot.ravel(), shares.ravel())
    return {
        "auc": float(roc_auc_score(one_hot.ravel(), shares.ravel())),
        "auc_of_logits": float(roc_auc_score(one_hot.ravel(), outputs.ravel())),
        "pr": float(average_precision_score(one_hot, shares)),
        "recall_at_precision": float(recall[precision >= 0.4].max()),
    }


def measured(kind: Kind) -> dict[str, Any]:
    """A step of training and an evaluation with all metrics on two replicas, and Keras's values."""
    from scaleflow import dataset, training
    from tests.training.fake_engine import assemble, dense, random_arrays, spread_over

    strategy = spread_over(2)
    arrays = random_arrays(70, kind, outputs=SIZES[kind])
    if kind == "regression":
        arrays = Arrays(arrays.inputs, arrays.targets + 2)
    parts = assemble(strategy, arrays, kind, SIZES[kind], dense, batch_size=8, accumulate=2, optimizer="SGD", rate=0.0)
    objective = make(Outputs(kind, (SIZES[kind],)), ObjectiveOptions(metrics=[each for each, *_ in METRICS[kind]]))
    with strategy.scope():
        loop = training.Loop(strategy, parts.loop.model, parts.loop.optimizer, objective)
    outputs = np.asarray(loop.model(arrays.inputs, training=False))
    wanted: dict[str, list[Any]] = {
        split: [
            value
            for target, *forms in METRICS[kind]
            for value in by_keras(kind, target, (forms[0], forms[1]), arrays.targets[:count], outputs[:count])
        ]
        for split, count in (("train", 64), ("val", 70))
    }
    names = [name for measure in objective.measures[-len(METRICS[kind]) :] for name in measure.names]
    for name, value in find_exact(kind, arrays.targets, outputs).items():
        wanted["val"][names.index(name)] = value
    loop.start_epoch()
    trained = dict(loop.train(parts.feed, parts.feed.open(0, 0), 0, 0, 2, 0))  # the rate is 0: same weights
    evaluated = dict(loop.evaluate(dataset.make_feed(arrays, Batching(16, 1, 2), strategy)))
    return {
        "names": names,
        "modes": {name: objective.modes.get(name) for name in names},
        "train": ([trained[name] for name in names], wanted["train"]),
        "val": ([evaluated[name] for name in names], wanted["val"]),
        "r2": evaluated.get("r2"),
    }


@pytest.mark.parametrize("kind", list(METRICS))
def test_metrics_on_two_replicas_are_keras_s_of_the_whole(isolated: Callable[..., Any], kind: Kind) -> None:
    found = isolated(measured, kind)
    for split in ("train", "val"):
        values, wanted = found[split]
        assert values == pytest.approx(wanted, abs=1e-5), (split, found["names"])
    if kind == "classification":
        names = ["auc", "auc_of_logits", "pr", "f1_score/0", "f1_score/1", "f1_score/2", "f1", "precision/0"]
        assert found["names"][: len(names)] == names
        assert found["names"][-3:] == ["mean_margin", "extremes/least", "extremes/most"]
        assert found["modes"]["auc"] == "max"
        assert found["modes"]["categorical_hinge"] == "min"
        assert found["modes"]["mean_margin"] is None
    if kind == "regression":
        assert found["r2"] == pytest.approx(found["val"][0][0], abs=1e-5)  # R2 is reported anyway


def positions() -> list[tuple[dict[str, float], dict[str, float]]]:
    """Metrics over positions that count, of several outputs, with weights of examples, in padded batches."""
    import keras

    from scaleflow.training.evaluation import MetricSums

    outputs = {
        "words": Outputs("classification", (4, 3), names=("a", "b", "c"), ignore=-1),
        "sick": Outputs("binary", (1,)),
        "marks": Outputs("multi_label", (2,), ignore=-1),
    }
    metrics = {
        "words": [metric("F1Score"), metric("SparseTopKCategoricalAccuracy", k=2, name="top2")],
        "sick": [metric("AUC")],
        "marks": [metric("AUC")],
    }
    found = []
    for is_weighted in (False, True):
        objective = make(outputs, ObjectiveOptions(metrics=metrics), is_weighted=is_weighted)
        sums = MetricSums(objective, evaluates=True)
        total = np.zeros(sums.size)
        drawn = {name: draw(each.kind, 12, each.shape, each.ignore) for name, each in outputs.items()}
        weights = np.linspace(0.25, 2, 12).astype("float32") if is_weighted else np.ones(12, np.float32)
        for batch in (slice(0, 6), slice(6, 12)):
            mask = np.ones(6, np.float32) if batch.start == 0 else np.array([1, 1, 1, 1, 0, 0], np.float32)
            pairs = [{name: to_tensors(pair[i][batch]) for name, pair in drawn.items()} for i in (0, 1)]
            given = weights[batch] * mask if is_weighted else None
            total += np.asarray(sums.compute(*pairs, None, mask, given), np.float64)
        values = sums.means(total, 10)
        shares = {
            name: (pair[0][:10] != -1) * weights[:10].reshape(-1, *[1] * (pair[0].ndim - 1))
            for name, pair in drawn.items()
        }
        targets, predicted = ({name: pair[i][:10] for name, pair in drawn.items()} for i in (0, 1))
        one_hot = np.eye(3)[np.maximum(targets["words"], 0)].reshape(-1, 3)
        rows, row_shares = softmax(predicted["words"]).reshape(-1, 3), shares["words"].reshape(-1)
        f1, top2, auc, auc_of_marks = (
            keras.metrics.F1Score(),
            keras.metrics.TopKCategoricalAccuracy(2),
            *(keras.metrics.AUC() for _ in "ab"),
        )
        f1.update_state(one_hot, rows, sample_weight=row_shares)
        top2.update_state(one_hot, rows, sample_weight=row_shares)
        auc.update_state(targets["sick"], sigmoid(predicted["sick"]), sample_weight=shares["sick"])
        auc_of_marks.update_state(
            np.maximum(targets["marks"], 0), sigmoid(predicted["marks"]), sample_weight=shares["marks"]
        )
        wanted = {f"words/f1_score/{name}": float(v) for name, v in zip("abc", f1.result(), strict=True)}
        wanted |= {"words/top2": float(top2.result()), "sick/auc": float(auc.result())}
        wanted |= {"marks/auc": float(auc_of_marks.result())}
        found.append(({name: values[name] for name in wanted}, wanted))
    return found


def test_metrics_count_positions_weights_and_outputs_as_keras_does(isolated: Callable[..., Any]) -> None:
    for found, wanted in isolated(positions):
        assert found == pytest.approx(wanted, abs=1e-5)


def mixed() -> tuple[list[float], list[float]]:
    """With mixup's shares, the class with the largest share is the true one."""
    from scaleflow.training.evaluation import MetricSums

    targets, outputs = draw("classification", 6, (3,))
    shares = (0.7 * np.eye(3)[targets] + 0.3 * np.eye(3)[(targets + 1) % 3]).astype("float32")
    metrics = [metric("AUC"), metric("SparseTopKCategoricalAccuracy", k=2), metric("F1Score")]
    sums = MetricSums(make(Outputs("classification", (3,)), ObjectiveOptions(metrics=metrics)))
    values = [
        sums.means(np.asarray(sums.compute(to_tensors(each), to_tensors(outputs), None, np.ones(6, np.float32))), 6)
        for each in (targets, shares)
    ]
    return [value for name, value in values[0].items() if name != "loss"], list(values[1].values())[1:]


def test_metrics_of_mixed_examples_are_those_of_the_larger_share(isolated: Callable[..., Any]) -> None:
    plain, of_shares = isolated(mixed)
    assert of_shares == pytest.approx(plain, abs=1e-6)


def replaced() -> list[Any]:
    """Values of outputs of which metrics of a user replace some, their modes, and the baselines."""
    from scaleflow.training import baselines
    from scaleflow.training.evaluation import MetricSums

    outputs = {"age": Outputs("regression", (1,)), "kind": Outputs("classification", (3,))}
    metrics = {
        "age": [metric("MeanAbsolutePercentageError", name="mae"), metric("R2Score", name="r2")],
        "kind": [metric(f"{OWN}.MeanMargin", name="accuracy")],
    }
    options = ObjectiveOptions(metrics=metrics)
    objective = make(outputs, options)
    sums = MetricSums(objective, evaluates=True)
    targets = {"age": np.array([[2.0], [4.0]], np.float32), "kind": np.array([0, 1], np.int32)}
    predicted = {"age": np.array([[1.0], [5.0]], np.float32), "kind": np.zeros([2, 3], np.float32)}
    total = np.asarray(sums.compute(to_tensors(targets), to_tensors(predicted), None, np.ones(2, np.float32)))
    known = baselines(outputs, {"train": targets, "test": targets}, options, objective=objective)
    return [dict(sums.means(total, 2)), sums.names, objective.modes, sorted(known)]


def test_a_metric_replaces_the_one_of_its_name_that_is_recorded_by_default(isolated: Callable[..., Any]) -> None:
    values, names, modes, known = isolated(replaced)
    assert len(set(names)) == len(names)
    assert (values["age/mae"], values["age/rmse"], values["age/r2"]) == pytest.approx((37.5, 1.0, 0.0))
    assert values["kind/accuracy"] == pytest.approx(1 / 3 - 1 / 2)
    assert (modes["age/mae"], modes["age/r2"], modes.get("kind/accuracy")) == ("min", "max", "max")
    assert known == [
        *("baseline/age/loss", "baseline/age/mae", "baseline/age/r2", "baseline/age/rmse", "baseline/kind/accuracy"),
        *("baseline/kind/balanced_accuracy", "baseline/kind/loss", "baseline/loss"),
    ]


def measure_far_values() -> tuple[float, float]:
    """Keras's R2Score of values that are far from 0, and scikit-learn's."""
    from sklearn.metrics import r2_score

    from scaleflow.training.evaluation import MetricSums

    random = np.random.default_rng(0)
    targets = 1.7e9 + 200 * random.random((64, 1))
    predicted = targets + 20 * random.normal(size=(64, 1))
    outputs = Outputs("regression", (1,), scaling=(float(targets.mean()), float(targets.std())))
    sums = MetricSums(make(outputs, ObjectiveOptions(metrics=[metric("R2Score", name="r2")])), evaluates=True)
    total = np.asarray(sums.compute(to_tensors(targets), to_tensors(predicted), None, np.ones(64, np.float32)))
    return dict(sums.means(total, 64))["r2"], r2_score(targets, predicted)


def test_r2_of_values_far_from_zero_is_scikit_learns(isolated: Callable[..., Any]) -> None:
    found, wanted = isolated(measure_far_values)
    assert 0.5 < wanted < 0.95
    assert found == pytest.approx(wanted, rel=1e-6)


def measure_nothing(outputs: Any, metrics: Any) -> list[Any]:
    """What is measured, and what the baselines are, where the config leaves out the metrics of the kind."""
    from scaleflow.training import baselines

    objective = make(outputs, ObjectiveOptions(metrics=metrics))
    targets = {"age": np.array([[2.0], [4.0]], np.float32), "kind": np.array([0, 1], np.int32)}
    given = targets if isinstance(outputs, Mapping) else targets["kind"]
    known = baselines(outputs, {"train": given, "test": given}, objective=objective)
    measures = [name for each in (*objective.measures, *objective.evaluation_measures) for name in each.names]
    return [measures, dict(objective.modes), sorted(known), objective.classes]


def test_an_empty_list_of_metrics_leaves_the_loss_alone(isolated: Callable[..., Any]) -> None:
    assert isolated(measure_nothing, CLASSES, []) == [[], {"loss": "min"}, ["baseline/loss"], None]
    measures, modes, known, _ = isolated(measure_nothing, SEVERAL, {"age": []})
    assert measures == ["age/loss", "kind/loss", "kind/accuracy", "kind/balanced_accuracy"]
    assert set(modes) >= {"loss", *measures}
    assert "age/mae" not in modes
    assert {"baseline/kind/accuracy", "baseline/age/loss"} <= set(known)
    assert not {"baseline/age/mae", "baseline/age/rmse"} & set(known)


# Wrong uses -----------------------------------------------------------------------------------

CLASSES = Outputs("classification", (3,))

WRONG: Mapping[str, tuple[Any, Any, str]] = {
    "no sum": (CLASSES, [metric(f"{OWN}.Largest")], "is not the sum of the states after each"),
    "padding counts": (CLASSES, [metric(f"{OWN}.Unweighted")], "counts examples of weight 0"),
    "no weights": (CLASSES, [metric(f"{OWN}.WithoutWeights")], "its update_state has no parameter sample_weight"),
    "a matrix": (CLASSES, [metric(f"{OWN}.Square")], "its result has shape (3, 3)"),
    "not a metric": (CLASSES, [metric("keras.losses.Huber")], "returned a Huber, expected a keras.metrics.Metric"),
    "of values": (CLASSES, [metric("Mean")], "takes values, not targets and outputs"),
    "twice": (
        CLASSES,
        [metric("AUC"), metric("AUC", curve="PR")],
        "objective.metrics: two values would have the name auc; give a metric another name: {_target_: keras.metrics.",
    ),
    "twice the name of one built in": (
        CLASSES,
        [metric("Accuracy"), metric("AUC", name="accuracy")],
        "two values would have the name accuracy",
    ),
    "the loss": (CLASSES, [metric("CategoricalCrossentropy", name="loss")], "two values would have the name loss"),
    "the opposite": (
        CLASSES,
        [metric("AUC", name="rank_error")],
        "the name rank_error says that smaller values are better, and for AUC larger ones are; give it another name",
    ),
    "a slash": (CLASSES, [metric("AUC", name="a/b")], "has the name 'a/b'"),
    "regression": (Outputs("regression", (1,)), [metric("AUC")], "has no meaning for regression targets"),
    "binary": (Outputs("binary", (1,)), [metric("CategoricalAccuracy")], "has no meaning for binary targets"),
    "labels": (Outputs("multi_label", (3,)), [metric("MeanIoU")], "has no meaning for multi_label targets"),
    "only the largest": (Outputs("multi_label", (3,)), [metric(f"{OWN}.OnlyLargest")], "make it with threshold=0.5"),
    "single values": (
        Outputs("regression", (1,)),
        [metric("CosineSimilarity")],
        "single values; leave it out: r2 is always recorded",
    ),
    "a single logit": (Outputs("binary", (1,)), [metric("PearsonCorrelation")], "use auc"),
    "wrong argument": (CLASSES, [metric("AUC", curve="ABC")], "keras.metrics.AUC: Invalid AUC curve value"),
    "list for several": (
        SEVERAL,
        [metric("AUC")],
        "the dataset has the outputs age, kind; write objective.metrics={age",
    ),
    "unknown output": (
        SEVERAL,
        {"size": [metric("AUC")]},
        "objective.metrics: names size; the dataset has the outputs",
    ),
}


def refusals() -> dict[str, str]:
    from scaleflow.errors import ConfigError

    found = dict.fromkeys(WRONG, "")
    for name, (outputs, metrics, _) in WRONG.items():
        try:
            make(outputs, ObjectiveOptions(metrics=metrics))
        except ConfigError as error:
            found[name] = str(error)
    try:
        make(CLASSES, ObjectiveOptions(metrics=[metric("MeanIoU")]), is_weighted=True)
    except ConfigError as error:
        found["whole numbers"] = str(error)
    return found


def test_metrics_that_do_not_fit_are_refused_in_words(isolated: Callable[..., Any]) -> None:
    found = isolated(refusals)
    for name, (_, _, wanted) in WRONG.items():
        assert wanted in found[name], (name, found[name])
        assert not re.search(r"Error\b", found[name].replace("PercentageError", ""))
    assert "an example of weight 0.5 does not count half" in found["whole numbers"]
