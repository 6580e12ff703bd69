"""A model's graph, where it is cut, and what the way through its stages gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Hardware, Objective, Strategy

#: Blocks, groups, and the largest group.
BALANCED = [
    ([1, 1], 2, 1),
    ([5, 1, 1, 1, 1], 2, 5),
    ([1, 1, 1, 1, 5], 2, 5),
    ([3, 3, 3, 3, 3, 3], 3, 6),
    ([1, 9, 1, 1, 9, 1], 3, 10),
    ([2, 2, 2], 3, 2),
    ([1] * 200, 8, 25),
]


def largest(cases: Sequence[tuple[list[int], int, int]]) -> list[int]:
    from scaleflow.strategy.model_stages import balance_blocks

    found = []
    for blocks, count, _ in cases:
        starts = balance_blocks(blocks, count)
        groups = [sum(blocks[a:b]) for a, b in itertools.pairwise((0, *starts, len(blocks)))]
        assert len(groups) == count
        assert all(groups)
        found.append(max(groups))
    return found


def test_the_largest_group_is_as_small_as_can_be(isolated: Callable[..., Any]) -> None:
    assert isolated(largest, BALANCED) == [case[2] for case in BALANCED]


#: model, stages, cuts, and the layers of each stage.
#: `broad` has its parameters at the end and its operations at the start.
DIVIDED: list[tuple[str, int, list[str] | None, list[str]]] = [
    ("chain", 2, None, ["flat to t1", "d2 to last"]),
    ("chain", 3, None, ["flat to t0", "d1 to t1", "d2 to last"]),
    ("chain", 4, None, ["flat to t0", "d1 to t1", "d2 to t2", "last"]),
    ("chain", 2, ["t2"], ["flat to d2", "t2 to last"]),
    ("chain", 3, ["d1", "d2"], ["flat to t0", "d1 to t1", "d2 to last"]),
    ("nested", 2, ["between"], ["chain/flat to chain/last", "between to second/last"]),
    ("nested", 2, ["second/d1"], ["chain/flat to second/t0", "second/d1 to second/last"]),
    ("nested", 2, ["second"], ["chain/flat to between", "second/flat to second/last"]),
    ("shared", 2, ["last"], ["cast to inner/b", "last"]),
    ("shared", 2, None, ["cast to first", "twice to last"]),
    ("broad", 2, None, ["grid to c1", "c2 to last"]),
]


def divisions(asked: Sequence[tuple[str, int, list[str] | None]]) -> list[list[str] | str]:
    """In a child: the stages of each, or why it is refused."""
    import keras

    from scaleflow.errors import ConfigError
    from scaleflow.strategy.model_stages import build_graph, divide_graph
    from tests.strategy import models

    found: list[list[str] | str] = []
    for name, count, cuts in asked:
        keras.backend.clear_session()
        try:
            found.append([str(stage) for stage in divide_graph(build_graph(getattr(models, name)()), count, cuts, 8)])
        except ConfigError as refusal:
            found.append(str(refusal))
    return found


def test_a_model_is_divided_by_cost_or_before_the_layers_named(isolated: Callable[..., Any]) -> None:
    found = isolated(divisions, [case[:3] for case in DIVIDED])
    assert found == [case[3] for case in DIVIDED]


REFUSED: list[tuple[str, int, list[str] | None, list[str]]] = [
    ("subclassed", 2, None, ["strategy=pipeline", "mine (Subclassed)", "keras.Sequential"]),
    ("chain", 5, None, ["strategy.stages=5", "4 stages at most", "use strategy.stages=4"]),
    ("shared", 4, None, ["strategy.stages=4", "3 stages at most", "inner/a, inner/b, twice", "strategy.stages=3"]),
    ("shared", 2, ["inner"], ["strategy.cuts=[inner]", "cut before inner", "the calls of twice", "before the first"]),
    ("chain", 2, ["d9"], ["strategy.cuts=[d9]", "no layer d9", "flat, d0, t0"]),
    ("chain", 2, ["flat"], ["strategy.cuts=[flat]", "no layer between flat and", "d0, t0"]),
    ("chain", 3, ["d2", "d1"], ["strategy.cuts=[d2, d1]", "no layer between d1 and", "in the order"]),
    ("chain", 3, ["d2", "d2"], ["strategy.cuts=[d2, d2]", "no layer between d2 and"]),
    ("nested", 2, ["d1"], ["strategy.cuts=[d1]", "chain/d1 or second/d1"]),
]


def test_models_that_cannot_be_cut_are_refused_by_name(isolated: Callable[..., Any]) -> None:
    for message, case in zip(isolated(divisions, [case[:3] for case in REFUSED]), REFUSED, strict=True):
        assert isinstance(message, str), (case, message)
        assert len(message.splitlines()) == 1
        for part in case[3]:
            assert part in message, (case, message)


def far(found: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest value where that is above 1."""
    return float(np.max(np.abs(found - wanted)) / max(1.0, np.max(np.abs(wanted))))


