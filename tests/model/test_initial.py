"""A new model begins with the weights of a saved one, where their layers agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs
from tests.training.fake_engine import spread_over

ROW = Inputs((4,))


def begun(folder: Path) -> dict[str, Any]:
    """On two replicas: what is taken from a saved model with another head, and of models inside models."""
    import keras

    from scaleflow.model import initialize_from, read_weights

    file = str(folder / "saved.keras")

    def network(units: list[int], classes: int) -> Any:
        layers = [
            named
            for n, width in enumerate(units)
            for named in (
                keras.layers.Dense(width, use_bias=False, name=f"dense{n}"),
                keras.layers.BatchNormalization(synchronized=True, name=f"norm{n}"),
            )
        ]
        return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(classes, name="outputs")])

    strategy = spread_over(2)
    origin = network([6, 5], 3)
    for variable in origin.variables:
        variable.assign(np.random.default_rng(len(variable.path)).uniform(1, 2, variable.shape))
    origin.save(file)
    saved = read_weights(file, "saved.keras")
    with strategy.scope():
        net = network([6, 5], 2)
        fresh = np.asarray(net.get_layer("outputs").kernel)
        note = initialize_from(net, saved)
        inside = keras.Sequential([keras.Input((4,)), network([6, 7], 2)])
        note_inside = initialize_from(inside, saved)

    def each(variable: Any) -> list[Any]:
        return [np.asarray(v) for v in strategy.experimental_local_results(variable.value)]

    body = [layer for layer in net.layers if layer.weights and layer.name != "outputs"]
    return {
        "note": note,
        "note inside": note_inside,
        "same": all(
            np.array_equal(value, np.asarray(wanted))
            for layer in body
            for mine, wanted in zip(layer.weights, origin.get_layer(layer.name).weights, strict=True)
            for value in each(mine)
        ),
        "replicas": len(each(body[0].weights[0])),
        "fresh": bool(np.array_equal(fresh, np.asarray(net.get_layer("outputs").kernel))),
    }


def test_layers_of_the_same_name_and_shapes_are_taken_on_every_replica(
    isolated: Callable[..., Any], tmp_path: Path
) -> None:
    found = isolated(begun, tmp_path)
    assert found["note"] == (
        "model.init_from=saved.keras: loaded the weights of 4 of 5 layers (98 of 110 numbers); new weights: outputs"
    )
    assert "loaded the weights of 2 of 5 layers" in found["note inside"]
    assert found["replicas"] == 2
    assert found["same"]
    assert found["fresh"]


def refusals(folder: Path) -> list[str]:
    import keras

    from scaleflow.model import initialize_from, make_model, mlp, read_weights

    good, damaged = folder / "good.keras", folder / "damaged.keras"
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="other")]).save(good)
    damaged.write_bytes(good.read_bytes()[:-200])
    net = make_model(mlp.build, ROW, Outputs("binary", (1,)))
    found = []
    for case in (lambda: read_weights(str(damaged), "d"), lambda: initialize_from(net, read_weights(str(good), "g"))):
        with pytest.raises(ConfigError) as refusal:
            case()
        found.append(str(refusal.value))
    return found


def test_a_file_that_is_damaged_or_fits_nowhere_is_refused(isolated: Callable[..., Any], tmp_path: Path) -> None:
    damaged, other = isolated(refusals, tmp_path)
    assert damaged.startswith("model.init_from=d: cannot be read as a Keras model")
    assert "it is damaged, or not a .keras file" in damaged
    assert other.startswith("model.init_from=g: no layer has the name and the shapes")
    assert "the file has other (4, 3) (3,), and this model has dense (4, 128) (128,)" in other


def in_shards() -> list[list[float]]:
    import tensorflow as tf

    from scaleflow.model.initial import assign_variable

    shards = [tf.Variable(tf.zeros([n, 1])) for n in (2, 1)]
    divided: Any = SimpleNamespace(value=SimpleNamespace(variables=shards))
    assign_variable(divided, np.array([[1.0], [2.0], [3.0]], np.float32))
    return [np.ravel(shard.numpy()).tolist() for shard in shards]


def test_a_divided_variable_is_set_in_its_parts(isolated: Callable[..., Any]) -> None:
    assert isolated(in_shards) == [[1.0, 2.0], [3.0]]


def standardise(folder: Path) -> tuple[list[float], list[float]]:
    """What a layer gives whose mean and variance were saved, and the same layer of a new model."""
    import keras

    from scaleflow.model import initialize_from, read_weights

    def network() -> Any:
        return keras.Sequential([keras.Input((2,)), keras.layers.Normalization(name="standard")])

    origin, net = network(), network()
    origin.layers[0].adapt(np.array([[1.0, 10.0], [3.0, 30.0]], np.float32))
    origin.save(str(folder / "saved.keras"))
    initialize_from(net, read_weights(str(folder / "saved.keras"), "saved.keras"))
    row = np.array([[3.0, 10.0]], np.float32)
    return np.asarray(origin(row))[0].tolist(), np.asarray(net(row))[0].tolist()


def test_a_normalization_computes_with_the_mean_that_was_saved(isolated: Callable[..., Any], tmp_path: Path) -> None:
    wanted, found = isolated(standardise, tmp_path)
    assert wanted == pytest.approx([1, -1])
    assert found == wanted
