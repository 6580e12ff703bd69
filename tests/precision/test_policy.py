from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from scaleflow.interfaces import Inputs, Outputs, Precision
from tests.training.fake_engine import assemble, dense, on_each_replica, random_arrays, spread_over, train_epochs


def resolved() -> dict[tuple[str, str], str]:
    from scaleflow.precision import resolve_policy

    names: tuple[Any, ...] = ("float32", "mixed", "mixed_float16", "mixed_bfloat16")
    return {(name, kind): resolve_policy(Precision(name), kind) for name in names for kind in ("CPU", "GPU")}


def test_mixed_is_bfloat16_on_a_cpu_and_float16_on_a_gpu(isolated: Callable[..., Any]) -> None:
    found = isolated(resolved)
    assert found.pop(("mixed", "CPU")) == "mixed_bfloat16"
    assert found.pop(("mixed", "GPU")) == "mixed_float16"
    assert all(name == policy for (name, _), policy in found.items())


def forgetful(inputs: Inputs, outputs: Outputs) -> Any:
    """A user's model whose output has the policy's dtype."""
    import keras

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    return keras.Model(raw, keras.layers.Dense(*outputs.shape)(keras.layers.Dense(8)(raw)))


def dtypes(policy: str) -> dict[str, Any]:
    import tensorflow as tf

    from scaleflow import model, precision
    from scaleflow.model.cnn import build as cnn
    from scaleflow.model.mlp import build as mlp

    precision.apply_policy(policy)
    inputs, outputs = Inputs((8, 8, 1), scale=1 / 16), Outputs("classification", (5,))
    batch = tf.zeros([2, 8, 8, 1])
    found: dict[str, Any] = {}
    for name, factory in (("cnn", cnn), ("mlp", mlp)):
        net = model.make_model(factory, inputs, outputs)
        variables = {v.dtype for v in net.variables}
        computes = {layer.compute_dtype for layer in net.layers if layer.name.startswith(("conv2d", "dense"))}
        found[name] = net(batch).dtype.name, variables, computes
    row = model.make_model(forgetful, Inputs((4,)), outputs)
    found["forgetful"] = row(tf.zeros([2, 4])).dtype.name, {v.dtype for v in row.variables}
    return found


def test_outputs_and_variables_are_float32_under_each_policy(isolated: Callable[..., Any]) -> None:
    for policy, compute in (("float32", "float32"), ("mixed_float16", "float16"), ("mixed_bfloat16", "bfloat16")):
        found = isolated(dtypes, policy)
        for name in ("cnn", "mlp"):
            assert found[name] == ("float32", {"float32"}, {compute}), (policy, name)
        assert found["forgetful"] == ("float32", {"float32"}), policy


def linear(inputs: Inputs, outputs: Outputs) -> Any:
    """Nothing in it saturates, so a large example has a large gradient."""
    import keras

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    return keras.Model(raw, keras.layers.Dense(*outputs.shape, dtype="float32")(keras.layers.Dense(8)(raw)))


def overflow(replicas: int) -> dict[str, Any]:
    """Trains where one example, on the last replica, is too large for a scaled float16 gradient."""
    strategy = spread_over(replicas)
    arrays = random_arrays(48)
    arrays.inputs[15] *= 1500  # in the first of three steps
    parts = assemble(
        strategy, arrays, "classification", 3, linear, batch_size=16 // replicas, policy="mixed_float16", rate=0.01
    )
    loop = parts.loop
    history = [(loop.loss_scale, on_each_replica(parts))]
    parts.loop.start_epoch()
    for step in range(3):
        loop.train(parts.feed, parts.feed.open(0, step), 0, step, 1, step)
        history.append((loop.loss_scale, on_each_replica(parts)))
    return {"history": history, "updates": int(np.asarray(loop.optimizer.iterations.numpy()))}


def test_a_step_that_overflows_on_one_replica_is_skipped_on_all(isolated: Callable[..., Any]) -> None:
    for replicas in (1, 2):
        found = isolated(overflow, replicas)
        scales = [scale for scale, _ in found["history"]]
        before, skipped, *_, last = (weights for _, weights in found["history"])
        assert scales == [scales[0], scales[0] / 2, scales[0] / 2, scales[0] / 2]
        for variable, kept, trained in zip(before, skipped, last, strict=True):
            assert len(variable) == replicas
            for replica in range(replicas):
                np.testing.assert_array_equal(kept[replica], variable[0])
                np.testing.assert_array_equal(trained[replica], trained[0])
            assert np.isfinite(trained[0]).all()
            assert not np.array_equal(trained[0], variable[0])


def bfloat16_trains() -> tuple[float | None, bool]:
    parts = assemble(
        spread_over(1), random_arrays(32), "classification", 3, dense, batch_size=16, policy="mixed_bfloat16"
    )
    before = [np.asarray(v) for v in parts.loop.model.trainable_variables]
    train_epochs(parts, 1)
    after = [np.asarray(v) for v in parts.loop.model.trainable_variables]
    return parts.loop.loss_scale, all(not np.array_equal(b, a) for b, a in zip(before, after, strict=True))


def test_bfloat16_needs_no_loss_scale(isolated: Callable[..., Any]) -> None:
    assert isolated(bfloat16_trains) == (None, True)