def differences(
    cases: Sequence[tuple[str, int, list[str] | None, int, int]],
) -> list[tuple[float, float, float, float]]:
    """In a child with 6 devices: how far loss, outputs, gradients and evaluation are from those of one tape."""
    import keras
    import tensorflow as tf

    from scaleflow import hardware, strategy
    from scaleflow.training.forward_backward import TapeForwardBackward, make_loss_step
    from tests.strategy import models

    devices = hardware.configure_devices(Hardware(name="cpu", logical_devices=6)).names
    objective = Objective(lambda t, o: tf.reduce_mean(tf.square(t - o), axis=1))
    random = np.random.default_rng(0)
    inputs = tf.constant(random.integers(10, size=(8, 6)), tf.int32)
    batch = inputs, tf.constant(random.normal(size=(8, 3)), tf.float32)
    weights = tf.constant([0.1] * 7 + [0.0])
    found = []
    for name, count, cuts, micro_batches, replicas in cases:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        model = getattr(models, name)()
        whole = TapeForwardBackward(model, make_loss_step(objective))
        options = Strategy("pipeline", stages=count, replicas=replicas, micro_batches=micro_batches, cuts=cuts)
        wanted = (*whole.backward(batch, weights, 1, lambda x: x), whole.forward(inputs))
        passes, _ = strategy.divide_model(model, objective, devices[: count * replicas], options, 8)
        got = (*passes.backward(batch, weights, 1, lambda x: x), passes.forward(inputs))
        assert [g is None for g in got[3]] == [g is None for g in wanted[3]]
        for gradient, place in zip(got[3], passes.devices, strict=True):
            assert gradient is None or place in gradient.device
        gradients = max(far(g, w) for g, w in zip(got[3], wanted[3], strict=True) if g is not None)
        losses = max(far(got[0], wanted[0]), 0.0 if wanted[1] is None else far(got[1], wanted[1]))
        assert (got[1] is None) == (wanted[1] is None)
        found.append((losses, far(got[2], wanted[2]), gradients, far(got[4], wanted[4])))
    return found


GRADIENTS = [
    ("masked", 3, None, 1, 1),
    ("masked", 2, ["last"], 4, 1),
    ("masked", 2, None, 2, 2),
    ("several_tensors", 3, None, 1, 1),
    ("several_tensors", 3, None, 2, 2),
    ("several_tensors", 2, ["joined"], 4, 1),
    ("shared", 3, None, 1, 1),
    ("shared", 2, None, 1, 2),
    ("skipped", 3, None, 1, 1),
    ("skipped", 2, ["identity_1"], 2, 2),
]


def test_the_way_through_the_stages_gives_what_one_tape_gives(isolated: Callable[..., Any]) -> None:
    for case, found in zip(GRADIENTS, isolated(differences, GRADIENTS), strict=True):
        assert max(found) < 1e-5, (case, found)


