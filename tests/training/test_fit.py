"""Keras's own `fit`: the same run as the loop's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import NotFinite
from scaleflow.interfaces import Examples, Inputs, Outputs, Stream
from tests.conftest import Command
from tests.launcher.test_supervisor import LongRun, only_run
from tests.training.fake_engine import (
    Parts,
    assemble,
    dense,
    far,
    ignore,
    make_session,
    random_arrays,
    run_apart,
    spread_over,
    to_pair,
    weights,
)
from tests.training.test_loop import active, embedded, regularized, tokens
from tests.training.test_session import Event, calls, epochs

BASE = ("hardware=cpu", "tracking=none", "training.global_batch_size=48", "training.epochs=2")
ONE = ("strategy=one_device",)
MIRRORED = ("strategy=mirrored", "hardware.logical_devices=2")
LOOP, FIT = "training.engine=loop", "training.engine=fit"

#: The digits' 1294 training examples make 27 steps of 48, the last one partial; 50 steps end in the second epoch.
MLP = ("model.units=16", "optimizer.schedule=cosine", "optimizer.warmup_steps=5", "training.max_steps=50")
CNN = ("model=cnn", "model.filters=[4]", "model.units=8", "optimizer=sgd", "dataset.limit=500", "training.epochs=4")


def trained(plan: Any, stop_after: int | None = None) -> tuple[list[Event], Any, list[np.ndarray[Any, Any]]]:
    """A run's events, how it went, and its last weights."""
    from scaleflow.worker.build import build_training

    events: list[Event] = []
    built = build_training(plan, ignore)
    result = make_session(
        plan,
        built,
        lambda event: events.append(to_pair(event)),
        should_stop=lambda: calls(events) + 1 == stop_after,
    ).run()
    return events, result, [np.asarray(v) for v in built.engine.model.trainable_variables]


#: What `fit` does not report.
NORM = "train/gradient_norm"


def trained_each(plans: Sequence[Any]) -> list[tuple[list[Event], Any, list[np.ndarray[Any, Any]]]]:
    return run_apart(trained, ((plan,) for plan in plans))


def values(events: list[Event]) -> dict[tuple[int, str], float]:
    """Every value by its step and name, but those that a clock gave."""
    return {
        (fields["step"], name): value
        for event, fields in events
        if event == "metrics"
        for name, value in fields["values"].items()
        if not name.startswith(("perf/", NORM))
    }


def shapes(events: list[Event]) -> list[tuple[str, int | None, list[str]]]:
    return [
        (event, fields.get("step"), [name for name in fields.get("values", ()) if name != NORM])
        for event, fields in events
    ]


@pytest.mark.parametrize(
    ("spread", "recipe"),
    [(ONE, MLP), (MIRRORED, MLP), (MIRRORED, CNN), (ONE, (*MLP, "precision=mixed_float16"))],
    ids=["one_device", "mirrored", "mirrored-cnn", "one_device-float16"],
)
def test_fit_trains_as_the_loop_does(
    isolated: Callable[..., Any], plan: Callable[..., Any], spread: tuple[str, ...], recipe: tuple[str, ...]
) -> None:
    chosen = (*BASE, *spread, *recipe, "hardware.logical_devices=2", "training.steps_per_loop=1")
    made = [plan(*chosen, engine) for engine in (FIT, LOOP)]
    (events, result, found), (wanted, wanted_result, wanted_weights) = isolated(trained_each, made)
    assert shapes(events) == shapes(wanted)
    assert values(events) == pytest.approx(values(wanted), abs=1e-5)
    assert far(found, wanted_weights) < 1e-4
    assert dataclasses.replace(result, test={}, train={}) == dataclasses.replace(wanted_result, test={}, train={})
    assert result.test == pytest.approx(wanted_result.test, abs=1e-5)
    assert result.train == pytest.approx({k: v for k, v in wanted_result.train.items() if k != NORM}, abs=1e-5)
    assert result.steps >= 40


