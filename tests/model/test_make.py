"""What becomes of the model that a factory returns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
        assert "training.step={_target_: my_code.my_step}" in rest


def notes() -> dict[str, str | None]:
    """What is said of a model's Keras file, and of compile()."""
    import keras

    from scaleflow.model.make import keras_file_doubt

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
    return found


def test_what_a_model_loses_is_said(isolated: Callable[..., Any]) -> None:
    found = isolated(notes)
    assert [name for name, text in found.items() if text is None] == ["plain", "registered"]
    for name, what in (("lambda", "a lambda of a Lambda layer"), ("function", "own_function"), ("class", "Own")):
        assert found[name].startswith(f"model: {what} cannot be read from the .keras file")


def load_faults(folder: str) -> dict[str, str | None]:
    """What is said of exported models with layers and models of the user's own."""
    import keras

    from scaleflow.model import find_load_fault

    class Own(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self, units: int = 3, **options: Any) -> None:
            super().__init__(**options)
            self.units, self.dense = units, keras.layers.Dense(units)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), "units": self.units}

    class TakesNoOptions(Own):
        def __init__(self, units: int) -> None:
            super().__init__(units)

    class ForgetsUnits(Own):
        def get_config(self) -> dict[str, Any]:
            return dict(keras.layers.Layer.get_config(self))

    class NeedsUnits(ForgetsUnits):
        def __init__(self, units: int, **options: Any) -> None:
            super().__init__(units, **options)

    class OwnModel(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        def call(self, x: Any) -> Any:
            return x

    register = keras.saving.register_keras_serializable("tests")
    layers = [register(each)(5) for each in (Own, TakesNoOptions, ForgetsUnits, NeedsUnits)]
    loaded, load = [], keras.models.load_model
    keras.models.load_model = lambda *words, **options: loaded.append(words) or load(*words, **options)
    found = {}
    for layer in (*layers, register(OwnModel)(), keras.layers.Dense(5)):
        raw = keras.Input((4,))
        keras.Model(raw, keras.layers.Dense(2)(layer(raw))).save(f"{folder}/model.keras")
        found[type(layer).__name__] = find_load_fault(Path(folder))
    return {**found, "loaded": str(len(loaded))}


def test_what_evaluate_could_not_load_is_said_with_what_to_write(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(load_faults, str(tmp_path))
    assert found.pop("Own") is found.pop("Dense") is None
    assert found.pop("loaded") == "5"  # the model of Keras's classes is not
    takes = "let this __init__ take **options and pass them to super().__init__(**options)"
    gives = "from get_config"
    for name, reason, advice in (
        ("TakesNoOptions", "TakesNoOptions.__init__() got an unexpected keyword argument", takes),
        ("OwnModel", "OwnModel.__init__() got an unexpected keyword argument 'trainable'", takes),
        ("NeedsUnits", "missing 1 required positional argument: 'units'", gives),
        ("ForgetsUnits", "is incompatible with the layer", gives),
    ):
        assert reason in found[name], found
        assert advice in found[name], found


def find_output_faults() -> dict[str, Any]:
    """What is said of models with several last layers, in mixed precision, for a loss of positive values."""
    import keras

    from scaleflow.errors import ConfigError
    from scaleflow.model.make import check_positive, find_low_precision_note

    keras.config.set_dtype_policy("mixed_bfloat16")
    raw = keras.Input((3,))
    heads = {
        "plain": keras.layers.Dense(1, name="top"),
        "float32": keras.layers.Dense(1, name="top", dtype="float32"),
        "positive": keras.layers.Dense(1, activation="softplus", dtype="float32", name="top"),
    }
    found: dict[str, Any] = {}
    for name, layer in heads.items():
        model = keras.Model(raw, layer(raw))
        try:
            check_positive(model, {"": "objective.loss=poisson"})
            refusal = ""
        except ConfigError as error:
            refusal = str(error)
        found[name] = refusal, find_low_precision_note(model)
    other = keras.layers.Dense(1, name="other", dtype="float32")
    several = keras.Model(raw, {"a": other(raw), "b": heads["positive"](raw)})
    check_positive(several, {"b": "objective.loss.b=poisson"})
    found["several"] = find_low_precision_note(several)
    return found


def test_last_layers_of_own_models_are_looked_at(isolated: Callable[..., Any]) -> None:
    found = isolated(find_output_faults)
    refusal = (
        "objective.loss=poisson: is for outputs above 0, and the last layer top of the model has no activation; write "
        "activation='softplus' into it, or use a loss such as huber"
    )
    note = (
        "model: outputs of the layer top are computed in bfloat16 and rounded to about three digits; write "
        "dtype='float32' into this layer"
    )
    assert found["plain"] == (refusal, note)
    assert found["float32"] == (refusal, None)
    assert found["positive"] == ("", None)
    assert found["several"] is None


def warn_of_norms() -> list[Any]:
    """The warnings for a BatchNorm that trains in all of 100 steps, in some of them, in few, and in none."""
    import keras

    from scaleflow.interfaces import FreezePhase
    from scaleflow.model.make import find_moving_average_warning

    raw = keras.Input((3,))
    norm = keras.layers.BatchNormalization(name="norm", momentum=0.99)
    model = keras.Model(raw, norm(raw))
    frozen, trained = FreezePhase(0, [(norm, False)]), FreezePhase(1, [(norm, True)])
    return [
        find_moving_average_warning(model, 400, 1),
        find_moving_average_warning(model, 400, 1, [(frozen, 100), (trained, 300)]),
        find_moving_average_warning(model, 400, 1, [(frozen, 350), (trained, 50)]),
        find_moving_average_warning(model, 400, 1, [(frozen, 400)]),
        find_moving_average_warning(model, 400, 4, [(frozen, 350), (trained, 50)]),
    ]


def test_moving_averages_move_only_in_the_steps_in_which_their_layer_trains(isolated: Callable[..., Any]) -> None:
    whole, most, few, none, accumulated = isolated(warn_of_norms)
    assert (whole, most, none, accumulated) == (None, None, None, None)
    assert few == (  # 0.99 ** 50 = 0.605; log(0.05) / log(0.99) = 298.07
        "model: 61% of the moving averages of norm is still what they begin with after the 50 of 400 steps in which "
        "they train, so evaluations can be far worse than training; train for about 299 steps, or lower the momentum "
        "of BatchNormalization"
    )


def explain_unknown_class() -> list[str]:
    from scaleflow.model import explain_load_error

    error = TypeError("Could not locate class 'Mine'. Make sure custom classes are decorated")
    return [explain_load_error(error), explain_load_error(error, takes_trust=True)]


def test_trust_is_advised_only_where_a_command_has_it(isolated: Callable[..., Any]) -> None:
    without, with_trust = isolated(explain_unknown_class)
    assert without.endswith("register_keras_serializable() and import its module in code that the config names")
    assert with_trust.endswith("register_keras_serializable() and add --trust MODULE")
