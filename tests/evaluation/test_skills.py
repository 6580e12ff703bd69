"""What a constant answer does not have: skills of each kind of target, and models that lost them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from scaleflow.evaluation.predictions import Predictions
from scaleflow.evaluation.skills import find_constant_parts, find_lost_skills, measure_skills
from tests.evaluation.made import BINARY, make_predictions
from tests.evaluation.rare import KINDS, Array, draw_rare, make_constant


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_answer_is_found_whatever_the_accuracy(kind: str) -> None:
    outputs, values = draw_rare(kind)
    good, constant = (make_predictions(outputs, {"": each}) for each in (values, make_constant(kind, values)))
    part = {"labels": ["b"], "two numbers": ["height"]}.get(kind, [""])
    assert (find_constant_parts(good), find_constant_parts(constant)) == ([], part)
    lost = find_lost_skills(measure_skills(good), measure_skills(constant), 0.01)
    assert lost
    assert all("width" not in name and "/a" not in name for name in lost)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_as_of_int8_loses_nothing(kind: str) -> None:
    outputs, values = draw_rare(kind)
    output = values["output"].astype(np.float64)
    scale = np.ptp(output, axis=0) / 255
    noisy = {**values, "output": (np.round(output / scale) * scale).astype(values["output"].dtype)}
    both = [measure_skills(make_predictions(outputs, {"": each})) for each in (values, noisy)]
    assert find_lost_skills(*both, 0.01) == {}


def test_skills_are_those_of_scikit_learn_and_scipy() -> None:
    outputs, values = draw_rare("binary")
    found = measure_skills(make_predictions(outputs, {"": values}))
    target, logit = values["target"][:, 0], values["output"][:, 0]
    assert found["balanced_accuracy"].value == pytest.approx(balanced_accuracy_score(target, logit > 0))
    assert found["roc_auc"].value == pytest.approx(roc_auc_score(target, logit), abs=1e-5)
    outputs, values = draw_rare("two numbers")
    found = measure_skills(make_predictions({"house": outputs}, {"house": values}))
    for n, name in enumerate(("width", "height")):
        wanted = spearmanr(values["target"][:, n], values["output"][:, n]).statistic
        assert found[f"house/rank_correlation/{name}"].value == pytest.approx(wanted)


def test_of_few_positives_one_that_is_lost_is_no_fault() -> None:
    target = np.zeros(400, np.float32)
    target[:10] = 1
    logit = np.where(target > 0, 3.0, -3.0).astype(np.float32)
    for lost, is_fault in ((1, False), (2, False), (4, True)):
        worse = logit.copy()
        worse[:lost] = -0.1  # still ranked above all others
        both = [
            measure_skills(make_predictions(BINARY, {"": {"target": target[:, None], "output": each[:, None]}}))
            for each in (logit, worse)
        ]
        assert bool(find_lost_skills(*both, 0.01)) == is_fault


def test_a_quantized_format_must_not_lose_a_skill() -> None:
    from scaleflow.features.formats.converter import Converter
    from scaleflow.features.formats.formats import list_formats

    def find(kind: str, form: str, change: Any) -> str:
        outputs, values = draw_rare(kind)
        before, now = (make_predictions({"o": outputs}, {"o": each}) for each in (values, change(kind, values)))
        plan: Any = SimpleNamespace(of=lambda section: section())
        converter = Converter(plan, None, None, None, None, {}, before)  # type: ignore[arg-type]
        return converter._find_lost_skill(list_formats()[form], now)

    def drop_rare(kind: str, values: Mapping[str, Array]) -> dict[str, Array]:
        return {**values, "output": np.minimum(values["output"], -0.5 + values["output"] / 1000)}

    assert find("numbers", "litert_int8", make_constant) == "it gives every example the same answer for o"
    assert find("binary", "litert_int8", drop_rare).startswith("its o/balanced_accuracy is 0.5, and ")
    assert find("binary", "onnx", drop_rare) == ""
    assert find("binary", "litert_int8", lambda kind, values: dict(values)) == ""


def test_predictions_without_two_classes_have_no_skill() -> None:
    values = {"target": np.zeros((50, 1), np.float32), "output": np.zeros((50, 1), np.float32)}
    made: Predictions = make_predictions(BINARY, {"": values})
    assert measure_skills(made) == {}
