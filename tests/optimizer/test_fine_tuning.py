"""Learning rates for parts of a model, and averaged weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Command
from tests.training.fake_engine import far, follow, ignore

#: 48 examples of a global batch; the last layer is called `outputs`, the others `dense` and `dense_1`.
BASE = ("hardware=cpu", "tracking=none", "training.global_batch_size=48", "model.units=[8, 6]", "dataset.limit=480")
ONE = "strategy=one_device"
SPREAD = {
    "mirrored": ("strategy=mirrored", "hardware.logical_devices=2", "training.accumulate=2"),
    "pipeline": ("strategy=pipeline", "hardware.logical_devices=2"),
}
RATES = "optimizer.rate_factors={*: 0.5, outputs: 2.0}"
STEPS = 6
EMA = "optimizer.ema=0.8"


def follow_averages(plan: Any) -> tuple[list[float], list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]], float]:
    """The losses and weights after each step, the exported weights after the last, and its validation loss."""
    from scaleflow.worker.build import build_training
    from tests.training.fake_engine import weights

    built = build_training(plan, ignore)
    engine, feed = built.engine, built.feeds.train
    losses, history = [], []
    engine.start_epoch()
    for step in range(STEPS):
        losses.append(engine.train(feed, feed.open(0, step), 0, step, 1, step)["loss"])
        history.append(np.concatenate([w.ravel() for w in weights(engine)]))
    before = weights(engine)
    validated = engine.evaluate(built.feeds.validation)["loss"]
    assert all((a == b).all() for a, b in zip(before, weights(engine), strict=True))
    engine.finish_model()
    return losses, history, weights(engine), validated


def follow_all_averages(plans: list[Any]) -> list[Any]:
    return [follow_averages(plan) for plan in plans]


def resume(plan: Any, steps: int = 6, state: str = "optimizer/average/") -> bool:
    """Whether a run that continues halfway from a saved state, which has such values, ends as one in one go does."""
    from scaleflow.worker.build import build_training

    whole, half, rest = (build_training(plan, ignore) for _ in range(3))
    for built, first, last in ((whole, 0, steps), (half, 0, steps // 2), (rest, steps // 2, steps)):
        if built is rest:
            rest.engine.restore(half.engine.read_state())
        built.engine.train(built.feeds.train, built.feeds.train.open(0, first), 0, first, last - first, first)
    wanted, found = whole.engine.read_state(), rest.engine.read_state()
    assert any(name.startswith(state) for name in wanted)
    return wanted.keys() == found.keys() and all((wanted[name] == found[name]).all() for name in wanted)


def take_one_step(plans: list[Any]) -> list[list[np.ndarray[Any, Any]]]:
    """The weights after the first step of each."""
    return [follow(plan, 1).weights for plan in plans]


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_rate_factors_are_those_of_runs_with_these_rates(
    isolated: Callable[..., Any], plan: Callable[..., Any], optimizer: str
) -> None:
    """After one step, each part is where a run with its rate would have it."""
    words = (*BASE, f"optimizer={optimizer}", "optimizer.learning_rate=0.04", "optimizer.schedule=cosine")
    rates = (0.02, 0.08)
    plans = [plan(*words, ONE, RATES), *(plan(*words, ONE, f"optimizer.learning_rate={rate}") for rate in rates)]
    found, *others = isolated(take_one_step, plans)
    for wanted, part in zip(others, (slice(0, 4), slice(4, 6)), strict=True):
        assert far(found[part], wanted[part]) < 1e-6
        other = slice(4, 6) if part.start == 0 else slice(0, 4)
        assert far(found[other], wanted[other]) > 1e-4


@pytest.mark.parametrize("spread", [*SPREAD, pytest.param("float16", marks=pytest.mark.slow)])
def test_rate_factors_and_averages_are_the_same_on_every_strategy(
    isolated: Callable[..., Any], plan: Callable[..., Any], spread: str
) -> None:
    words = (*BASE, "optimizer=adamw", RATES, EMA, *(("precision=mixed_float16",) if spread == "float16" else ()))
    others = SPREAD.get(spread, SPREAD["mirrored"])
    plans = [plan(*words, ONE, "hardware.logical_devices=2"), plan(*words, *others)]
    (losses, history, averages, validated), found = isolated(follow_all_averages, plans)
    tolerance = 5e-3 if spread == "float16" else 1e-5
    np.testing.assert_allclose(found[0], losses, rtol=0, atol=tolerance)
    assert far(found[1], history) < tolerance
    assert far(found[2], averages) < tolerance
    assert found[3] == pytest.approx(validated, abs=tolerance)


def test_the_average_is_that_of_its_formula(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    _, history, averages, _ = isolated(follow_averages, plan(*BASE, ONE, EMA))
    wanted = history[0]
    for weights in history[1:]:
        wanted = 0.8 * wanted + 0.2 * weights
    found = np.concatenate([part.ravel() for part in averages])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    assert np.abs(found - history[-1]).max() > 1e-4


@pytest.mark.parametrize("precision", ["float32", "mixed_float16"])
def test_averages_resume_bit_for_bit(isolated: Callable[..., Any], plan: Callable[..., Any], precision: str) -> None:
    assert isolated(resume, plan(*BASE, ONE, EMA, f"precision={precision}"))


def weights_of(model: Path) -> list[np.ndarray[Any, Any]]:
    import keras

    return [np.asarray(v) for v in keras.models.load_model(model / "model.keras").trainable_variables]


WHOLE = ("training.epochs=2", "checkpoint.export=best", "checkpoint.best={monitor: val/loss}", EMA, RATES)


SERVED = ("strategy=parameter_server", "cluster.workers=1", "strategy.partitioner.max_shards=2")
WAYS = (
    (ONE,),
    (*SERVED, "strategy.partitioner.min_shard_bytes=null"),
    ("strategy=mirrored", "hardware.logical_devices=2", "training.engine=fit"),
)


def weights_of_all(models: list[Path]) -> list[list[np.ndarray[Any, Any]]]:
    return [weights_of(model) for model in models]


@pytest.mark.slow
def test_a_whole_run_evaluates_and_exports_the_averages_of_one_device(
    tmp_path: Path, isolated: Callable[..., Any]
) -> None:
    """On parameter servers and with Keras's engine."""
    values, models = [], []
    for number, words in enumerate(WAYS):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = Command(folder)
        ended = command(*BASE, *WHOLE, *words)
        assert ended.returncode == 0, ended.stderr
        values.append({key: v for e in command.events() for key, v in e.get("values", {}).items()})
        models.append(command.run_folder() / "model")
    wanted, *others = isolated(weights_of_all, models)
    for found, found_values in zip(others, values[1:], strict=True):
        assert far(found, wanted) < 1e-4
        for name in ("train/loss", "val/loss", "test/loss"):
            assert found_values[name] == pytest.approx(values[0][name], abs=1e-5)