def draw_noise(loops: bool, divisions: Sequence[tuple[int, int, bool]]) -> list[tuple[list[float], list[Any], int]]:
    """In a child with 4 devices: the losses of two batches, their gradients and all variables afterwards; and how many
    products of the second replica wait for one of the first.
    """
    import keras
    import tensorflow as tf

    from scaleflow import hardware, strategy
    from tests.strategy import models

    devices = hardware.configure_devices(Hardware(name="cpu", logical_devices=4)).names
    objective = Objective(lambda t, o: tf.reduce_mean(tf.square(t - o), axis=1))
    random = np.random.default_rng(0)
    inputs = tf.constant(random.integers(10, size=(8, 6)), tf.int32)
    batch = inputs, tf.constant(random.normal(size=(8, 3)), tf.float32)
    found = []
    for replicas, micro_batches, is_recomputed in divisions:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        model = models.noisy(loops)
        options = Strategy("pipeline", replicas=replicas, micro_batches=micro_batches)
        passes, _ = strategy.divide_model(model, objective, devices[: 2 * replicas], options, 8, is_recomputed)
        take = tf.function(lambda passes=passes: passes.backward(batch, tf.fill([8], 0.1), 1, lambda x: x))
        losses, arrays = [], []
        for _ in range(2):
            loss, _, _, gradients = take()
            losses.append(float(loss))
            arrays += [gradient.numpy() for gradient in gradients]
        products = [op for op in take.get_concrete_function().graph.get_operations() if op.type == "MatMul"]
        first, second = ([op for op in products if op.device[-1] in of] for of in ("01", "23"))
        assert len(first) + len(second) == len(products)
        assert len(second) == (replicas - 1) * len(first)
        waiting = sum(any(op in first for op in list_ancestors(product)) for product in second)
        found.append((losses, [*arrays, *(np.asarray(variable) for variable in model.variables)], waiting))
    return found


def refuse_replicas() -> str:
    import tensorflow as tf

    from scaleflow import hardware, strategy
    from scaleflow.errors import ConfigError
    from tests.strategy import models

    devices = hardware.configure_devices(Hardware(name="cpu", logical_devices=4)).names
    objective = Objective(lambda t, o: tf.reduce_mean(tf.square(t - o), axis=1))
    passes, _ = strategy.divide_model(
        models.clipped(), objective, devices, Strategy("pipeline", replicas=2, micro_batches=1), 8
    )
    batch = tf.zeros([8, 6], tf.int32), tf.zeros([8, 3])
    try:
        run = tf.function(lambda: passes.backward(batch, tf.ones([8]), 1, lambda x: x), autograph=False)
        run.get_concrete_function()
    except ConfigError as refusal:
        return str(refusal)
    return ""


def test_weights_that_the_forward_pass_changes_are_refused_with_replicas(isolated: Callable[..., Any]) -> None:
    assert isolated(refuse_replicas).startswith(
        "strategy.replicas: the model changes its trained weights clipped/kernel in its forward pass"
    )


def list_ancestors(operation: Any) -> set[Any]:
    """The operations that have to run before one."""
    found: set[Any] = set()
    pending = [operation]
    while pending:
        each = pending.pop()
        new = {*(tensor.op for tensor in each.inputs), *each.control_inputs} - found
        found |= new
        pending += new
    return found


@pytest.mark.slow
@pytest.mark.parametrize("loops", [True, False])
def test_replicas_draw_and_keep_states_as_more_micro_batches_of_one_replica_do(
    isolated: Callable[..., Any], loops: bool
) -> None:
    (wanted, arrays, _), *others = isolated(draw_noise, loops, [(1, 4, False), (2, 2, False), (2, 2, not loops)])
    assert wanted[0] != wanted[1]  # each batch draws other masks
    for losses, found, waiting in others:
        np.testing.assert_allclose(losses, wanted, rtol=0, atol=1e-6)
        for each, other in zip(found, arrays, strict=True):
            np.testing.assert_allclose(each, other, rtol=0, atol=1e-5)
        assert loops or waiting == 0  # a loop reads the states that the one before has left
