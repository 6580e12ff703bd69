"""Losses that a config names, against numpy, and what is refused of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Kind, ObjectiveOptions, Outputs, Target
from tests.objective.test_kinds import draw, to_tensors

Array = np.ndarray[Any, Any]

OWN = "tests.objective.own"


def named(path: str, /, key: str = "objective.loss", **arguments: Any) -> Target:
    return Target(key, path if "." in path else f"keras.losses.{path}", arguments)


def make(outputs: Any, options: ObjectiveOptions, **more: Any) -> Any:
    from scaleflow.config.targets import bind_target, locate_target
    from scaleflow.objective import Loader, make_objective

    return make_objective(outputs, options, loader=Loader(locate_target, bind_target), **more)


def softmax(x: Array) -> Array:
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def crossed(t: Array, p: Array) -> Array:
    """Binary cross-entropy of probabilities."""
    return -(t * np.log(p) + (1 - t) * np.log(1 - p))


#: Kind, options, and the loss of each example from one-hot classes or other targets, and logits.
CASES: Mapping[str, tuple[Kind, ObjectiveOptions, Callable[[Array, Array], Array]]] = {
    "smoothed classes": (
        "classification",
        ObjectiveOptions(label_smoothing=0.3),
        lambda t, x: -((0.7 * t + 0.1) * np.log(softmax(x))).sum(-1),
    ),
    "smoothed by a loss of Keras": (
        "classification",
        ObjectiveOptions(loss=named("CategoricalCrossentropy"), label_smoothing=0.3),
        lambda t, x: -((0.7 * t + 0.1) * np.log(softmax(x))).sum(-1),
    ),
    "integers": (
        "classification",
        ObjectiveOptions(loss=named("SparseCategoricalCrossentropy")),
        lambda t, x: -(t * np.log(softmax(x))).sum(-1),
    ),
    "focal": (
        "classification",
        ObjectiveOptions(loss=named("CategoricalFocalCrossentropy", gamma=2, alpha=0.5)),
        lambda t, x: -(0.5 * t * (1 - softmax(x)) ** 2 * np.log(softmax(x))).sum(-1),
    ),
    "generalized": (
        "classification",
        ObjectiveOptions(loss=named("CategoricalGeneralizedCrossEntropy", q=0.5)),
        lambda t, x: (1 - (t * softmax(x)).sum(-1) ** 0.5) / 0.5,
    ),
    "hinge of classes": (
        "classification",
        ObjectiveOptions(loss=named("CategoricalHinge")),
        lambda t, x: np.maximum(((1 - t) * x).max(-1) - (t * x).sum(-1) + 1, 0),
    ),
    "squares of probabilities": (
        "classification",
        ObjectiveOptions(loss=named("MeanSquaredError")),
        lambda t, x: ((t - softmax(x)) ** 2).mean(-1),
    ),
    "dice": (
        "classification",
        ObjectiveOptions(loss=named("Dice", axis=[1])),
        lambda t, x: 1 - 2 * (t * softmax(x)).sum(-1) / (1 + softmax(x).sum(-1)),
    ),
    "own function": (
        "classification",
        ObjectiveOptions(loss=named(f"{OWN}.margin", least=2)),
        lambda t, x: np.maximum(2 - (t * x).sum(-1) + x.mean(-1), 0),
    ),
    "binary": (
        "binary",
        ObjectiveOptions(loss=named("BinaryCrossentropy")),
        lambda t, x: crossed(t, sigmoid(x)).mean(-1),
    ),
    "own class that takes logits": (
        "binary",
        ObjectiveOptions(loss=named(f"{OWN}.FocalOfLogits")),
        lambda t, x: ((1 - t * sigmoid(x) - (1 - t) * sigmoid(-x)) ** 2 * crossed(t, sigmoid(x))).mean(-1),
    ),
    "smoothed binary": (
        "binary",
        ObjectiveOptions(label_smoothing=0.2),
        lambda t, x: crossed(0.8 * t + 0.1, sigmoid(x)).mean(-1),
    ),
    "hinge": (
        "binary",
        ObjectiveOptions(loss=named("Hinge")),
        lambda t, x: np.maximum(1 - (2 * t - 1) * x, 0).mean(-1),
    ),
    "function of Keras": (
        "multi_label",
        ObjectiveOptions(loss=named("keras.losses.binary_crossentropy"), label_smoothing=0.2),
        lambda t, x: crossed(0.8 * t + 0.1, sigmoid(x)).mean(-1),
    ),
    "huber": (
        "regression",
        ObjectiveOptions(loss=named("Huber", delta=2)),
        lambda t, x: np.where(abs(t - x) < 2, (t - x) ** 2 / 2, 2 * abs(t - x) - 2).mean(-1),
    ),
    "own class": ("regression", ObjectiveOptions(loss=named(f"{OWN}.Quartic")), lambda t, x: ((t - x) ** 4).mean(-1)),
}

SHAPES: Mapping[Kind, tuple[int, ...]] = {
    "classification": (3,),
    "binary": (1,),
    "multi_label": (4,),
    "regression": (2,),
}


def found_losses() -> dict[str, list[list[float]]]:
    """Each case's losses; then those of three positions, of which some are ignored."""
    found = {}
    for name, (kind, options, _) in CASES.items():
        alone = draw(kind, 8, SHAPES[kind])
        shape, ignore = (3, *SHAPES[kind]), -1 if kind in ("classification", "binary") else None
        several = draw(kind, 8, shape, ignore)
        found[name] = [compute(Outputs(kind, SHAPES[kind]), options, alone)]
        if name not in ("dice", "own function", "function of Keras"):  # of a single position
            found[name].append(compute(Outputs(kind, shape, ignore=ignore), options, several))
    return found


