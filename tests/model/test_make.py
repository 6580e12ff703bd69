"""What becomes of the model that a factory returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refusals(names: list[str], has_step: bool) -> list[str]:
    """What is said of models that have a method of Keras's training of their own, on the class or on the object."""
    import keras

    from scaleflow.errors import ConfigError
    from scaleflow.interfaces import Inputs, Outputs
    from scaleflow.model.make import make_model

    found = []
    for name in names:
        for is_object in (False, True):
            classes = keras.Model, keras.Sequential
            for base in classes if not is_object else classes[1:]:
                methods = {} if is_object else {name: lambda self, *args, **named: None}
                made = type("Vae", (base,), methods)

                def factory(inputs: Any, outputs: Any, made: Any = made, name: str = name) -> Any:
                    raw = keras.Input(inputs.shape)
                    top = keras.layers.Dense(*outputs.shape)
                    model = made([raw, top]) if issubclass(made, keras.Sequential) else made(raw, top(raw))
                    if name not in vars(made):
                        setattr(model, name, lambda *args, **named: None)
                    return model

                try:
                    make_model(factory, Inputs((3,)), Outputs("regression", (1,)), has_step)
                    found.append("")
                except ConfigError as error:
                    found.append(f"{name}: {error}")
    return found


def refusal_of_stateful(is_stateful: bool) -> str:
    import keras

    from scaleflow.errors import ConfigError
    from scaleflow.interfaces import Inputs, Outputs
    from scaleflow.model.make import make_model

    def factory(inputs: Any, outputs: Any) -> Any:
        raw = keras.Input(batch_shape=(8, *inputs.shape)) if is_stateful else keras.Input(inputs.shape)
        return keras.Sequential([raw, keras.layers.GRU(2, stateful=is_stateful), keras.layers.Dense(*outputs.shape)])

    try:
        make_model(factory, Inputs((4, 3)), Outputs("regression", (1,)))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_stateful_layer_is_refused(isolated: Callable[..., Any]) -> None:
    assert "model: gru is stateful: it continues from the batch before" in isolated(refusal_of_stateful, True)
    assert isolated(refusal_of_stateful, False) == ""


NAMES = ["train_step", "test_step", "predict_step", "compute_loss", "compute_metrics", "make_train_function"]


@pytest.mark.parametrize("has_step", [False, True])
def test_a_model_with_its_own_training_is_refused(isolated: Callable[..., Any], has_step: bool) -> None:
    found = isolated(refusals, NAMES, has_step)
    assert len(found) == 3 * len(NAMES)
    if has_step:
        assert not any(found)
        return
    for text in found:
        name, _, rest = text.partition(": ")
        assert rest.startswith(f"model: Vae has its own {name}, which scaleflow does not call")
        assert "training.step._target_=my_code.my_step" in rest


def notes() -> dict[str, str | None]:
    """What is said of a model's Keras file, and of compile()."""
    import keras

    from scaleflow.model.make import find_compile_note, keras_file_doubt

    layers = keras.layers

    def own_function(x: Any) -> Any:
        return x

    class Own(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    registered = keras.saving.register_keras_serializable("tests")(type("Registered", (Own,), {}))
    made = {
        "plain": [layers.Dense(2, activation="relu"), layers.BatchNormalization()],
        "lambda": [layers.Lambda(lambda x: x)],
        "function": [layers.Dense(2, activation=own_function)],
        "class": [layers.TimeDistributed(Own())],
        "registered": [registered()],
    }
    raw = keras.Input((3, 2))
    found = {}
    for name, chain in made.items():
        x = raw
        for layer in chain:
            x = layer(x)
        found[name] = keras_file_doubt(keras.Model(raw, x))
    model = keras.Sequential([raw, layers.Dense(2)])
    found["not compiled"] = find_compile_note(model)
    model.compile(keras.optimizers.SGD(0.5), "mse")
    found["compiled"] = find_compile_note(model)
    return found


def test_what_a_model_loses_is_said(isolated: Callable[..., Any]) -> None:
    found = isolated(notes)
    assert [name for name, text in found.items() if text is None] == ["plain", "registered", "not compiled"]
    for name, what in (("lambda", "a lambda of a Lambda layer"), ("function", "own_function"), ("class", "Own")):
        assert found[name].startswith(f"model: {what} cannot be read from the .keras file")
    assert found["compiled"].startswith("model: compile(optimizer=SGD, loss=mse) of Sequential has no effect")
