"""hardware.xla compiles the whole loop or the model's passes, and the results are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs
from tests.training.fake_engine import far, follow_each, ignore, run_apart, take

STEPS = 30
BASE = ("hardware=cpu", "tracking=none", "training.global_batch_size=48", "optimizer.learning_rate=0.01")
RECIPES = {
    "mlp": ("model.units=16",),
    "mlp accumulated and clipped": ("model.units=16", "training.accumulate=4", "training.clip_norm=0.3"),
    "cnn": ("model=cnn", "model.filters=[8]", "model.units=8"),
    "stream": ("dataset._target_=tests.training.test_xla.Streamed", "dataset.cache=none", "model.units=16"),
    "own step": ("model.units=16", "training.step={_target_: tests.training.steps.smoothed}"),
}
STRATEGIES = {
    "one_device": ("strategy=one_device",),
    "mirrored": ("strategy=mirrored", "hardware.logical_devices=2"),
}


class Streamed:
    """The digits, read as they come."""

    def __init__(self) -> None:
        from scaleflow.dataset.digits import Digits

        self._digits = Digits()
        self.inputs, self.outputs, self.splits = self._digits.inputs, self._digits.outputs, self._digits.splits

    def load(self, split: str) -> Any:
        import tensorflow as tf

        from scaleflow.interfaces import Stream

        arrays = self._digits.load(split)
        return Stream(tf.data.Dataset.from_tensor_slices((arrays.inputs, arrays.targets)), len(arrays))


@pytest.mark.parametrize(
    ("recipe", "strategy"),
    [
        *((recipe, "one_device") for recipe in RECIPES),
        *((recipe, "mirrored") for recipe in ("mlp accumulated and clipped", "stream", "own step")),
    ],
)
def test_a_run_compiled_with_xla_is_the_same_run(
    isolated: Callable[..., Any], plan: Callable[..., Any], recipe: str, strategy: str
) -> None:
    words = (*BASE, *RECIPES[recipe], *STRATEGIES[strategy])
    made = [plan(*words, f"hardware.xla={setting}") for setting in ("false", "true")]
    plain, found = isolated(follow_each, made, STEPS)
    np.testing.assert_allclose(found.losses, plain.losses, rtol=0, atol=1e-5)
    assert far(found.weights, plain.weights) < 1e-4
    assert plain.losses[-1] < plain.losses[0]


def follow_states(plan: Any) -> tuple[str, list[float], dict[str, np.ndarray[Any, Any]]]:
    """Takes four steps. Returns what is compiled, the losses, and each replica's variables that are not trained."""
    from scaleflow.worker.build import build_training

    built = build_training(plan, ignore)
    losses = take(built.engine, built.feeds.train, 4).losses
    states = {
        f"{variable.path}/{replica}": np.asarray(value)
        for variable in built.engine.model.non_trainable_variables
        for replica, value in enumerate(built.runtime.strategy.experimental_local_results(variable.value))
    }
    return built.facts.resolved["xla"], losses, states


