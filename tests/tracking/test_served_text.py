"""A model of text, trained by two workers: it is saved with its vocabulary, and takes raw strings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Command

REVIEWS = '''
import os
import pathlib

import keras
import numpy as np

from scaleflow.dataset.reading.text import Text
from scaleflow.interfaces import Arrays, Inputs, Outputs


class Logged(Text):
    def learn(self, batches):
        with pathlib.Path(__file__).with_name("learned").open("a") as file:
            file.write(f"{os.getpid()}\\n")
        return super().learn(batches)


class Reviews:
    """Texts whose first word tells the target."""

    inputs = Inputs((), "string")
    outputs = Outputs("binary", (1,))
    splits = ("train", "test")

    def __init__(self):
        self.preprocessing = Logged(vocabulary=20, tokens=4)

    def load(self, split):
        targets = np.arange(60) % 2
        texts = np.array([f"{('Bad!', 'good')[target]} w{n % 9}" for n, target in enumerate(targets)], object)
        return Arrays(texts, targets[:, None].astype(np.float32))


def build(inputs, outputs):
    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    x = keras.layers.Embedding(inputs.vocabulary, 8)(raw)
    outputs = keras.layers.Dense(1, dtype="float32")(keras.layers.GlobalAveragePooling1D()(x))
    return keras.Model(raw, outputs, name="text")  # as the preprocessing is called
'''


def served(folder: Path) -> dict[str, Any]:
    """What the logged model gives for raw strings in every form."""
    import keras
    import mlflow
    import pandas as pd
    import tensorflow as tf

    model = mlflow.pyfunc.load_model(str(folder))
    texts = ["Good w1", "bad, w2", "nothing known"]
    forms = {
        "list": texts,
        "array": np.array(texts),
        "objects": np.array(texts, object),
        "frame": pd.DataFrame({"text": texts}),
        "series": pd.Series(texts),
    }
    found = {name: model.predict(form, params={"output": "logits"}) for name, form in forms.items()}
    loaded = tf.saved_model.load(str(folder / "data" / "saved_model"))
    found["saved model"] = loaded.serve(tf.constant(texts)).numpy()
    found["keras file"] = keras.models.load_model(folder / "data" / "model.keras")(tf.constant(texts)).numpy()
    found["example"] = model.predict(model.input_example)
    return found


@pytest.mark.slow
def test_a_model_of_text_takes_raw_strings_wherever_it_is_loaded(
    command: Command, isolated: Callable[..., Any]
) -> None:
    (command.folder / "mine.py").write_text(REVIEWS)
    words = ("hardware=cpu", "strategy=multi_worker", "training.epochs=20", "optimizer.learning_rate=0.05")
    target = ("dataset._target_=mine.Reviews", "model._target_=mine.build", "~model.units", "~model.dropout")
    ended = command(*words, *target, "~model.batch_norm")
    assert ended.returncode == 0, ended.stderr
    assert len((command.folder / "learned").read_text().split()) == 1  # the chief, for both

    (described,) = command.folder.glob("mlartifacts/*/models/*/artifacts/MLmodel")
    found = isolated(served, described.parent)
    for name, values in found.items():
        if name != "example":
            np.testing.assert_allclose(values, found["keras file"], atol=1e-5, err_msg=name)
    assert found["keras file"].shape == (3, 1)
    assert found["keras file"][0] > 1
    assert found["keras file"][1] < -1
    assert list(found["example"]) == ["prediction", "probability", "probability_0", "probability_1"]