def compute(described: Outputs, options: ObjectiveOptions, batch: tuple[Array, Array]) -> list[float]:
    losses: list[float] = np.asarray(make(described, options).loss(*map(to_tensors, batch))).tolist()
    return losses


def test_losses_are_numpys_for_examples_and_for_their_positions(isolated: Callable[..., Any]) -> None:
    found = isolated(found_losses)
    for name, (kind, _, by_hand) in CASES.items():
        targets, outputs = draw(kind, 8, SHAPES[kind])
        wide = targets if kind != "classification" else np.eye(3)[targets]
        alone, *several = found[name]
        assert alone == pytest.approx(by_hand(wide, outputs.astype(np.float64)), rel=1e-4, abs=1e-5), name
        if not several:
            continue
        targets, outputs = draw(kind, 8, (3, *SHAPES[kind]), -1 if kind in ("classification", "binary") else None)
        counts = (targets != -1) * 1.0 if kind in ("classification", "binary") else np.ones(targets.shape)
        valid = np.where(counts > 0, targets, 0)
        each = by_hand(valid if kind != "classification" else np.eye(3)[valid], outputs.astype(np.float64))
        counts = np.reshape(counts, [8, 3, -1])[..., 0]
        wanted = (each * counts).sum(1) / np.maximum(counts.sum(1), 1)
        assert several[0] == pytest.approx(wanted, rel=1e-4, abs=1e-5), name


# Classes with weights, outputs with weights ---------------------------------------------------