@pytest.mark.slow
def test_each_replica_keeps_its_own_states_under_xla(isolated: Callable[..., Any], plan: Any) -> None:
    words = (*BASE, *model("with_states"), *STRATEGIES["mirrored"], "training.accumulate=2", MANY_EPOCHS)
    plans = [plan(*words), plan(*words, "hardware.xla=true")]
    (choice, losses, states), found = isolated(run_apart, follow_states, [(each,) for each in plans])
    assert choice == "false: strategy=mirrored: only one device's loop is compiled as a whole"
    found_choice, found_losses, found_states = found
    assert found_choice.startswith("forward and backward pass: hardware.xla=true; strategy=mirrored")
    np.testing.assert_allclose(found_losses, losses, rtol=0, atol=1e-5)
    assert set(found_states) == set(states)
    for name, value in states.items():
        np.testing.assert_allclose(found_states[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    mean, seed = (next(name[:-2] for name in states if text in name) for text in ("moving_mean", "seed"))
    assert not np.allclose(states[f"{mean}/0"], states[f"{mean}/1"])
    assert states[f"{seed}/1"][1] == 8  # drawn once for each micro-batch


#: What the whole loop is compiled for, and why it is not.
CHOICES = {
    (): "whole loop: faster on a CPU",
    ("training.epochs=20",): "false: compiling takes longer than it saves in",
    ("model=cnn",): "false: the layer conv2d: XLA is slow with Conv2D on a CPU",
}
MORE_CHOICES = {
    ("hardware.remat=[dense*]",): "false: hardware.remat: XLA would reuse",
    ("model.dropout=0.1",): "whole loop: faster on a CPU",
    ("training.accumulate=4", "training.clip_norm=0.3"): "whole loop: ",
    ("hardware.xla=true",): "whole loop: ",
    ("hardware.xla=false",): "false: hardware.xla=false",
    ("model=cnn", "hardware.xla=true"): "forward and backward pass: hardware.xla=true; the layer conv2d",
    ("precision=mixed",): "false: precision=mixed_bfloat16",
    ("training.step={_target_: tests.training.steps.smoothed}",): "false: training.step",
    ("dataset.augment={flip: true}",): "false: the examples are no arrays in the device's memory, or are augmented",
    RECIPES["stream"]: "false: the examples are no arrays",
}


#: So many that compiling pays.
MANY_EPOCHS = "training.epochs=1000"


def choices_of(plans: list[Any]) -> list[str]:
    from scaleflow.worker.build import build_training

    return [build_training(plan, ignore).facts.resolved["xla"] for plan in plans]


def test_auto_compiles_the_whole_loop_by_a_rule_that_is_recorded(isolated: Callable[..., Any], plan: Any) -> None:
    assert_chosen(isolated, plan, CHOICES)


@pytest.mark.slow
def test_other_choices_are_made_by_the_rule(isolated: Callable[..., Any], plan: Any) -> None:
    own = {
        (*model("through_text"),): "false: XLA cannot compile the operation AsString",
        (*model("by_operations"),): "false: XLA is slow with the operation Conv2D",
    }
    assert_chosen(isolated, plan, {**MORE_CHOICES, **own})


def assert_chosen(isolated: Callable[..., Any], plan: Any, wanted: dict[tuple[str, ...], str]) -> None:
    common = (*BASE, "strategy=one_device", MANY_EPOCHS)
    found = isolated(choices_of, [plan(*common, *words) for words in wanted])
    for choice, text in zip(found, wanted.values(), strict=True):
        assert choice.startswith(text)


def by_operations(inputs: Inputs, outputs: Outputs) -> Any:
    """A user's model with a convolution that is no layer."""
    import keras
    import tensorflow as tf

    raw = keras.Input(inputs.shape)
    x = keras.layers.Lambda(lambda x: tf.nn.conv2d(x, tf.ones([3, 3, 1, 1]), 1, "SAME"), output_shape=inputs.shape)(raw)
    return keras.Model(raw, keras.layers.Dense(*outputs.shape)(keras.layers.Flatten()(x)))


def synchronised(inputs: Inputs, outputs: Outputs) -> Any:
    """A user's model whose replicas speak with each other in the middle of it."""
    import keras

    raw = keras.Input(inputs.shape)
    x = keras.layers.BatchNormalization(synchronized=True, name="norm")(keras.layers.Flatten()(raw))
    return keras.Model(raw, keras.layers.Dense(*outputs.shape)(x))


def with_states(inputs: Inputs, outputs: Outputs) -> Any:
    """A user's model whose layers hold statistics and seeds, in each replica its own."""
    import keras

    raw = keras.Input(inputs.shape)
    x = keras.layers.BatchNormalization(momentum=0.5)(keras.layers.Flatten()(raw))
    x = keras.layers.GaussianNoise(1e-9)(x)  # changes no loss, although XLA draws other numbers
    return keras.Model(raw, keras.layers.Dense(*outputs.shape)(x))


def aggregated(inputs: Inputs, outputs: Outputs) -> Any:
    """A user's model with a mean over the replicas in its forward pass."""
    import keras

    class RunningMean(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(
                name="mean", shape=(shape[-1],), initializer="zeros", trainable=False, aggregation="mean"
            )

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
            return x - self.mean

    raw = keras.Input(inputs.shape)
    x = RunningMean(name="center")(keras.layers.Flatten()(raw))
    return keras.Model(raw, keras.layers.Dense(*outputs.shape)(x))


def through_text(inputs: Inputs, outputs: Outputs) -> Any:
    """A user's model with an operation that XLA does not have."""
    import keras
    import tensorflow as tf

    raw = keras.Input(inputs.shape)
    number = keras.layers.Lambda(lambda x: tf.strings.to_number(tf.strings.as_string(x)), output_shape=inputs.shape)
    return keras.Model(raw, keras.layers.Dense(*outputs.shape)(keras.layers.Flatten()(number(raw))))


class Words:
    """Text."""

    def __init__(self) -> None:
        self.inputs, self.outputs = Inputs((), "string"), Outputs("binary", (1,))
        self.splits = ("train",)

    def load(self, split: str) -> Any:
        import tensorflow as tf

        from scaleflow.interfaces import Stream

        return Stream(tf.data.Dataset.from_tensor_slices((["good", "bad"] * 8, [[1.0], [0.0]] * 8)), 16)


def of_text(inputs: Inputs, outputs: Outputs) -> Any:
    import keras
    import tensorflow as tf

    raw = keras.Input(inputs.shape, dtype="string")
    length = keras.layers.Lambda(lambda x: tf.cast(tf.strings.length(x), "float32")[:, None], output_shape=(1,))
    return keras.Model(raw, keras.layers.Dense(*outputs.shape)(length(raw)))


def model(name: str) -> tuple[str, ...]:
    return f"model._target_=tests.training.test_xla.{name}", "~model.units", "~model.dropout", "~model.batch_norm"


def why(plan: Any) -> str:
    """What the worker refuses, or why training fails."""
    from scaleflow.worker.build import build_training
    from scaleflow.worker.failures import format_failure

    try:
        built = build_training(plan, ignore)
        built.engine.train(built.feeds.train, built.feeds.train.open(0, 0), 0, 0, 1, 0)
    except ConfigError as refusal:
        return f"refused: {refusal}"
    except Exception as error:
        return f"failed: {format_failure(error, plan)}"
    return "trained"


@pytest.mark.slow
def test_what_does_not_compile_is_named(isolated: Callable[..., Any], plan: Any) -> None:
    words = (*BASE, "strategy=one_device", "hardware.xla=true")
    failed, trained = isolated(
        run_apart, why, [(plan(*words, *model(name)),) for name in ("through_text", "synchronised")]
    )
    assert failed.startswith("failed: InvalidArgumentError: ")
    assert "AsString" in failed
    assert trained == "trained"  # nobody else is there to speak with


@pytest.mark.slow  # tests/test_refusals.py has two replicas
def test_a_single_replica_that_would_speak_with_others_is_refused(isolated: Callable[..., Any], plan: Any) -> None:
    found = isolated(why, plan(*BASE, *model("synchronised"), "hardware.xla=true", "strategy=mirrored"))
    assert found.startswith("refused: hardware.xla=true: the layer norm is synchronised over 1 replica,")
