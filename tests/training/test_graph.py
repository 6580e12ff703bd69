"""State outside of the model: variables of a user's step and of layers, and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from tests.training.fake_engine import build_untested, run_apart, spread_over
from tests.training.interrupted import differences
from tests.training.test_callback_state import BASE

HIDDEN = "tests.training.hidden"
REPLICAS = ("strategy=mirrored", "hardware.logical_devices=2")
OWN = ("~model", f"+model={{_target_: {HIDDEN}.build, _partial_: true, place: PLACE}}")


def step(name: str) -> str:
    return f"training.step={{_target_: {HIDDEN}.{name}}}"


def test_a_resumed_step_goes_on_with_its_own_variables_and_generator(
    isolated: Callable[..., Any], plan: Callable[..., Any]
) -> None:
    assert isolated(differences, plan(*BASE, step("step"), "training.epochs=2"), [2])[0] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        (*REPLICAS, "model.dropout=0.5"),
        (*REPLICAS, "model.dropout=0.5", "training.accumulate=2", "training.clip_norm=0.1", "optimizer.ema=0.9"),
        ("training.engine=fit", "training.steps_per_loop=1", "model.dropout=0.5", "model.batch_norm=true"),
        (
            "hardware.xla=true",
            "model.dropout=0.5",
            "training.early_stopping={monitor: val/loss, mode: max, patience: 1}",
        ),
        ("model.dropout=0.5", "optimizer.schedule=cosine", "model.freeze={0: ['*', '!outputs'], 1: []}"),
    ],
)
def test_a_resumed_run_draws_what_a_whole_one_does(
    isolated: Callable[..., Any], plan: Callable[..., Any], words: tuple[str, ...]
) -> None:
    assert isolated(differences, plan(*BASE, *words), [2, 6])[0] == []


def refuse(plan: Any) -> str:
    try:
        build_untested(plan)
    except ConfigError as error:
        return str(error)
    return ""


def refuse_all(plans: list[Any]) -> list[str]:
    return run_apart(refuse, [(each,) for each in plans])


def test_hidden_state_that_cannot_be_kept_is_refused(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    base = [word for word in BASE if word != "model.units=4"]
    places = [plan(*base, *(word.replace("PLACE", place) for word in OWN)) for place in ("list", "generator", "object")]
    in_list, in_generator, in_object, random = isolated(refuse_all, [*places, plan(*BASE, step("step_of_tensorflow"))])
    start = "model: the layer scale has a tf.Variable in its attribute"
    assert in_list.startswith(f"{start} factors, which Keras does not track")
    assert in_generator.startswith(f"{start} random, which Keras does not track")
    assert in_object.startswith("model: it uses the variable hidden:0, which Keras does not track")
    assert random.startswith("the training step draws random numbers with TensorFlow (RandomStandardNormal)")


def draw_on_replicas(count: int) -> tuple[list[Any], list[Any], list[Any]]:
    """What each replica draws, twice, the states of the generator afterwards, and how often a trace captures it."""
    import keras
    import tensorflow as tf

    from scaleflow.training.graph import check_copies, draw_by_replica, list_captured

    draw_by_replica()
    strategy = spread_over(count)
    with strategy.scope():
        seed = keras.random.SeedGenerator(4)
    draws = [strategy.run(tf.function(lambda: keras.random.uniform((3,), seed=seed))) for _ in range(2)]
    each = zip(*(strategy.experimental_local_results(draw) for draw in draws), strict=True)
    states = strategy.experimental_local_results(seed.state.value)
    call = tf.function(lambda: strategy.run(lambda: keras.random.uniform((3,), seed=seed)))
    captured = list_captured(call.get_concrete_function().graph, {})
    if count > 1:
        check_copies(captured)  # accepts it: each replica has its copy
    pairs = [[draw.numpy().tolist() for draw in pair] for pair in each]
    return pairs, [state.numpy().tolist() for state in states], [each is seed.state.value for each in captured]


def test_each_replica_draws_its_own_and_the_first_what_one_device_does(isolated: Callable[..., Any]) -> None:
    (alone,), _, alone_captured = isolated(draw_on_replicas, 1)
    draws, states, captured = isolated(draw_on_replicas, 3)
    assert draws[0] == alone
    assert len({str(row) for pair in draws for row in pair}) == 6
    assert states == [[4, 2]] * 3
    assert captured == alone_captured == [True]
