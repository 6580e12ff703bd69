"""Models whose outputs are probabilities: found by what is traced, whatever the model is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scaleflow.interfaces import Objective, Outputs

PROBABILITIES = (
    *("dense", "activation", "layer", "operation", "subclass", "compiled", "half", "average", "clipped", "transposed"),
    *("mixture", "chosen", "largest"),
)
LOGITS = ("plain", "log", "gated", "bounded", "attention", "middle")


def make(name: str) -> Any:
    import keras
    import tensorflow as tf

    layers, raw = keras.layers, keras.Input((4,))
    x = layers.Dense(3)(raw)

    class Own(keras.Model):  # type: ignore[misc]
        def call(self, given: Any) -> Any:
            return tf.nn.softmax(given[:, :3])

    class Compiled(keras.Model):  # type: ignore[misc]
        @tf.function  # type: ignore[untyped-decorator]
        def call(self, given: Any) -> Any:
            return tf.nn.softmax(given[:, :3])

    def stack() -> Any:
        return keras.ops.stack([layers.Softmax()(x), layers.Dense(3, activation="softmax")(raw)], axis=1)

    if name in ("subclass", "compiled"):
        return Own() if name == "subclass" else Compiled()
    if name == "half":
        half = layers.Dense(3, activation="softmax", dtype="mixed_bfloat16")(raw)
        return keras.Model(raw, layers.Activation("linear", dtype="float32")(half))
    made = {
        "dense": lambda: layers.Dense(3, activation="softmax")(raw),
        "activation": lambda: layers.Activation("sigmoid")(x),
        "layer": lambda: layers.Softmax()(x),
        "operation": lambda: keras.ops.sigmoid(x),
        "average": lambda: layers.Average()([layers.Softmax()(x), layers.Dense(3, activation="softmax")(raw)]),
        "clipped": lambda: keras.ops.clip(layers.Softmax()(x), 1e-7, 1 - 1e-7),
        "transposed": lambda: layers.Flatten()(layers.Softmax(axis=1)(layers.Reshape((3, 1))(x))),
        "mixture": lambda: keras.ops.einsum("bk,bkc->bc", layers.Dense(2, activation="softmax")(raw), stack()),
        "chosen": lambda: stack()[:, 0],
        "largest": lambda: layers.GlobalMaxPooling1D()(stack()),
        "plain": lambda: x,
        "log": lambda: keras.ops.log_softmax(x),
        "gated": lambda: x * layers.Dense(3, activation="sigmoid")(raw),
        "bounded": lambda: 6 * keras.ops.sigmoid(x) - 3,
        "attention": lambda: layers.Attention()([layers.Reshape((1, 3))(x)] * 2)[:, 0],
        "middle": lambda: layers.Dense(3)(layers.Softmax()(x)),
    }[name]()
    return keras.Model(raw, made)


def refused(names: tuple[str, ...], kind: Any) -> list[str]:
    """What is said of each model when its loss is traced."""
    import tensorflow as tf

    from scaleflow.errors import ConfigError
    from scaleflow.objective import refuse_probabilities

    goal = Objective(lambda targets, outputs: tf.reduce_sum(outputs, axis=1))
    loss = refuse_probabilities(goal, Outputs(kind, (3,))).loss
    found = []
    for name in names:
        model = make(name)

        @tf.function(autograph=False)
        def step(inputs: Any, model: Any = model) -> Any:
            def body(number: Any, total: Any) -> Any:
                return number + 1, total + loss(inputs, model(inputs, training=True))

            return tf.while_loop(lambda number, _: number < 2, body, (0, tf.zeros([5])))

        try:
            step.get_concrete_function(tf.zeros([5, 4]))
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found


def refused_of_each() -> tuple[list[str], list[str], list[str]]:
    return (
        refused(PROBABILITIES, "classification"),
        refused(LOGITS, "classification"),
        refused(PROBABILITIES, "regression"),
    )


def test_probabilities_in_place_of_logits_are_refused(isolated: Callable[..., Any]) -> None:
    probabilities, logits, values = isolated(refused_of_each)
    for name, text in zip(PROBABILITIES, probabilities, strict=True):
        activation = "sigmoid" if name in ("activation", "operation") else "softmax"
        assert text.startswith(f"model: outputs end in {activation}"), (name, text)
        assert f"remove that activation (activation='{activation}')" in text
    assert logits == [""] * len(LOGITS)
    assert values == [""] * len(PROBABILITIES)
