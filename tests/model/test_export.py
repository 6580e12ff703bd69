from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ExportError
from scaleflow.interfaces import Inputs, Outputs
from tests.training.driving import ignore


def trained(plan: Any, folder: Path) -> np.ndarray[Any, Any]:
    """Trains a few steps and exports; gives the live model's outputs for the sample."""
    from scaleflow.worker.life import build

    built = build(plan, ignore)
    built.loop.start_epoch()
    built.loop.train(built.train, built.train.open(0, 0), 0, 0, 3, 0)
    built.export(folder)
    return np.asarray(built.loop.model(np.load(folder / "input_example.npy"), training=False))


def reloaded(folder: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
    """What both forms give for the example, and for how many digits the saved one gives something."""
    import keras
    import tensorflow as tf

    batch = np.load(folder / "input_example.npy")
    saved = tf.saved_model.load(str(folder / "saved_model"))
    larger = saved.serve(tf.constant(np.concatenate([batch] * 5)))
    return saved.serve(tf.constant(batch)).numpy(), keras.models.load_model(folder / "model.keras")(batch), len(larger)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("mixed_bfloat16", 5e-2)])
def test_both_forms_do_what_the_trained_model_does(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path, precision: str, tolerance: float
) -> None:
    chosen = plan(
        "hardware=cpu", "strategy=mirrored", "hardware.logical_devices=2", f"precision={precision}", "model=cnn",
        "model.filters=[4]", "model.dropout=0.5", "tracking=none",
    )  # fmt: skip
    live = isolated(trained, chosen, tmp_path / "model")
    saved, kept, count = isolated(reloaded, tmp_path / "model")
    assert saved.dtype == np.float32
    assert count == 10
    np.testing.assert_allclose(saved, live[:2], atol=tolerance)
    np.testing.assert_allclose(kept, live[:2], atol=tolerance)
    signature = json.loads((tmp_path / "model" / "signature.json").read_text())
    assert signature["inputs"] == {"dtype": "float32", "shape": [-1, 8, 8, 1]}
    assert signature["outputs"] == {"dtype": "float32", "shape": [-1, 10]}
    assert {"tensorflow", "keras"} < set(signature)


def exported_unfaithfully(folder: Path, kind: str) -> str | None:
    """Exports a model whose SavedModel does something else; gives the error."""
    import keras
    import tensorflow as tf

    from scaleflow.model import export

    class Counts(keras.layers.Layer):  # type: ignore[misc]
        """Each tracing gives another function."""

        traced = 0

        def call(self, x: Any) -> Any:
            Counts.traced += 1
            return x + (float(Counts.traced) if kind == "differs" else tf.constant(float("nan")))

    raw = keras.Input((3,))
    net = keras.Model(raw, Counts()(keras.layers.Dense(2)(raw)))
    batch = np.ones((4, 3), np.float32)
    try:
        export(net, Inputs((3,)), Outputs("regression", (2,)), batch, "float32", folder)
    except ExportError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", ["differs", "nan"])
def test_a_saved_model_that_differs_is_an_error(isolated: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    message = isolated(exported_unfaithfully, tmp_path / "model", kind)
    assert message is not None
    assert message.startswith("the SavedModel's outputs differ from the trained model's by")
    assert str(tmp_path / "model") in message
