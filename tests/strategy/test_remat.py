"""Training that computes activations again is the same training."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs, Plan
from tests.checkpoint.test_resume import Course, course
from tests.conftest import Command
from tests.strategy.test_parameter_server import IN_SHARDS
from tests.strategy.test_structures import train_all
from tests.training.fake_engine import far, ignore, run_apart, run_each, take

Isolated = Callable[..., Any]
Make = Callable[..., Plan]

STEPS = 3
BASE = ("hardware=cpu", "tracking=none", "training.global_batch_size=48", "optimizer.learning_rate=0.01")
WORDS = (*BASE, "dataset._target_=tests.training.words.Words")
TRANSFORMER = (*WORDS, "model=transformer", "model.blocks=1", "model.heads=2", "model.width=8", "model.dropout=0.2")
#: Statistics and dropout in each block.
MLP = (*BASE, "model.units=[16,16]", "model.dropout=0.2", "model.batch_norm=true")
MIRRORED = ("strategy=mirrored", "hardware.logical_devices=2")
PIPELINE = ("strategy=pipeline", "hardware.logical_devices=2", "strategy.micro_batches=2")
ONE = ("strategy=one_device",)
SAME = 1e-6
MODELS = "model._target_=tests.strategy.test_remat."

Followed = tuple[list[float], dict[str, np.ndarray[Any, Any]], str]


def follow(plan: Plan) -> Followed:
    """The losses, all variables (statistics and states of random generators too), and what is computed again."""
    from scaleflow.worker.build import build_training

    built = build_training(plan, ignore)
    losses = take(built.engine, built.feeds.train, STEPS).losses
    variables = {v.path: np.asarray(v) for v in built.engine.gather_model().variables}
    return losses, variables, built.facts.resolved["remat"]


def assert_same(found: Followed, wanted: Followed, atol: float = SAME) -> None:
    assert wanted[2] == "false"
    np.testing.assert_allclose(found[0], wanted[0], rtol=0, atol=atol)
    assert list(found[1]) == list(wanted[1])
    for name, value in wanted[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=0, atol=10 * atol, err_msg=name)


#: What is computed again, for `true` or patterns.
CASES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "one_device": ((*TRANSFORMER, *ONE), {"true": "2 segments", "[block?_attention,*feed1]": "2 layers"}),
    "accumulated": ((*MLP, *ONE, "training.accumulate=2"), {"true": "2 segments"}),
    "mirrored": ((*MLP, *MIRRORED), {"true": "2 segments", "[batch_normalization*]": "2 layers"}),
    "pipeline, added losses": ((*BASE, f"{MODELS}adding", *PIPELINE, "strategy.cuts=[narrow]"), {"true": "1 segment"}),
    "pipeline": ((*MLP, *PIPELINE), {"true": "2 segments", "[batch_normalization*]": "2 layers"}),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_states_are_the_same(isolated: Isolated, plan: Make, case: str) -> None:
    words, settings = CASES[case]
    remats = ("false", *settings)
    wanted, *others = isolated(run_apart, follow, [(plan(*words, f"hardware.remat={remat}"),) for remat in remats])
    for found, again in zip(others, settings.values(), strict=True):
        assert_same(found, wanted)
        assert found[2] == again


#: Further ways to train. A half-precision result may be rounded elsewhere: an operation that the backward pass does not
#: need is fused with the next one.
MORE_CASES: dict[str, tuple[tuple[str, ...], str, float]] = {
    "float16": ((*MLP, *MIRRORED, "precision=mixed_float16", "training.clip_norm=0.3"), "true", 5e-3),
    "bfloat16": ((*MLP, *ONE, "precision=mixed_bfloat16"), "true", 3e-2),
    "eager": ((*MLP, *ONE, "debug=eager"), "true", SAME),
    "resnet": ((*BASE, "model._target_=tests.strategy.models.resnet", *MIRRORED), "true", 1e-5),
    "frozen and LoRA": (
        (*MLP, *ONE, "model.freeze=[dense]", "model.lora={rank: 2, layers: [dense_1]}"),
        "true",
        SAME,
    ),
    "a step of one's own": ((*MLP, *ONE, "training.step={_target_: tests.training.steps.smoothed}"), "true", SAME),
    "pipeline with a model's own losses": (
        (*BASE, "model._target_=tests.strategy.models.resnet", *PIPELINE, "training.accumulate=2"),
        "true",
        SAME,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES)
def test_losses_are_the_same_however_training_is_done(isolated: Isolated, plan: Make, case: str) -> None:
    words, remat, atol = MORE_CASES[case]
    wanted, found = isolated(
        run_apart, follow, [(plan(*words, f"hardware.remat={each}"),) for each in ("false", remat)]
    )
    assert_same(found, wanted, atol)
    assert found[2].endswith("segments")


#: A table of rows and few layers: several processes take long to trace a model.
TEXT = (*WORDS, "model=text", "model.units=[8,8]", "model.dropout=0.2")
SHORT = ("training.max_steps=3", "training.steps_per_loop=1", "checkpoint=none")
SEVERAL = {"multi_worker": ("strategy=multi_worker",), "parameter_server": IN_SHARDS}


@pytest.mark.slow
@pytest.mark.parametrize("case", SEVERAL)
def test_losses_and_the_exported_model_are_the_same(tmp_path: Path, case: str) -> None:
    words = (*TEXT, *SHORT, *SEVERAL[case], "hardware.intra_op_threads=1")
    runs = run_each(tmp_path, {remat: (*words, f"hardware.remat={remat}") for remat in ("false", "true")})
    wanted, found = runs.values()
    assert len(wanted.losses) >= 3
    (ready,) = [event for event in Command(tmp_path / "true").events() if event["event"] == "ready"]
    assert ready["params"]["resolved.remat"] != "false"
    assert found.losses == pytest.approx(wanted.losses, abs=1e-5)
    assert far(found.weights, wanted.weights) < 1e-4


@pytest.mark.slow
def test_losses_and_metrics_of_fit_are_the_same(isolated: Isolated, plan: Make) -> None:
    words = (*TEXT, *SHORT, *MIRRORED, "training.engine=fit")
    wanted, found = isolated(train_all, [plan(*words, f"hardware.remat={remat}") for remat in ("false", "true")])
    assert {(1, "train/loss"), (3, "train/loss"), (3, "test/loss")} <= set(wanted)
    assert found == pytest.approx(wanted, abs=1e-5)


def resume(whole: Plan, parts: Sequence[Plan], folder: Path) -> tuple[Course, Course]:
    """How a run ends that is not stopped, and one of which each part but the last is stopped after a step."""
    wanted = course(whole, str(folder / "whole"))
    for number, part in enumerate(parts):
        stop_after = None if part is parts[-1] else 1
        found = course(part, str(folder / "parts"), stop_after=stop_after, goes_on=number > 0)
        assert found.stopped == (part is not parts[-1])
    return found, wanted


@pytest.mark.slow
def test_a_run_is_resumed_with_it_and_without_it(isolated: Isolated, plan: Make, tmp_path: Path) -> None:
    words = (*MLP, *ONE, "training.max_steps=4", "training.steps_per_loop=1", "hardware.deterministic=true")
    whole, *parts = (plan(*words, f"hardware.remat={remat}") for remat in ("false", "true", "false", "true"))
    found, wanted = isolated(resume, whole, parts, tmp_path)
    assert set(found.state) == set(wanted.state)
    for name, value in wanted.state.items():
        np.testing.assert_allclose(found.state[name], value, rtol=0, atol=SAME, err_msg=name)


# ---------------------------------------------------------------------------------------------
# Gradients, and what is kept
# ---------------------------------------------------------------------------------------------


def differences(names: Sequence[str], is_compiled: bool) -> list[float]:
    """By how much losses, outputs and gradients of models differ if every two calls are computed again."""
    import keras
    import tensorflow as tf

    from scaleflow.interfaces import Objective
    from scaleflow.strategy import segments
    from scaleflow.training.forward_backward import TapeForwardBackward, make_loss_step
    from tests.strategy import models

    def divide(calls: Any, sinks: set[int], source: int) -> list[Any]:
        return [segments.make_segment(calls, sinks, i, min(i + 2, len(calls)), True) for i in range(0, len(calls), 2)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "choose_segments", divide)
        step = make_loss_step(Objective(lambda t, o: tf.reduce_mean(tf.square(t - o), axis=1)))
        random = np.random.default_rng(0)
        inputs = tf.constant(random.integers(10, size=(8, 6)), tf.int32)
        batch = inputs, tf.constant(random.normal(size=(8, 3)), tf.float32)
        found = []
        for name in names:
            results = []
            for is_recomputed in (False, True):
                keras.backend.clear_session()
                keras.utils.set_random_seed(0)
                model = getattr(models, name)()
                if is_recomputed:
                    segments.recompute_segments(model)
                passes = TapeForwardBackward(model, step)
                backward = tf.function(passes.backward, autograph=False) if is_compiled else passes.backward
                results.append([*backward(batch, tf.fill([8], 0.1), 1, lambda x: x), passes.forward(inputs)])
                results[-1].append(sum(tf.reduce_sum(loss) for loss in model.losses) if not is_compiled else 0.0)
            flat = [[t for t in tf.nest.flatten(each) if t is not None] for each in results]
            found.append(far(*flat))
    return found


GRADIENTS = ("masked", "several_tensors", "shared", "skipped", "noisy", "recurrent")


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.slow
def test_gradients_are_those_of_a_plain_tape(isolated: Isolated, is_compiled: bool) -> None:
    for name, found in zip(GRADIENTS, isolated(differences, GRADIENTS, is_compiled), strict=True):
        assert found < 1e-6, name


def count_runs_and_kept_tensors() -> list[tuple[int, int, int]]:
    """How often a layer ran, how many of its inner tensors are alive before the backward pass, and how often after."""
    import keras
    import tensorflow as tf

    from scaleflow.strategy import recompute_layers

    made: list[Any] = []

    class Block(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

        def call(self, x: Any) -> Any:
            inner = tf.exp(x * self.scale)
            made.append(weakref.ref(inner))
            return tf.exp(inner)

    found = []
    for is_recomputed in (False, True):
        raw = keras.Input((4,))
        model = keras.Model(raw, keras.layers.Dense(1)(Block(name="block")(raw)))
        made.clear()
        if is_recomputed:
            recompute_layers([model.get_layer("block")], "hardware.remat=[block]", is_divided=False)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.zeros([2, 4]), training=True))
        gc.collect()
        runs, kept = len(made), sum(tensor() is not None for tensor in made)
        tape.gradient(loss, [v.value for v in model.trainable_variables])
        model(tf.zeros([2, 4]), training=False)
        found.append((runs, kept, len(made)))
    return found


def test_activations_are_not_kept_but_computed_again(isolated: Isolated) -> None:
    plain, again = isolated(count_runs_and_kept_tensors)
    assert plain == (1, 1, 2)
    assert again == (1, 0, 3)


# ---------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------


def capture() -> str:
    import keras
    import tensorflow as tf

    from scaleflow.strategy.segments import recompute

    dense = keras.layers.Dense(3)
    dense.build((None, 3))

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            hidden = 2.0 * x
            outputs, _ = recompute(lambda given: dense(given) + hidden, x, dense.trainable_variables, "block")
        return tape.gradient(outputs, x)

    try:
        step(tf.ones([2, 3]))
    except ConfigError as error:
        return str(error)
    return "computed"


def test_a_tensor_that_is_no_argument_is_refused(isolated: Isolated) -> None:
    message = isolated(capture)
    assert message.startswith("hardware.remat: block uses the tensor mul:0, which is not an argument of its call")


def looping(inputs: Inputs, outputs: Outputs, **unused: Any) -> Any:
    import keras

    from tests.strategy.models import NoiseInLoop

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    x = NoiseInLoop(name="layer")(keras.layers.Dense(8, name="first")(keras.layers.Flatten()(raw)))
    return keras.Model(raw, keras.layers.Dense(*outputs.shape, dtype="float32")(x))


def make_model(inputs: Inputs, outputs: Outputs, call: Callable[[Any, Any], Any]) -> Any:
    """A model with the layer `layer`, whose `call` is given."""
    import keras
    import tensorflow as tf

    class Layer(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

        def call(self, x: Any) -> Any:
            return call(self, x) * self.scale

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    first = keras.layers.Dense(8, name="first")
    x = first(keras.layers.Flatten()(raw))
    layer = Layer(name="layer")
    object.__setattr__(layer, "first", first)  # not tracked
    if call is count:
        layer.count = tf.Variable(0.0, trainable=False)
    return keras.Model(raw, keras.layers.Dense(*outputs.shape, dtype="float32")(layer(x)))


def draw(layer: Any, x: Any) -> Any:
    import tensorflow as tf

    return x + tf.random.normal([8])


def draw_in_loop(layer: Any, x: Any) -> Any:
    import tensorflow as tf

    return tf.map_fn(lambda row: row + tf.random.normal([8]), x)


def count(layer: Any, x: Any) -> Any:
    return x + layer.count


def borrow(layer: Any, x: Any) -> Any:
    return x + layer.first.kernel[0]


def drawing(inputs: Inputs, outputs: Outputs, **unused: Any) -> Any:
    return make_model(inputs, outputs, draw)


def drawing_in_loop(inputs: Inputs, outputs: Outputs, **unused: Any) -> Any:
    return make_model(inputs, outputs, draw_in_loop)


def adding(inputs: Inputs, outputs: Outputs, **unused: Any) -> Any:
    """A layer that is called twice and adds a loss each time."""
    import keras

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    twice = keras.layers.Dense(16, activation="tanh", activity_regularizer=keras.regularizers.L2(0.1))
    x = twice(twice(keras.layers.Dense(16)(keras.layers.Flatten()(raw))))
    return keras.Model(raw, keras.layers.Dense(*outputs.shape)(keras.layers.Dense(4, name="narrow")(x)))


def counting(inputs: Inputs, outputs: Outputs, **unused: Any) -> Any:
    return make_model(inputs, outputs, count)


def borrowing(inputs: Inputs, outputs: Outputs, **unused: Any) -> Any:
    return make_model(inputs, outputs, borrow)


def nesting(inputs: Inputs, outputs: Outputs, **unused: Any) -> Any:
    import keras

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    inner = keras.Sequential([keras.layers.Dense(8, name="a"), keras.layers.Dense(8, name="b")], name="inner")
    return keras.Model(raw, keras.layers.Dense(*outputs.shape, name="last")(inner(keras.layers.Flatten()(raw))))


def subclassed(inputs: Inputs, outputs: Outputs, **unused: Any) -> Any:
    import keras

    class Subclassed(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="mine")
            self.flat = keras.layers.Flatten()
            self.dense = keras.layers.Dense(*outputs.shape, name="dense")

        def call(self, x: Any) -> Any:
            return self.dense(self.flat(x))

    model = Subclassed()
    model(keras.Input(inputs.shape, dtype=inputs.dtype))
    return model