def weighted() -> dict[str, tuple[list[float], list[float]]]:
    """What is minimised and what is reported, of classes, positions, shares, 0 and 1, and several outputs."""
    kinds: Mapping[str, tuple[Outputs, list[float]]] = {
        "classes": (Outputs("classification", (3,)), [1.0, 2.0, 0.5]),
        "positions": (Outputs("classification", (4, 3), ignore=-1), [1.0, 2.0, 0.5]),
        "binary": (Outputs("binary", (1,)), [1.0, 3.0]),
    }
    found = {}
    for name, (described, weights) in kinds.items():
        batch = tuple(map(to_tensors, draw(described.kind, 6, described.shape, described.ignore)))
        objective = make(described, ObjectiveOptions(), class_weights={"": weights})
        found[name] = tuple(np.asarray(loss(*batch)).tolist() for loss in (objective.loss, objective.reported_loss))
    shares = softmax(draw("regression", 6, (3,))[0]).astype("float32")
    outputs = draw("regression", 6, (3,))[1]
    objective = make(kinds["classes"][0], ObjectiveOptions(), class_weights={"": [1.0, 2.0, 0.5]})
    pair = tuple(map(to_tensors, (shares, outputs)))
    found["shares"] = tuple(np.asarray(loss(*pair)).tolist() for loss in (objective.loss, objective.reported_loss))
    both = {"kind": kinds["classes"][0], "size": Outputs("regression", (1,))}
    drawn = {name: draw(each.kind, 6, each.shape) for name, each in both.items()}
    targets, predicted = ({name: to_tensors(pair[i]) for name, pair in drawn.items()} for i in (0, 1))
    objective = make(both, ObjectiveOptions(loss_weights={"size": 0.1}), class_weights={"kind": [1.0, 2.0, 0.5]})
    found["several"] = tuple(
        np.asarray(loss(targets, predicted)).tolist() for loss in (objective.loss, objective.reported_loss)
    )
    return found


def test_weights_of_classes_are_in_what_is_minimised_only(isolated: Callable[..., Any]) -> None:
    found = isolated(weighted)

    def crossentropy(targets: Array, outputs: Array) -> Array:
        return -np.log(np.take_along_axis(softmax(outputs.astype(np.float64)), targets[..., None], -1))[..., 0]

    table = np.array([1.0, 2.0, 0.5])
    targets, outputs = draw("classification", 6, (3,))
    plain = crossentropy(targets, outputs)
    wanted = {"classes": (plain * table[targets], plain)}
    size_targets, sizes = draw("regression", 6, (1,))
    errors = 0.1 * ((size_targets - sizes).astype(np.float64) ** 2)[:, 0]
    wanted["several"] = (plain * table[targets] + errors, plain + errors)
    targets, outputs = draw("classification", 6, (4, 3), -1)
    counts = targets != -1
    each = crossentropy(np.where(counts, targets, 0), outputs) * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    wanted["positions"] = ((each * table[np.where(counts, targets, 0)]).sum(1), each.sum(1))
    targets, outputs = draw("binary", 6, (1,))
    crossed_each = crossed(targets, sigmoid(outputs.astype(np.float64)))
    wanted["binary"] = ((crossed_each * np.where(targets > 0, 3, 1))[:, 0], crossed_each[:, 0])
    values, outputs = draw("regression", 6, (3,))
    shares, logs = softmax(values), np.log(softmax(outputs.astype(np.float64)))
    plain = -(shares * logs).sum(1)
    wanted["shares"] = (-(shares * table * logs).sum(1), plain)  # the mixture of weighted losses
    for name, pair in wanted.items():
        for which in (0, 1):
            assert found[name][which] == pytest.approx(pair[which], rel=1e-4, abs=1e-5), (name, which)


def balanced() -> dict[str, Any]:
    """The weights that balance classes, of arrays and dicts in batches, and those that are given."""
    from scaleflow.objective import count_classes, find_class_weights

    words = Outputs("classification", (4, 3), names=("a", "b", "c"), ignore=-1)
    sick = Outputs("binary", (1,), names=("no", "yes"))
    batches = [
        ({"words": np.array([[0, 0, 2, -1]], np.int8), "sick": np.array([[1.0]])},),
        ({"words": np.array([[0, -1, -1, -1], [2, 0, 0, 0]], np.int8), "sick": np.array([[0.0], [0.0]])},),
    ]
    weighted = [(targets, np.array(each)) for (targets,), each in zip(batches, ([0.5], [2.0, 3.0]), strict=True)]
    several = {"words": words, "sick": sick}

    def count(names: list[str]) -> dict[str, list[float]]:
        return count_classes(several, names, batches)

    given = find_class_weights(words, {"b": 3.0, "2": 0.0}, lambda names: {})
    return {
        "given": given,
        "balanced": find_class_weights(several, {"words": "balanced", "sick": "balanced"}, count),
        "some": find_class_weights(several, {"sick": {"yes": 4.0}}, count),
        "none": find_class_weights(several, None, count),
        "weighted": count_classes(several, ["words", "sick"], weighted),
    }


