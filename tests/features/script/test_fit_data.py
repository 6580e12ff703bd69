"""Digests of the data of a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def describe_data() -> dict[str, Any]:
    import numpy as np
    import pandas as pd
    import tensorflow as tf

    from scaleflow.features.script import fit_data

    def digest(inputs: Any, targets: Any = None) -> Any:
        data = fit_data.FitData("train.py")
        data.add("train", inputs, targets)
        described = data.describe()
        return described.splits["train"] if described else None

    x = np.arange(12, dtype="float32").reshape(4, 3)
    texts = np.array(["a", "b"], dtype=object)
    changed = x.copy()
    changed[3, 2] += 1
    table = pd.DataFrame(x)
    found = {
        "inputs": digest({"left": x, "right": x[:, 0]}, x[:, 1])["inputs"],
        "same": digest(x) == digest(tf.constant(x)),
        "changed": digest(x)["digest"] == digest(changed)["digest"],
        "texts": digest(texts)["digest"] == digest(texts[::-1])["digest"],
        "targets": digest(x, x[:, 0])["digest"] == digest(x, x[:, 1])["digest"],
        "table": digest(table)["examples"],
        "made while it is read": [digest(tf.data.Dataset.from_tensors(x)), digest(iter([x])), digest(x, iter([x]))],
    }
    fit_data.WHOLE_BYTES = 16
    found["sample"] = digest(x)["covers"]
    return found


def test_digests_are_those_of_the_values(isolated: Callable[..., Any]) -> None:
    assert isolated(describe_data) == {
        "inputs": {"left": {"dtype": "float32", "shape": [3]}, "right": {"dtype": "float32", "shape": []}},
        "same": True,
        "changed": False,
        "texts": False,
        "targets": False,
        "table": 4,
        "made while it is read": [None, None, None],
        "sample": "a sample of the rows",
    }
