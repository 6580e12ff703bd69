"""Models of rare answers that tests make: nearly all targets have the same value."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from scaleflow.interfaces import Outputs
from tests.evaluation.made import BINARY, CLASSES, LABELS, PRICE, TWO, draw_values

Array = np.ndarray[Any, Any]

#: The number of examples.
COUNT = 4000

KINDS = ("binary", "classes", "many classes", "labels", "numbers", "two numbers")


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


def make_constant(kind: str, values: Mapping[str, Array]) -> dict[str, Array]:
    """The same answer for each example, in the output, label or value that is nearly always the same."""
    output = values["output"].copy()
    if kind in ("labels", "two numbers"):
        output[:, 1] = np.median(output[:, 1])
    else:
        output[:] = np.median(output, axis=0)
    return {**values, "output": output}