def test_balanced_weights_are_counted(isolated: Callable[..., Any]) -> None:
    found = isolated(balanced)
    assert found["given"] == {"": [1.0, 3.0, 0.0]}
    # Six 0 and two 2 of eight that count: as scikit-learn, over the classes that occur.
    assert found["balanced"] == {"words": [8 / 12, 0.0, 8 / 4], "sick": [3 / 4, 3 / 2]}
    assert found["some"] == {"sick": [1.0, 4.0]}
    assert found["none"] == {}
    assert found["weighted"] == {"words": [2 * 0.5 + 2 + 3 * 3, 0.0, 0.5 + 3], "sick": [5.0, 0.5]}


# Wrong uses -----------------------------------------------------------------------------------

SEVERAL = {"age": Outputs("regression", (1,)), "kind": Outputs("classification", (3,))}

#: What is described, the options, and what the refusal has to say.
WRONG: Mapping[str, tuple[Any, ObjectiveOptions, str]] = {
    "reduction": (
        Outputs("regression", (1,)),
        ObjectiveOptions(loss=named("Huber", reduction="sum")),
        "objective.loss.reduction=sum: the loop averages",
    ),
    "logits": (
        Outputs("classification", (3,)),
        ObjectiveOptions(loss=named("CategoricalCrossentropy", from_logits=False)),
        "objective.loss.from_logits=false: models return logits",
    ),
    "values as classes": (
        Outputs("regression", (1,)),
        ObjectiveOptions(loss=named("SparseCategoricalCrossentropy")),
        "is for classes or labels, and the dataset's targets are regression; use a loss such as huber",
    ),
    "labels as classes": (
        Outputs("multi_label", (3,)),
        ObjectiveOptions(loss=named("CategoricalCrossentropy")),
        "is for one of several classes, and the dataset's targets are multi_label",
    ),
    "no kind's": (Outputs("classification", (3,)), ObjectiveOptions(loss=named("CTC")), "does not fit classification"),
    "a scalar": (
        Outputs("regression", (2,)),
        ObjectiveOptions(loss=named(f"{OWN}.whole_batch")),
        "returns shape () for regression targets of shape (2, 2) and outputs of shape (2, 2); expected one value",
    ),
    "a scalar of Keras's": (
        Outputs("classification", (3,)),
        ObjectiveOptions(loss=named("Dice")),
        "of its positions; set its axis to [1]",
    ),
    "the batch's": (
        Outputs("regression", (2,)),
        ObjectiveOptions(loss=named(f"{OWN}.relative_to_batch")),
        "the loss of an example depends on the other examples of its batch",
    ),
    "broken": (
        Outputs("regression", (2,)),
        ObjectiveOptions(loss=named(f"{OWN}.broken")),
        "objective.loss._target_=tests.objective.own.broken: fails on regression targets of shape (2, 2) and outputs "
        "of shape (2, 2): no such thing",
    ),
    "unknown argument": (
        Outputs("regression", (2,)),
        ObjectiveOptions(loss=named("Huber", deltas=1)),
        "objective.loss.deltas=1: keras.losses.Huber has no such argument",
    ),
    "smoothed integers": (
        Outputs("classification", (3,)),
        ObjectiveOptions(loss=named("SparseCategoricalCrossentropy"), label_smoothing=0.1),
        "objective.label_smoothing=0.1: objective.loss._target_=keras.losses.SparseCategoricalCrossentropy has no",
    ),
    "smoothed twice": (
        Outputs("classification", (3,)),
        ObjectiveOptions(loss=named("CategoricalCrossentropy", label_smoothing=0.1), label_smoothing=0.1),
        "both smooth the targets",
    ),
    "smoothed values": (
        Outputs("regression", (1,)),
        ObjectiveOptions(label_smoothing=0.1),
        "are values, not classes",
    ),
    "single values ignored": (
        Outputs("regression", (2,), ignore=-1),
        ObjectiveOptions(loss=named("Huber")),
        "single targets with the value -1 cannot be left out",
    ),
    "outputs of one": (
        Outputs("regression", (1,)),
        ObjectiveOptions(loss={"age": named("Huber")}),
        "objective.loss: names the outputs age, but the dataset has a single output without a name",
    ),
    "one of several": (SEVERAL, ObjectiveOptions(loss=named("Huber")), "the dataset has the outputs age, kind; write"),
    "unknown output": (
        SEVERAL,
        ObjectiveOptions(loss={"size": named("Huber")}),
        "objective.loss: names size; the dataset has the outputs age, kind",
    ),
    "weights of one": (
        Outputs("regression", (1,)),
        ObjectiveOptions(loss_weights={"age": 1.0}),
        "objective.loss_weights",
    ),
    "weights of unknown": (SEVERAL, ObjectiveOptions(loss_weights={"size": 1.0}), "names size; the dataset has"),
}