def build_constrained(inputs: Any, outputs: Any) -> Any:
    import keras

    raw = keras.Input(inputs.shape)
    hidden = keras.layers.Dense(6, kernel_constraint="non_neg", use_bias=False)(keras.layers.Flatten()(raw))
    unit = keras.layers.Dense(6, kernel_constraint="unit_norm", use_bias=False)(hidden)
    top = keras.layers.Dense(*outputs.shape, kernel_constraint=keras.constraints.MaxNorm(0.1), use_bias=False)
    return keras.Model(raw, top(unit))


def test_averaged_weights_meet_their_constraints(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    words = [word for word in BASE if not word.startswith("model.")]
    left_out = ("~model.units", "~model.dropout", "~model.batch_norm")
    target = "model._target_=tests.optimizer.test_fine_tuning.build_constrained"
    made = plan(*words, ONE, EMA, "optimizer=sgd", "optimizer.learning_rate=0.3", target, *left_out)
    _, history, averages, _ = isolated(follow_averages, made)
    mean = history[0]
    for weights in history[1:]:
        mean = 0.8 * mean + 0.2 * weights
    first, unit, top = averages
    expected = [part.reshape(w.shape) for part, w in zip(np.split(mean, split_points(averages)), averages, strict=True)]
    np.testing.assert_allclose(first, np.maximum(expected[0], 0), atol=1e-6)
    np.testing.assert_allclose(unit, expected[1] / np.linalg.norm(expected[1], axis=0), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=0), 1, atol=1e-5)
    assert first.min() >= 0
    assert np.linalg.norm(top, axis=0).max() <= 0.1 + 1e-6


def split_points(arrays: list[np.ndarray[Any, Any]]) -> list[int]:
    return [int(each) for each in np.cumsum([each.size for each in arrays])[:-1]]
