"""Examples of unknown classes, counted as wrong: against the numbers of the known ones and of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Outputs

TARGETS = np.array([0, 1, -1, 2, -1, 1], np.int32)
LOGITS = np.eye(3, dtype=np.float32)[[0, 1, 1, 1, 0, 1]] * 3
WEIGHTS = np.array([1, 2, 3, 4, 0, 1], np.float32)


def compute(is_weighted: bool, has_two: bool) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of all examples with unknown classes counted, and those of the known examples."""
    import tensorflow as tf

    from scaleflow import objective
    from scaleflow.training.evaluation import MetricSums

    def measure(ignore: int | None, rows: Any) -> dict[str, float]:
        one = Outputs("classification", (3,), ignore=ignore)
        outputs: Any = {"a": one, "b": Outputs("regression", (1,))} if has_two else one
        goal = objective.make_objective(outputs, is_weighted=is_weighted)
        if ignore is not None:
            goal = objective.add_unknown_count(goal, {"a" if has_two else "": one})
        sums = MetricSums(goal, evaluates=True)
        zeros, ones = (make([int(rows.sum()), 1]) for make in (tf.zeros, tf.ones))
        targets, logits = tf.constant(TARGETS[rows]), tf.constant(LOGITS[rows])
        pair = ({"a": targets, "b": ones}, {"a": logits, "b": zeros}) if has_two else (targets, logits)
        mask = tf.ones([int(rows.sum())])
        weights = tf.constant(WEIGHTS[rows]) if is_weighted else None
        return dict(sums.means(sums.compute(*pair, None, mask, weights).numpy(), int(rows.sum())))

    return objective.count_as_wrong(measure(-1, TARGETS < 9), {}), measure(None, TARGETS >= 0)


CASES = ((False, False), (True, False), (False, True))


def compute_all() -> list[tuple[dict[str, float], dict[str, float]]]:
    return [compute(*case) for case in CASES]


def test_unknown_classes_are_wrong_answers(isolated: Callable[..., Any]) -> None:
    for (is_weighted, has_two), (counted, known) in zip(CASES, isolated(compute_all), strict=True):
        name = "a/" if has_two else ""
        weights = WEIGHTS if is_weighted else np.ones(6)
        share = weights[TARGETS >= 0].sum() / weights.sum()
        assert counted[f"{name}accuracy"] == pytest.approx(share * known[f"{name}accuracy"])
        assert counted[f"{name}unknown_classes"] == (1 if is_weighted else 2), "an example of weight 0 counts nowhere"
        for value in ("loss", f"{name}loss", f"{name}balanced_accuracy"):
            if value in known:
                assert counted[value] == pytest.approx(known[value]), value
        assert not any("known_share" in key for key in counted)