#: The same of class weights.
WRONG_WEIGHTS: Mapping[str, tuple[Any, Any, str]] = {
    "no class": (
        Outputs("classification", (3,)),
        {"3": 1.0},
        "objective.class_weight.3: there is no such class; the classes are",
    ),
    "no name": (Outputs("binary", (1,), names=("no", "yes")), {"maybe": 1.0}, "the classes are 0, 1, no, yes"),
    "twice": (Outputs("binary", (1,), names=("no", "yes")), {"1": 1.0, "yes": 2.0}, "names a class twice"),
    "values": (
        Outputs("regression", (1,)),
        "balanced",
        "objective.class_weight: works only with classification and binary targets, and the dataset's are regression",
    ),
    "several": (SEVERAL, "balanced", "objective.class_weight: the dataset has the outputs age, kind; write"),
    "values of several": (SEVERAL, {"age": "balanced"}, "objective.class_weight.age: works only with classification"),
}


def refusals() -> dict[str, str]:
    from scaleflow.errors import ConfigError
    from scaleflow.objective import find_class_weights

    found = dict.fromkeys((*WRONG, *WRONG_WEIGHTS), "")
    for name, (outputs, options, _) in WRONG.items():
        try:
            make(outputs, options)
        except ConfigError as error:
            found[name] = str(error)
    pixels = Outputs("classification", (4, 4, 3))
    with pytest.raises(ConfigError) as refusal:
        make(pixels, ObjectiveOptions(loss=named("Dice", axis=[1, 2, 3])), class_weights={"": [1.0, 2.0, 3.0]})
    found["weights of pixels"] = str(refusal.value)
    for name, (outputs, option, _) in WRONG_WEIGHTS.items():
        try:
            find_class_weights(outputs, option, lambda names: {})
        except ConfigError as error:
            found[name] = str(error)
    return found


def test_losses_that_do_not_fit_are_refused_in_words(isolated: Callable[..., Any]) -> None:
    found = isolated(refusals)
    for name, (_, _, wanted) in {**WRONG, **WRONG_WEIGHTS}.items():
        assert wanted in found[name], (name, found[name])
        assert not re.search(r"Error\b", found[name])
    assert (
        "so single targets cannot have the weights of their classes (objective.class_weight)"
        in (found["weights of pixels"])
    )
