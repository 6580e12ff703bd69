"""A candidate must have the skills of the champion, whatever its metric says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scaleflow.evaluation.skills import measure_skills
from scaleflow.features.promotion.steps import check_skills
from tests.evaluation.made import make_predictions
from tests.evaluation.rare import COUNT, KINDS, draw_rare, make_constant

#: The champion was trained on none of the examples.
NONE_SEEN = np.zeros(COUNT, bool)


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_answer_is_not_promoted(kind: str) -> None:
    outputs, values = draw_rare(kind)
    good = make_predictions(outputs, {"": values})
    constant = make_predictions(outputs, {"": make_constant(kind, values)})
    conditions = check_skills(constant, good, NONE_SEEN)
    assert conditions
    assert not any(each.holds for each in conditions)
    assert check_skills(good, constant, NONE_SEEN) == []


def test_a_candidate_with_another_threshold_is_no_constant() -> None:
    outputs, values = draw_rare("binary")
    champion = make_predictions(outputs, {"": values})
    candidate = make_predictions(replace(outputs, threshold=0.98), {"": values})
    assert measure_skills(candidate)["balanced_accuracy"].value < measure_skills(champion)["balanced_accuracy"].value
    assert check_skills(candidate, champion, NONE_SEEN) == []
    never = make_predictions(replace(outputs, threshold=0.9999999), {"": values})
    (condition,) = check_skills(never, champion, NONE_SEEN)
    assert condition.text.startswith("balanced_accuracy 0.5, the champion 0.9")
