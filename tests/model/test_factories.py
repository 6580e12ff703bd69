from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs

IMAGES = Inputs((8, 8, 1), scale=1 / 16)
TEN = Outputs("classification", (10,))


def shapes() -> dict[str, Any]:
    """Of each model its output's shape and its layers' kernels."""
    from scaleflow.model import make_model
    from scaleflow.model.cnn import build as cnn
    from scaleflow.model.mlp import build as mlp

    cases: dict[str, tuple[Any, Inputs, Outputs]] = {
        "mlp": (lambda i, o: mlp(i, o, units=128), IMAGES, TEN),
        "mlp of two": (lambda i, o: mlp(i, o, units=[7, 5], dropout=0.5), Inputs((4,)), Outputs("binary", (1,))),
        "mlp of a grid": (lambda i, o: mlp(i, o, units=[128]), Inputs((3,)), Outputs("regression", (2, 3))),
        "cnn": (lambda i, o: cnn(i, o, filters=[4, 6], units=[9]), IMAGES, TEN),
        "mlp normalized": (lambda i, o: mlp(i, o, units=[7], batch_norm=True), Inputs((4,)), TEN),
        "cnn normalized": (lambda i, o: cnn(i, o, filters=[4], units=9, batch_norm=True), IMAGES, TEN),
        "cnn valid": (lambda i, o: cnn(i, o, filters=[4], units=64, padding="valid", dropout=0.1), IMAGES, TEN),
    }
    found = {}
    for name, (factory, inputs, outputs) in cases.items():
        net = make_model(factory, inputs, outputs)
        dropouts = sum("dropout" in layer.name for layer in net.layers)
        found[name] = net.output_shape, [v.shape for v in net.trainable_variables if v.name == "kernel"], dropouts
    return found


def test_factories_build_what_they_are_asked_for(isolated: Callable[..., Any]) -> None:
    assert isolated(shapes) == {
        "mlp": ((None, 10), [(64, 128), (128, 10)], 0),
        "mlp of two": ((None, 1), [(4, 7), (7, 5), (5, 1)], 2),
        "mlp of a grid": ((None, 2, 3), [(3, 128), (128, 6)], 0),
        "cnn": ((None, 10), [(3, 3, 1, 4), (3, 3, 4, 6), (24, 9), (9, 10)], 0),
        "mlp normalized": ((None, 10), [(4, 7), (7, 10)], 0),
        "cnn normalized": ((None, 10), [(3, 3, 1, 4), (64, 9), (9, 10)], 0),
        "cnn valid": ((None, 10), [(3, 3, 1, 4), (36, 64), (64, 10)], 1),
    }


def scaled() -> bool:
    """Whether a model gives for raw inputs what it would give for scaled ones without its scale."""
    import dataclasses

    import numpy as np

    from scaleflow.model import make_model
    from scaleflow.model.mlp import build as mlp

    raw = make_model(mlp, IMAGES, TEN)
    plain = make_model(mlp, dataclasses.replace(IMAGES, scale=None), TEN)
    plain.set_weights(raw.get_weights())
    batch = np.random.default_rng(0).uniform(0, 16, (3, 8, 8, 1)).astype(np.float32)
    return bool(np.allclose(raw(batch), plain(batch / 16), atol=1e-6))


def test_the_scale_is_part_of_the_model(isolated: Callable[..., Any]) -> None:
    assert isolated(scaled)


def refused(factory: Callable[[Inputs, Outputs], Any], inputs: Inputs, outputs: Outputs) -> str | None:
    from scaleflow.model import make_model

    try:
        make_model(factory, inputs, outputs)
    except ConfigError as refusal:
        return str(refusal)
    return None


