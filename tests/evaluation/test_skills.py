"""What a constant answer does not have: skills of each kind of target, and models that lost them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from scaleflow.commands.promotion_steps import check_skills
from scaleflow.evaluation.predictions import Predictions
from scaleflow.evaluation.skills import find_constant_parts, find_lost_skills, measure_skills
from scaleflow.interfaces import Outputs
from tests.evaluation.made import BINARY, CLASSES, LABELS, PRICE, TWO, draw_values, make_predictions

Array = np.ndarray[Any, Any]
COUNT = 4000


def draw_rare(kind: str) -> tuple[Outputs, dict[str, Array]]:
    """A good model of targets of which nearly all have the same value: 1 % are of the other class."""
    random = np.random.default_rng(3)
    is_rare = random.random(COUNT) < 0.01
    noise = random.normal(size=COUNT)
    logit = np.where(is_rare, 4.0, -4.0) + noise
    if kind == "binary":
        return BINARY, {"target": is_rare[:, None].astype(np.float32), "output": logit[:, None].astype(np.float32)}
    if kind == "classes":
        two = replace(CLASSES, shape=(2,), names=("ant", "bee"))
        output = np.stack([-logit, logit], axis=1) / 2
        return two, {"target": is_rare.astype(np.int32), "output": output.astype(np.float32)}
    if kind == "many classes":
        target = np.where(is_rare, 7, 0).astype(np.int32)
        output = random.normal(size=(COUNT, 10)) - 9
        output[:, 0], output[:, 7] = -logit, logit
        return Outputs("classification", (10,)), {"target": target, "output": output.astype(np.float32)}
    if kind == "labels":
        values = draw_values(LABELS, COUNT, skill=8.0)
        values["target"][:, 1], values["output"][:, 1] = is_rare, logit
        return LABELS, values
    price = np.where(is_rare, 50 + 10 * noise, 0.0)
    said = price + 0.01 * random.normal(size=COUNT) * is_rare
    if kind == "numbers":
        return PRICE, {"target": price[:, None].astype(np.float32), "output": said[:, None].astype(np.float32)}
    target, output = (np.stack([random.normal(size=COUNT) * 1e6, each], axis=1) for each in (price, said))
    output[:, 0] = target[:, 0]
    return TWO, {"target": target.astype(np.float64), "output": output.astype(np.float64)}


KINDS = ("binary", "classes", "many classes", "labels", "numbers", "two numbers")


def make_constant(kind: str, values: Mapping[str, Array]) -> dict[str, Array]:
    """The same answer for each example, in the output, label or value that is nearly always the same."""
    output = values["output"].copy()
    if kind in ("labels", "two numbers"):
        output[:, 1] = np.median(output[:, 1])
    else:
        output[:] = np.median(output, axis=0)
    return {**values, "output": output}


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_answer_is_found_whatever_the_accuracy(kind: str) -> None:
    outputs, values = draw_rare(kind)
    good, constant = (make_predictions(outputs, {"": each}) for each in (values, make_constant(kind, values)))
    part = {"labels": ["b"], "two numbers": ["height"]}.get(kind, [""])
    assert (find_constant_parts(good), find_constant_parts(constant)) == ([], part)
    lost = find_lost_skills(measure_skills(good), measure_skills(constant), 0.01)
    assert lost
    assert all("width" not in name and "/a" not in name for name in lost)
    conditions = check_skills(constant, good, np.zeros(COUNT, bool))
    assert conditions
    assert not any(each.holds for each in conditions)
    assert check_skills(good, constant, np.zeros(COUNT, bool)) == []


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


def test_a_candidate_with_another_threshold_is_no_constant() -> None:
    outputs, values = draw_rare("binary")
    strict = replace(outputs, threshold=0.98)
    champion, candidate = (make_predictions(each, {"": values}) for each in (outputs, strict))
    assert measure_skills(candidate)["balanced_accuracy"].value < measure_skills(champion)["balanced_accuracy"].value
    assert check_skills(candidate, champion, np.zeros(COUNT, bool)) == []
    never = make_predictions(replace(outputs, threshold=0.9999999), {"": values})
    (condition,) = check_skills(never, champion, np.zeros(COUNT, bool))
    assert condition.text.startswith("balanced_accuracy 0.5, the champion 0.9")


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
