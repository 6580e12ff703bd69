"""What a step does: every example counts once, in the update and in what is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import NotFinite
from scaleflow.interfaces import Arrays, Batching, Hardware, Inputs, Outputs, Stream
from tests.training.fake_engine import (
    Course,
    Parts,
    assemble,
    dense,
    far,
    ignore,
    on_each_replica,
    random_arrays,
    spread_over,
    take,
    train_epochs,
    weights,
)


def skipping(inputs: Inputs, outputs: Outputs) -> Any:
    """Convolution, bias and sum, four times: in a forward pass TensorFlow makes one kernel of each three."""
    import keras

    x = raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    for _ in range(4):
        x = x + keras.layers.Conv2D(8, 3, padding="same")(x)
    return keras.Model(raw, keras.layers.Dense(*outputs.shape)(keras.layers.GlobalAveragePooling2D()(x)))


def evaluated_often() -> tuple[set[float], list[bool]]:
    """The losses of evaluating the same 500 batches again and again, and whether batches overlap; also for an MLP."""
    from scaleflow.dataset.synthetic import Synthetic

    whole = Synthetic(2500, [8, 8, 8], "classification", 3).load("train")
    examples = Arrays(whole.inputs[:2000], whole.targets[:2000])
    parts = assemble(spread_over(1), examples, "classification", 3, skipping, batch_size=4)
    losses = {parts.loop.evaluate(parts.feed)["loss"] for _ in range(5)}
    mlp = assemble(spread_over(1), random_arrays(12), "classification", 3, dense, batch_size=4)
    mlp.loop.evaluate(mlp.feed)
    return losses, [each.loop._evaluation.overlaps for each in (parts, mlp)]


def test_no_kernel_evaluates_two_batches_at_once(isolated: Callable[..., Any]) -> None:
    """What oneDNN's convolution keeps in the kernel would be another batch's: a crash, a hang, or another loss."""
    losses, overlaps = isolated(evaluated_often)
    assert max(losses) - min(losses) < 1e-5
    assert overlaps == [False, True]


def as_stream(arrays: Arrays) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((arrays.inputs, arrays.targets))


def both_forms(count: int) -> tuple[Arrays, Stream]:
    arrays = random_arrays(count)
    return arrays, Stream(as_stream(arrays), count)


# Evaluation ----------------------------------------------------------------------------------


def evaluated(plan: Any) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """The digits' test split by the loop twice, and by numpy."""
    from scaleflow.dataset.digits import Digits
    from scaleflow.worker.build import build_training

    built = build_training(plan, ignore)
    built.engine.start_epoch()
    built.engine.train(built.feeds.train, built.feeds.train.open(0, 0), 0, 0, 10, 0)
    test = Digits().load("test")
    logits = np.asarray(built.engine.model(test.inputs, training=False), np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    chances = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    is_found = logits.argmax(axis=1) == test.targets
    wanted = {
        "loss": float(-chances[np.arange(len(test)), test.targets].mean()),
        "accuracy": float(is_found.mean()),
        "balanced_accuracy": float(np.mean([is_found[test.targets == each].mean() for each in range(10)])),
    }
    assert built.feeds.test is not None
    return dict(built.engine.evaluate(built.feeds.test)), dict(built.engine.evaluate(built.feeds.test)), wanted


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_digit_counts_once_in_an_evaluation(
    isolated: Callable[..., Any], plan: Callable[..., Any], replicas: int
) -> None:
    chosen = plan("hardware=cpu", f"hardware.logical_devices={replicas}", "tracking=none", "model.units=8")
    first, again, wanted = isolated(evaluated, chosen)
    assert first == pytest.approx(wanted, abs=1e-6)
    assert again == pytest.approx(wanted, abs=1e-6)
    assert first["accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-12)


# Updates -------------------------------------------------------------------------------------


def partial_batch(replicas: int, accumulate: int) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """SGD over 2 epochs of 29 examples in batches of 12 (12, 12, 5), by the loop and by hand: the weights, and the norm
    of the last gradients.
    """
    import keras
    import tensorflow as tf

    strategy = spread_over(replicas)
    arrays = random_arrays(29)
    size = 12 // replicas // accumulate
    parts = assemble(strategy, arrays, "classification", 3, dense, batch_size=size, accumulate=accumulate)
    twin = keras.models.clone_model(parts.loop.model)
    twin.set_weights(parts.loop.model.get_weights())
    train_epochs(parts, 2)
    for first in [0, 12, 24] * 2:
        with tf.GradientTape() as tape:
            outputs = twin(arrays.inputs[first : first + 12])
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(arrays.targets[first : first + 12], outputs)
            )
        variables = [v.value for v in twin.trainable_variables]
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
    norm = np.linalg.norm(np.concatenate([np.ravel(each) for each in gradients]))
    found = np.array([parts.loop.gradient_norm])
    return [*weights(parts.loop), found], [*(np.asarray(v) for v in twin.trainable_variables), norm[None]]


@pytest.mark.parametrize(("replicas", "accumulate"), [(1, 1), (2, 3)])
def test_an_update_is_the_mean_over_the_examples_that_are_there(
    isolated: Callable[..., Any], replicas: int, accumulate: int
) -> None:
    found, wanted = isolated(partial_batch, replicas, accumulate)
    assert far(found, wanted) < 1e-6


def measure_norms(plans: list[Any]) -> list[list[float]]:
    """The norms of the gradients of the first step, and of the last one of a longer call."""
    from scaleflow.worker.build import build_training

    found = []
    for plan in plans:
        built = build_training(plan, ignore)
        opened, norms = built.feeds.train.open(0, 0), []
        for first, steps in ((0, 1), (1, 4)):
            built.engine.train(built.feeds.train, opened, 0, first, steps, first)
            norms.append(built.engine.gradient_norm)
        found.append([*norms, built.engine.learning_rate])
    return found


def test_the_norm_is_that_before_clipping_without_the_loss_scale(
    isolated: Callable[..., Any], plan: Callable[..., Any]
) -> None:
    words = ("hardware=cpu", "optimizer=sgd", "optimizer.learning_rate=1e-9", "training.clip_norm=1e-3")
    rate = ("optimizer.schedule=linear", "optimizer.warmup_steps=10", "training.max_steps=100")
    cases = ["hardware.xla=true", "hardware.xla=false", "precision=mixed_float16"]
    xla, plain, scaled = isolated(measure_norms, [plan(*words, *rate, case) for case in cases])
    assert plain[0] > 0.1  # far above the clip
    assert xla == pytest.approx(plain, rel=1e-4)
    assert scaled == pytest.approx(plain, rel=2e-2)
    assert plain[2] == pytest.approx(0.5e-9)  # of the fifth of ten steps of warm-up


def traces(replicas: int) -> list[int]:
    """How often the step and the evaluation were traced together, fed from memory and from a stream."""
    from scaleflow import dataset

    strategy = spread_over(replicas)
    found = []
    for examples in both_forms(29):
        parts = assemble(strategy, examples, "classification", 3, dense, batch_size=2, accumulate=2 // replicas)
        feed, loop = parts.feed, parts.loop
        validation = dataset.make_feed(examples, Batching(2, 1, replicas), strategy, None)
        loop.trace(feed, validation)
        for epoch in range(3):
            opened, first = feed.open(epoch, 0), 0
            loop.start_epoch()
            for steps in (1, 3, 2, 2):
                loop.train(feed, opened, epoch, first, steps, epoch * 8 + first)
                first += steps
            assert first == feed.batching.steps(29)
            loop.evaluate(validation)
        found.append(loop.traces)
    return found


@pytest.mark.parametrize("replicas", [1, 2])
def test_nothing_is_traced_again_after_the_first_call(isolated: Callable[..., Any], replicas: int) -> None:
    assert isolated(traces, replicas) == [2, 2]


def stream_and_arrays(replicas: int, accumulate: int) -> list[tuple[Course, dict[str, float]]]:
    """The same run and evaluation, fed from memory and from a stream."""
    from scaleflow import dataset

    strategy = spread_over(replicas)
    found = []
    for examples in both_forms(29):
        parts = assemble(
            strategy, examples, "classification", 3, dense, batch_size=12 // replicas // accumulate,
            accumulate=accumulate,
        )  # fmt: skip
        whole = dataset.make_feed(examples, Batching(5, 1, replicas), strategy)
        found.append((take(parts.loop, parts.feed, 6), dict(parts.loop.evaluate(whole))))
    return found


@pytest.mark.parametrize(("replicas", "accumulate"), [(1, 3), (2, 2)])
def test_a_stream_trains_like_the_same_examples_in_memory(
    isolated: Callable[..., Any], replicas: int, accumulate: int
) -> None:
    (arrays, scores), (stream, stream_scores) = isolated(stream_and_arrays, replicas, accumulate)
    assert stream.losses == pytest.approx(arrays.losses, abs=1e-6)
    assert far(stream.weights, arrays.weights) < 1e-6
    assert stream_scores == pytest.approx(scores, abs=1e-6)


def promised(cases: list[tuple[int, int]]) -> list[str | None]:
    """Trains on streams of (true, promised) length in batches of 4; gives the errors."""
    strategy = spread_over(1)
    return [broken_promise(strategy, there, length) for there, length in cases]


def broken_promise(strategy: Any, there: int, length: int) -> str | None:
    from scaleflow.dataset import explain_read_error
    from scaleflow.dataset.batches.rows import to_rows

    stream = Stream(as_stream(random_arrays(there)), length)
    parts = assemble(strategy, stream, "classification", 3, dense, batch_size=4)
    try:
        train_epochs(parts, 1)
    except Exception as error:
        return str(explain_read_error(error, {"train": to_rows(stream)}))
    return None


def test_a_stream_shorter_than_promised_ends_the_run(isolated: Callable[..., Any]) -> None:
    cases = [(20, 26), (20, 24), (3, 8)]
    wanted = [f"the dataset yielded {there} examples, but its source promised {length}" for there, length in cases]
    assert isolated(promised, cases) == wanted


def test_rows_of_a_stream_beyond_its_promise_are_not_used(isolated: Callable[..., Any]) -> None:
    assert isolated(promised, [(30, 26), (28, 24)]) == [None, None]


# Not finite ----------------------------------------------------------------------------------


def not_finite(replicas: int, accumulates: list[int], calls: list[int]) -> list[int]:
    """Epoch 5 of 30 examples in batches of 8, of which example 21 is NaN: the step that is named."""
    strategy = spread_over(replicas)
    arrays = random_arrays(30)
    arrays.inputs[21] = np.nan
    found = []
    for accumulate in accumulates:
        for examples in (arrays, Stream(as_stream(arrays), 30)):
            size = 8 // replicas // accumulate
            parts = assemble(strategy, examples, "classification", 3, dense, batch_size=size, accumulate=accumulate)
            found.append(named_step(parts, calls))
    return found


def named_step(parts: Parts, calls: list[int]) -> int:
    parts.loop.start_epoch()
    opened, first = parts.feed.open(5, 0), 0
    try:
        for steps in calls:
            parts.loop.train(parts.feed, opened, 5, first, steps, 100 + first)
            first += steps
    except NotFinite as error:
        return error.step
    return 0


@pytest.mark.parametrize(("replicas", "accumulates", "calls"), [(1, [2], [4]), (2, [1], [1, 1, 1, 1])])
def test_a_loss_that_is_not_finite_is_named_by_its_step(
    isolated: Callable[..., Any], replicas: int, accumulates: list[int], calls: list[int]
) -> None:
    assert set(isolated(not_finite, replicas, accumulates, calls)) == {103}


def normalizing(inputs: Inputs, outputs: Outputs) -> Any:
    """Not defined at zero, which no example is."""
    import keras

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    unit = keras.layers.Lambda(lambda x: x / keras.ops.norm(x, axis=-1, keepdims=True))(raw)
    return keras.Model(raw, keras.layers.Dense(*outputs.shape, dtype="float32")(unit))


def padded() -> list[tuple[Course, dict[str, float]]]:
    strategy = spread_over(2)
    found = []
    for examples in both_forms(10):
        parts = assemble(strategy, examples, "classification", 3, normalizing, batch_size=4)
        found.append((take(parts.loop, parts.feed, 4), dict(parts.loop.evaluate(parts.feed))))
    return found


def test_padding_does_no_harm_to_a_model_that_cannot_take_zeros(isolated: Callable[..., Any]) -> None:
    for course, scores in isolated(padded):
        assert np.isfinite(course.losses).all()
        assert np.isfinite(scores["loss"])


# Models with something special ---------------------------------------------------------------


def regularized(inputs: Inputs, outputs: Outputs) -> Any:
    import keras

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    layer = keras.layers.Dense(*outputs.shape, kernel_regularizer=keras.regularizers.L2(0.3), dtype="float32")
    return keras.Model(raw, layer(raw))


def embedded(inputs: Inputs, outputs: Outputs) -> Any:
    """Its gradient is an IndexedSlices, in which the same row comes many times."""
    import keras

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(7, 4)(raw))
    return keras.Model(raw, keras.layers.Dense(*outputs.shape, dtype="float32")(x))


def partly_used(inputs: Inputs, outputs: Outputs) -> Any:
    """Has a weight that no output depends on."""
    import keras

    class Spare(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.spare = self.add_weight(shape=(3,), initializer="ones", name="spare")

        def call(self, x: Any) -> Any:
            return x

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    return keras.Model(raw, keras.layers.Dense(*outputs.shape, dtype="float32")(Spare()(raw)))


def add_square(x: Any) -> Any:
    """Applies a layer that adds a loss."""
    import keras

    class Adds(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
            return x

    return Adds()(x)


def active(inputs: Inputs, outputs: Outputs) -> Any:
    """Its layers add losses of their own, in the dtype that they compute with."""
    import keras

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    x = keras.layers.Dense(8, activity_regularizer=keras.regularizers.L2(0.1))(raw)
    return keras.Model(raw, keras.layers.Dense(*outputs.shape, dtype="float32")(add_square(x)))


def tokens(count: int) -> Arrays:
    random = np.random.default_rng(0)
    return Arrays(random.integers(7, size=(count, 5), dtype=np.int32), random.integers(3, size=count, dtype=np.int32))


#: Models and options that must train the same however the batch of 12 is divided.
SPECIAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "regularized": (regularized, {}),
    "regularized, float16": (regularized, {"policy": "mixed_float16"}),
    "embedded, clipped": (embedded, {"clip_norm": 0.05, "rate": 1.0}),
    "embedded, adam": (embedded, {"optimizer": "Adam", "rate": 0.01}),
    "embedded, float16": (embedded, {"policy": "mixed_float16"}),
    "partly used": (partly_used, {"optimizer": "AdamW"}),
    "active": (active, {}),
    "active, bfloat16": (active, {"policy": "mixed_bfloat16"}),
}


#: Strategy and accumulate, of which the first is what the others have to equal.
DIVISIONS = [("one_device", 1), ("one_device", 3), ("mirrored", 1), ("mirrored", 2)]


def special(name: str) -> list[Course]:
    """By division, on two devices."""
    from scaleflow import hardware, strategy

    devices = hardware.configure_devices(Hardware(name="cpu", logical_devices=2)).names
    strategies = {kind: strategy.create_strategy(kind, devices)[0] for kind in ("one_device", "mirrored")}
    factory, options = SPECIAL[name]
    examples = tokens(30) if factory is embedded else random_arrays(30)
    found = []
    for kind, accumulate in DIVISIONS:
        size = 12 // strategies[kind].num_replicas_in_sync // accumulate
        parts = assemble(
            *(strategies[kind], examples, "classification", 3, factory),
            batch_size=size,
            accumulate=accumulate,
            **options,
        )
        found.append(take(parts.loop, parts.feed, 7))
        for variable in on_each_replica(parts):
            for copy in variable:
                np.testing.assert_array_equal(copy, variable[0])
    return found


@pytest.mark.parametrize("name", SPECIAL)
def test_special_models_train_the_same_however_divided(isolated: Callable[..., Any], name: str) -> None:
    wanted, *courses = isolated(special, name)
    tolerance = 2e-3 if "float16" in name else 1e-5
    # What an activity regularizer adds is in the loss, in bfloat16, whose numbers have 8 bits.
    relative = 2**-8 if "bfloat16" in name else None
    for division, course in zip(DIVISIONS[1:], courses, strict=True):
        assert course.losses == pytest.approx(wanted.losses, abs=tolerance, rel=relative), division
        assert far(course.weights, wanted.weights) < tolerance, division


def decays() -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """One update of a regularized model: the weights before, after, and after without the regularizer."""
    strategy = spread_over(2)
    examples = random_arrays(12)
    found = []
    for factory in (regularized, plain):
        parts = assemble(strategy, examples, "classification", 3, factory, batch_size=2, accumulate=3)
        before = weights(parts.loop)
        train_epochs(parts, 1)
        found.append((before, weights(parts.loop)))
    return found[0][0], found[0][1], found[1][1]


def plain(inputs: Inputs, outputs: Outputs) -> Any:
    import keras

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    return keras.Model(raw, keras.layers.Dense(*outputs.shape, dtype="float32")(raw))


def test_a_regularization_loss_counts_once(isolated: Callable[..., Any]) -> None:
    (kernel, _), (regular, _), (free, _) = isolated(decays)
    np.testing.assert_allclose(free - regular, 0.1 * 2 * 0.3 * kernel, atol=1e-6)


def stateful(inputs: Inputs, outputs: Outputs) -> Any:
    import keras

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    x = keras.layers.BatchNormalization()(keras.layers.Dense(16, activation="relu")(raw))
    return keras.Model(raw, keras.layers.Dense(*outputs.shape, dtype="float32")(keras.layers.Dropout(0.3)(x)))


def state_moves(replicas: int) -> list[tuple[list[float], bool, bool]]:
    """With and without accumulation: the losses, and whether dropout's and BatchNorm's state moved."""
    strategy = spread_over(replicas)
    arrays = random_arrays(240, size=20)
    found = []
    for accumulate in (1, 3):
        size = 24 // replicas // accumulate
        parts = assemble(strategy, arrays, "classification", 3, stateful, batch_size=size, accumulate=accumulate)
        state = parts.loop.model.non_trainable_variables
        before = [np.asarray(v) for v in state]
        course = take(parts.loop, parts.feed, 40)
        moved = [not np.array_equal(np.asarray(v), b) for v, b in zip(state, before, strict=True)]
        is_seed = ["seed" in v.path for v in state]
        assert sum(is_seed) == 1
        norm_moved = all(m for m, seed in zip(moved, is_seed, strict=True) if not seed)
        found.append((course.losses, moved[is_seed.index(True)], norm_moved))
    return found


@pytest.mark.parametrize("replicas", [1, 2])
def test_models_with_dropout_and_batch_norm_train(isolated: Callable[..., Any], replicas: int) -> None:
    for losses, dropout_moved, norm_moved in isolated(state_moves, replicas):
        assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
        assert dropout_moved
        assert norm_moved


# BatchNormalization over all replicas, by micro-batches -------------------------------------------


def synchronized(inputs: Inputs, outputs: Outputs) -> Any:
    """BatchNormalization over all replicas, once in the model itself and once in a model inside it."""
    import keras

    def norm() -> Any:
        return keras.layers.BatchNormalization(synchronized=True, momentum=0.5)

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    active = {"activation": "tanh", "activity_regularizer": keras.regularizers.L2(0.3)}
    inner = keras.Sequential([keras.layers.Dense(8, **active), norm()])
    x = norm()(keras.layers.Dense(8, **active)(inner(raw)))
    return keras.Model(raw, keras.layers.Dense(*outputs.shape, dtype="float32")(x))


def normalized(replicas: int, places: list[int]) -> tuple[list[float], list[Any], float | None]:
    """Two epochs of the examples at `places`, in two micro-batches to each 12: losses, variables, operations."""
    whole = random_arrays(len(places))
    arrays = Arrays(whole.inputs[places], whole.targets[places])
    strategy = spread_over(replicas)
    size = 12 // replicas // 2
    parts = assemble(strategy, arrays, "classification", 3, synchronized, batch_size=size, accumulate=2)
    parts.loop.trace(parts.feed)
    course = take(parts.loop, parts.feed, 2 * len(places) // 12)
    return course.losses, [np.asarray(v) for v in parts.loop.model.variables], parts.loop.flops_per_example


def as_in_micro_batches(count: int) -> list[int]:
    """The places of examples, so that one device has in a micro-batch what two replicas have in theirs.

    Of 12 examples the first replica takes 0 to 5 and the second 6 to 11, in two micro-batches each.
    """
    batch = [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]
    return [first + place for first in range(0, count, 12) for place in batch]


def test_micro_batches_are_normalized_over_all_replicas(isolated: Callable[..., Any]) -> None:
    losses, found, operations = isolated(normalized, 2, list(range(36)))
    wanted_losses, wanted, wanted_operations = isolated(normalized, 1, as_in_micro_batches(36))
    assert losses == pytest.approx(wanted_losses, abs=1e-5)
    assert far(found, wanted) < 1e-5
    assert operations == wanted_operations


# Resources -----------------------------------------------------------------------------------


def growth(plan: Any) -> tuple[float, float]:
    """Resident memory after a warm-up, and 20,000 steps later, in MiB."""
    import gc

    import psutil

    from scaleflow.worker.build import build_training

    built = build_training(plan, ignore)
    process = psutil.Process()
    per_epoch, done, seen = built.feeds.train.batching.steps(built.feeds.train.examples), 0, []
    for until in (4000, 24_000):
        while done < until:
            built.engine.start_epoch()
            opened = built.feeds.train.open(done // per_epoch, 0)
            for first in range(0, per_epoch, 10):
                built.engine.train(
                    built.feeds.train, opened, done // per_epoch, first, min(10, per_epoch - first), done + first
                )
            done += per_epoch
        gc.collect()
        seen.append(process.memory_info().rss / 2**20)
    return seen[0], seen[1]


@pytest.mark.slow
def test_memory_does_not_grow(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    chosen = plan(
        "hardware=cpu", "strategy=one_device", "dataset=synthetic", "dataset.examples=1000", "dataset.shape=[4]",
        "model.units=4", "training.batch_size=8", "tracking=none",
    )  # fmt: skip
    before, after = isolated(growth, chosen)
    assert after < 1.05 * before