def refusals() -> list[str | None]:
    import keras

    from scaleflow.model.cnn import build as cnn
    from scaleflow.model.mlp import build as mlp

    fixed = keras.Sequential([keras.Input((3,)), keras.layers.Dense(10)])
    twice = keras.Model(raw := keras.Input((4,)), [keras.layers.Dense(10)(raw), keras.layers.Dense(10)(raw)])
    row = Inputs((4,))
    return [
        refused(cnn, row, TEN),
        refused(lambda i, o: cnn(i, o, filters=[4] * 4), IMAGES, TEN),
        refused(lambda i, o: cnn(i, o, filters=[4, 4, 4], padding="valid"), IMAGES, TEN),
        refused(lambda i, o: cnn(i, o, padding="full"), IMAGES, TEN),
        refused(lambda i, o: cnn(i, o, filters=[0]), IMAGES, TEN),
        refused(lambda i, o: mlp(i, o, units=[8, "a"]), row, TEN),
        refused(lambda i, o: mlp(i, o, dropout=1.0), row, TEN),
        refused(lambda i, o: mlp(i, o, batch_norm="yes"), row, TEN),  # type: ignore[arg-type]
        refused(lambda i, o: mlp(i, Outputs("classification", (9,))), row, TEN),
        refused(lambda i, o: "a model", row, TEN),
        refused(lambda i, o: fixed, row, TEN),
        refused(lambda i, o: twice, row, TEN),
    ]


def test_models_that_cannot_work_are_refused_in_words(isolated: Callable[..., Any]) -> None:
    wanted = [
        ("model=cnn", "(height, width, channels)", "(4,)", "use model=mlp"),
        ("model.filters=[4, 4, 4, 4]", "(8, 8, 1)", "use fewer"),
        ("model.filters=[4, 4, 4]", "or model.padding=same"),
        ("model.padding=full: expected one of same, valid",),
        ("model.filters=[0]: expected an integer, at least 1",),
        ("model.units=[8, 'a']: expected an integer, at least 1",),
        ("model.dropout=1.0: expected a number from 0 to less than 1",),
        ("model.batch_norm=yes: expected true or false",),
        ("model: returns outputs of shape (batch, 9)", "need (batch, 10)"),
        ("model: the factory returned a str, expected a keras.Model",),
        ("model: does not accept inputs of shape (batch, 4)",),
        ("model: returned a list of 2 tensors, expected one tensor (batch, 10)",),
    ]
    for words, message in zip(wanted, isolated(refusals), strict=True):
        assert message is not None, words
        for word in words:
            assert word in message, message


def cnn_of_a_number() -> list[tuple[int, ...]]:
    from scaleflow.model import make_model
    from scaleflow.model.cnn import build as cnn

    net = make_model(lambda i, o: cnn(i, o, filters=4, units=5), IMAGES, TEN)  # type: ignore[arg-type]
    return [v.shape for v in net.trainable_variables if v.name == "kernel"]


def test_filters_may_be_one_number(isolated: Callable[..., Any]) -> None:
    assert isolated(cnn_of_a_number) == [(3, 3, 1, 4), (64, 5), (5, 10)]


def norm_doubts() -> dict[str, list[str]]:
    """By what the model has and how a batch is divided."""
    import keras

    from scaleflow.interfaces import Batching
    from scaleflow.model import find_batch_norm_warnings
    from scaleflow.model.cnn import build as cnn

    def of(*layers: Any) -> Any:
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), *layers])

    norm = keras.layers.BatchNormalization
    models = {
        "none": of(),
        "alone": of(norm(name="first"), of_three(keras, norm)),
        "together": of(norm(synchronized=True)),
        "frozen": of(norm(trainable=False)),
        "ours": cnn(IMAGES, TEN, batch_norm=True),
    }
    divided = {"whole": Batching(8, 1, 1), "replicas": Batching(8, 1, 2), "micro-batches": Batching(8, 3, 1)}
    return {
        f"{name}, {how}": found
        for name, net in models.items()
        for how, portions in divided.items()
        if (found := find_batch_norm_warnings(net, portions))
    }


def of_three(keras: Any, norm: Any) -> Any:
    """A model inside another."""
    return keras.Sequential([keras.Input((3,)), norm(name="second")])


def test_batch_norm_that_sees_less_than_the_batch_is_pointed_out(isolated: Callable[..., Any]) -> None:
    found = isolated(norm_doubts)
    assert set(found) == {
        "alone, replicas",
        "alone, micro-batches",
        "together, micro-batches",
        "ours, micro-batches",
    }
    (alone,) = found["alone, replicas"]
    assert alone.startswith("model: first and 1 more normalizes each of 2 replicas by its own examples")
    assert "BatchNormalization(synchronized=True)" in alone
    (parts,) = found["ours, micro-batches"]
    assert "training.accumulate=3" in parts
    assert "not the 24 examples of an update" in parts
