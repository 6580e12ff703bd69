"""Findings appear where they are true, and never where they would mislead: generated predictions, 50 seeds each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.evaluation.outputs import analyse_output
from scaleflow.features.report.findings import Finding, KnownOfRun, find_all
from scaleflow.interfaces import Outputs
from tests.evaluation.made import BINARY, CLASSES, PRICE, make_predictions

Array = np.ndarray[Any, Any]
Drawn = tuple[Outputs, Array, Array]

SEEDS, ROWS = 50, 600

THREE = Outputs("classification", (3,), names=("cat", "dog", "hen"))


def make_findings(drawn: Drawn) -> dict[str, Finding]:
    """The findings of a run, by their rule, which knows the baseline of these targets."""
    outputs, target, logits = drawn
    values = {"target": target, "output": logits.astype(np.float32)}
    analysis = analyse_output(make_predictions(outputs, {"": values}), "", outputs, 0)
    if outputs.kind == "regression":
        baseline = {"mae": float(np.abs(target - target.mean()).mean())}
    else:
        baseline = {"accuracy": float(np.unique(target, return_counts=True)[1].max() / len(target))}
    return {each.rule: each for each in find_all([analysis], [], KnownOfRun(baseline=baseline))}


def draw_scores(
    random: np.random.Generator, distance: float, share: float, sharp: float = 1.0, shift: float = 0.0
) -> Drawn:
    """What a model of two classes says whose scores are normal, `distance` deviations apart. 1.19 is an AUC of 0.8.

    Its probabilities are right with `sharp` of 1 and `shift` of 0.
    """
    target = random.random((ROWS, 1)) < share
    score = random.normal(size=(ROWS, 1)) + distance * target
    logits = distance * score - distance**2 / 2 + np.log(share / (1 - share))
    return BINARY, target.astype(np.float32), sharp * logits + shift


def flip_labels(random: np.random.Generator, drawn: Drawn, share: float) -> Drawn:
    outputs, target, logits = drawn
    is_wrong = random.random(target.shape) < share
    if outputs.kind == "binary":
        return outputs, np.where(is_wrong, 1 - target, target), logits
    return outputs, np.where(is_wrong, (target + 1) % outputs.shape[-1], target), logits


def draw_guesses(random: np.random.Generator) -> Drawn:
    return CLASSES, random.integers(4, size=ROWS).astype(np.int32), 2 * random.normal(size=(ROWS, 4))


def draw_black(random: np.random.Generator) -> Drawn:
    """The same answer for each picture, and nearly the same."""
    logits = np.log([0.3, 0.3, 0.4]) + 1e-6 * random.normal(size=(ROWS, 3))
    return THREE, random.choice(3, ROWS, p=[0.3, 0.3, 0.4]).astype(np.int32), logits


def draw_some_black(random: np.random.Generator) -> Drawn:
    """Half of the pictures are black, and the others tell their class."""
    target = random.integers(3, size=ROWS).astype(np.int32)
    logits = 4.0 * (target[:, None] == np.arange(3)) + random.normal(size=(ROWS, 3))
    return THREE, target, np.where(random.random((ROWS, 1)) < 0.5, logits, np.log([0.3, 0.3, 0.4]))


def draw_known(random: np.random.Generator) -> Drawn:
    target = random.integers(4, size=ROWS).astype(np.int32)
    return CLASSES, target, 8.0 * (target[:, None] == np.arange(4)) + random.normal(size=(ROWS, 4))


def draw_tails(random: np.random.Generator) -> Drawn:
    """Most values are 0, so that the mean absolute error favours a constant."""
    signal = random.normal(size=(ROWS, 1))
    return PRICE, np.exp(3 * signal - 3) * (signal > 1), np.exp(3 * signal - 3) * 0.5 + 1.0 * (signal > 0)


LABELS, BASELINE = "labels", "baseline"

#: What models say, by a name, with which of the two findings must appear; the other must not.
MODELS: dict[str, tuple[Callable[[np.random.Generator], Drawn], str]] = {
    "at chance": (draw_guesses, BASELINE),
    "two classes at chance": (lambda random: draw_scores(random, 1e-3, 0.3, 1000.0), BASELINE),
    "values at chance": (
        lambda random: (PRICE, random.normal(size=(ROWS, 1)), 0.1 * random.normal(size=(ROWS, 1))),
        BASELINE,
    ),
    "black pictures": (draw_black, BASELINE),
    "some black pictures": (draw_some_black, ""),
    "the right classes": (draw_known, ""),
    "AUC 0.8": (lambda random: draw_scores(random, 1.19, 0.5), ""),
    "AUC 0.95, too sure": (lambda random: draw_scores(random, 2.3, 0.5, 4.0), ""),
    "rare, AUC 0.8": (lambda random: draw_scores(random, 1.19, 0.06), ""),
    "rare, AUC 0.8, class weights": (lambda random: draw_scores(random, 1.19, 0.06, 1.0, np.log(0.94 / 0.06)), ""),
    "rare, AUC 0.95, class weights": (lambda random: draw_scores(random, 2.3, 0.1, 2.0, np.log(0.9 / 0.1)), ""),
    "one value, learned wholly": (lambda random: (PRICE, np.full((ROWS, 1), 7.0), np.full((ROWS, 1), 7.1)), ""),
    "one class, learned wholly": (lambda random: (BINARY, np.zeros((ROWS, 1)), random.normal(-5, 1, (ROWS, 1))), ""),
    "long tails": (draw_tails, ""),
    "wrong labels of several classes": (lambda random: flip_labels(random, draw_known(random), 0.06), LABELS),
    "wrong labels": (lambda random: flip_labels(random, draw_scores(random, 5.0, 0.5), 0.08), LABELS),
    "wrong labels, class weights": (
        lambda random: flip_labels(random, draw_scores(random, 6.0, 0.2, 0.5, np.log(0.8 / 0.2)), 0.06),
        LABELS,
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_labels_and_the_baseline_are_told_where_they_say_something(kind: str) -> None:
    draw, wanted = MODELS[kind]
    found = [rule for seed in range(SEEDS) for rule in make_findings(draw(np.random.default_rng(seed)))]
    counts = {rule: found.count(rule) for rule in (LABELS, BASELINE)}
    assert counts.pop(wanted, SEEDS) >= 0.9 * SEEDS
    assert sum(counts.values()) == 0


def test_what_makes_figures_too_good_comes_first() -> None:
    known = {
        "rule": "groups",
        "level": "fault",
        "text": "rows are alike",
        "because": "it is so",
        "columns": ["customer"],
    }
    outputs, target, logits = draw_guesses(np.random.default_rng(0))
    values = {"target": target, "output": logits.astype(np.float32)}
    analysis = analyse_output(make_predictions(outputs, {"": values}), "", outputs, 0)
    first, second, *_ = find_all([analysis], [], KnownOfRun(together=[known], doubts={"frozen": "of the model"}))
    assert first == Finding("groups", "rows are alike", "it is so")
    assert second.rule == "frozen"