@pytest.mark.slow
def test_several_steps_to_an_execution_change_nothing(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    chosen = (*BASE, *ONE, "model.units=16", FIT)
    made = [plan(*chosen, f"training.steps_per_loop={steps}") for steps in (9, "auto")]
    (nine, _, found), (one, _, wanted) = isolated(trained_each, made)
    assert calls(nine) == 6
    assert calls(one) == 54
    assert far(found, wanted) < 1e-6
    assert values(nine) == pytest.approx({at: v for at, v in values(one).items() if at in values(nine)}, abs=1e-6)


def test_fit_ends_when_it_is_told_to(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    events, result, _ = isolated(trained, plan(*BASE, *ONE, "model.units=4", FIT), 30)
    assert (result.steps, result.stopped, result.test) == (30, True, {})
    assert epochs(events) == [(1, 27)]


def test_fit_stops_early(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    chosen = plan(
        *BASE, *ONE, FIT, "training.epochs=9", "dataset.limit=100", "optimizer=sgd", "optimizer.learning_rate=1e-12",
        "training.early_stopping={monitor: val/accuracy, patience: 2}",
    )  # fmt: skip
    events, result, _ = isolated(trained, chosen)
    assert epochs(events) == [(1, 2), (2, 4), (3, 6)]
    assert result.steps == 6
    assert [fields["text"] for name, fields in events if name == "note"] == [
        "stopped early after epoch 3: val/accuracy has not improved for 2 epochs"
    ]


# Models and data with something special ------------------------------------------------------


class Straight:
    """A host that wants every step of some epochs, one to a call."""

    def __init__(self, epochs: int, steps_per_epoch: int) -> None:
        self.epochs = epochs
        self.steps_per_epoch = steps_per_epoch
        self.step = self.first = self.epoch = 0
        self.means: list[float] = []

    def begin_epoch(self, epoch: int) -> None:
        self.first, self.epoch = 0, epoch

    @property
    def steps_left(self) -> int:
        return self.steps_per_epoch - self.first

    def next_steps(self) -> int:
        return min(1, self.steps_per_epoch - self.first)

    def trace_call(self) -> contextlib.AbstractContextManager[bool]:
        return contextlib.nullcontext(False)

    def end_call(self, steps: int, means: Mapping[str, float], seconds: float, waited: float = 0.0) -> None:
        self.step += steps
        self.first += steps
        self.means.append(means["loss"])

    def end_epoch(self) -> bool:
        return True


def fit_of(parts: Parts, per_execution: int = 1) -> Any:
    """Keras's engine for the same model."""
    from scaleflow import training
    from scaleflow.optimizer import create_optimizer

    loop = parts.loop
    with parts.strategy.scope():
        optimizer = create_optimizer(type(loop.optimizer), 0.1, False, takes_summed=False)
        engine = training.FitEngine(
            strategy=parts.strategy, model=loop.model, trained=loop.model, optimizer=optimizer,
            objective=loop.objective, steps_per_execution=per_execution,
        )  # fmt: skip
    engine.trace(parts.feed)
    return engine


def words(count: int) -> Stream:
    import tensorflow as tf

    texts = [" ".join("abc"[i % 3] for i in range(n, n + n % 4 + 1)) for n in range(count)]
    return Stream(tf.data.Dataset.from_tensor_slices((texts, np.arange(count, dtype=np.int32) % 3)), count)


def reader(inputs: Inputs, outputs: Outputs) -> Any:
    """Takes text, of which there is no mean."""
    import keras

    raw = keras.Input((), dtype="string")
    x = keras.layers.TextVectorization(output_sequence_length=4, vocabulary=["a", "b", "c"])(raw)
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(7, 4)(x))
    return keras.Model(raw, keras.layers.Dense(*outputs.shape, dtype="float32")(x))


def special() -> dict[str, tuple[list[float], list[float], float]]:
    """On two replicas, by name: the loss of each step with `fit` and with the loop, and how far apart they end."""
    import tensorflow as tf

    strategy = spread_over(2)
    arrays = random_arrays(30)
    stream = Stream(tf.data.Dataset.from_tensor_slices((arrays.inputs, arrays.targets)), 30)
    cases: dict[str, tuple[Any, Examples, str, str]] = {
        "stream": (dense, stream, "SGD", "float32"),
        "regularized": (regularized, arrays, "SGD", "float32"),
        "active": (active, arrays, "SGD", "mixed_bfloat16"),
        "embedded": (embedded, tokens(30), "Adam", "float32"),
        "text": (reader, words(30), "SGD", "float32"),
    }
    found = {}
    for name, (factory, examples, optimizer, policy) in cases.items():
        parts = assemble(
            strategy, examples, "classification", 3, factory, batch_size=6, optimizer=optimizer, shuffle_seed=3,
            policy=policy,
        )  # fmt: skip
        before = parts.loop.model.get_weights()
        hosts = [Straight(3, 3), Straight(3, 3)]
        parts.loop.run(parts.feed, hosts[0])
        wanted = weights(parts.loop)
        parts.loop.model.set_weights(before)
        fit_of(parts).run(parts.feed, hosts[1])
        found[name] = hosts[1].means, hosts[0].means, far(weights(parts.loop), wanted)
    return found


@pytest.mark.slow
def test_fit_takes_what_the_loop_takes(isolated: Callable[..., Any]) -> None:
    for name, (means, wanted, distance) in isolated(special).items():
        assert means == pytest.approx(wanted, abs=1e-5), name
        assert distance < 1e-4, name
        assert len(means) == 9


def not_finite(per_executions: list[int]) -> list[int]:
    """Two epochs of 30 examples in batches of 8, of which the second is NaN in place 21: the step that is named."""
    strategy = spread_over(1)
    arrays = random_arrays(30)
    arrays.inputs[21] = np.nan
    found = []
    for per_execution in per_executions:
        parts = assemble(strategy, arrays, "classification", 3, dense, batch_size=8)
        engine = fit_of(parts, per_execution)
        try:
            engine.run(parts.feed, Straight(2, 4))
        except NotFinite as error:
            found.append(error.step)
    return found


def test_a_loss_that_is_not_finite_is_named_by_its_step(isolated: Callable[..., Any]) -> None:
    assert isolated(not_finite, [1, 4]) == [3, 3]


def restored_sums(replicas: int) -> list[float]:
    """The sums of an epoch that is resumed at sums of 1, after the second replica has added 1."""
    from scaleflow.training import state

    strategy = spread_over(replicas)
    parts = assemble(strategy, random_arrays(30), "classification", 3, dense, batch_size=4)
    engine = fit_of(parts)
    engine.run(parts.feed, Straight(1, 1))
    state_before = engine.read_state()
    ones = np.ones_like(state_before[state.SUMS])
    engine.restore({**state_before, state.SUMS: ones})
    engine.begin_sums()
    strategy.experimental_local_results(engine._sums.sums.value)[1].assign_add(ones)
    sums: list[float] = engine.read_state()[state.SUMS].tolist()
    return sums


@pytest.mark.slow
def test_the_sums_of_a_resumed_epoch_are_not_rounded_on_three_replicas(isolated: Callable[..., Any]) -> None:
    assert set(isolated(restored_sums, 3)) == {2.0}


# The command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_with_fit_is_recorded(command: Command) -> None:
    ended = command("training.engine=fit", "training.epochs=2", "hardware=cpu")
    assert ended.returncode == 0, ended.stderr
    run = only_run(command.folder)
    assert run.info.status == "FINISHED"
    assert len(run.outputs.model_outputs) == 1
    assert run.data.metrics["test/accuracy"] > 0.8
    assert {"train/loss", "val/accuracy", "perf/examples_per_second", "perf/seconds_to_first_step"} <= set(
        run.data.metrics
    )


@pytest.mark.slow
def test_a_run_with_fit_can_be_stopped(command: Command) -> None:
    long = LongRun(command, "training.engine=fit", "training.steps_per_loop=3", "hardware=cpu").until("epoch")
    long.launcher.terminate()
    assert long.end() == 143
    assert only_run(command.folder).info.status == "KILLED"
