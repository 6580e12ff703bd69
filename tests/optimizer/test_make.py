from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Optimizer, Target


def made(arguments: dict[str, Any], loss_scaling: bool = False) -> str:
    """The class that was made, or the refusal."""
    import keras

    from scaleflow.optimizer import create_optimizer

    try:
        found = create_optimizer(
            lambda learning_rate: keras.optimizers.Adam(learning_rate, **arguments), 0.1, loss_scaling
        )
    except ConfigError as refusal:
        return str(refusal)
    inner = getattr(found, "inner_optimizer", None)
    return type(found).__name__ + (f" of {type(inner).__name__}" if inner is not None else "")


def all_made() -> list[str]:
    from scaleflow.optimizer import create_optimizer

    found = [
        made({}),
        made({}, loss_scaling=True),
        made({"clipnorm": 1.0}),
        made({"global_clipnorm": 0.5}),
        made({"clipvalue": 2.0}),
        made({"gradient_accumulation_steps": 4}),
        made({"loss_scale_factor": 128.0}),
        made({"use_ema": True}),
    ]
    try:
        create_optimizer(lambda learning_rate: learning_rate, 0.1, loss_scaling=False)
    except ConfigError as refusal:
        found.append(str(refusal))
    return found


def wrong_momentum() -> str:
    import keras

    from scaleflow.optimizer import create_optimizer

    try:
        create_optimizer(functools.partial(keras.optimizers.SGD, momentum=2.0), 0.1, loss_scaling=False)
    except ConfigError as refusal:
        return str(refusal)
    return "made"


def texts() -> list[str]:
    """The refusals of text for a number with a default, and for one whose default is null."""
    import keras

    from scaleflow.optimizer import create_optimizer

    found = []
    for words in ({"epsilon": "small"}, {"weight_decay": "little"}):
        with pytest.raises(ConfigError) as refusal:
            create_optimizer(functools.partial(keras.optimizers.Adam, **words), 0.1, loss_scaling=False)
        found.append(str(refusal.value))
    return found


def test_text_for_a_number_is_refused_by_its_key(isolated: Callable[..., Any]) -> None:
    assert isolated(texts) == [
        "optimizer.epsilon=small: expected a number",
        "optimizer.weight_decay=little: expected a number",
    ]


def test_a_value_that_keras_does_not_take_is_refused_by_its_key(isolated: Callable[..., Any]) -> None:
    assert isolated(wrong_momentum) == "optimizer.momentum=2.0: `momentum` must be a float between [0, 1]."


def test_keras_is_refused_the_work_of_the_loop(isolated: Callable[..., Any]) -> None:
    assert isolated(all_made) == [
        "Adam",
        "LossScaleOptimizer of Adam",
        "optimizer.clipnorm=1.0: use training.clip_norm, which is correct on every strategy",
        "optimizer.global_clipnorm=0.5: use training.clip_norm, which is correct on every strategy",
        "optimizer.clipvalue=2.0: use optimizer.clip_value, which is correct on every strategy",
        "optimizer.gradient_accumulation_steps=4: use training.accumulate, which is correct on every strategy",
        "optimizer.loss_scale_factor=128.0: use precision=mixed_float16, which is correct on every strategy",
        "optimizer: Adam has use_ema=True, and Keras's moving average of the weights would be neither evaluated nor "
        "saved; leave it out, and use optimizer.ema=0.99",
        "optimizer: the factory returned a float, expected a keras.optimizers.Optimizer",
    ]


NOWHERE = Target("optimizer", "nowhere")


def rates(cases: list[tuple[dict[str, Any], int, int, list[int]]]) -> list[Any]:
    """Of each case the rate at some steps, by TensorFlow and then without it: options, global batch, total steps, the
    steps.
    """
    import tensorflow as tf

    from scaleflow.optimizer import make_learning_rate

    return [
        [rate if isinstance(rate, float) else float(rate(form(step))) for form in (tf.constant, int) for step in steps]
        for options, size, total, steps in cases
        for rate in [make_learning_rate(Optimizer(NOWHERE, **options), size, total)]
    ]


def cosine(progress: float, final: float = 0.0) -> float:
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def test_schedules_follow_their_formulas(isolated: Callable[..., Any]) -> None:
    cases: list[tuple[dict[str, Any], list[int], list[float]]] = [
        ({}, [0, 99], [0.2, 0.2]),
        ({"warmup_steps": 4}, [0, 1, 3, 4, 99], [0.05, 0.1, 0.2, 0.2, 0.2]),
        ({"schedule": "cosine"}, [0, 25, 50, 100, 150], [0.2, 0.2 * cosine(0.25), 0.1, 0.0, 0.0]),
        ({"schedule": "cosine", "final_rate": 0.1}, [50, 100], [0.2 * cosine(0.5, 0.1), 0.02]),
        (
            {"schedule": "cosine", "warmup_steps": 20},
            [0, 19, 20, 60, 80, 100],
            [0.01, 0.2, 0.2, 0.1, 0.2 * cosine(0.75), 0.0],
        ),
        ({"schedule": "step", "step_every": 30}, [0, 29, 30, 59, 60], [0.2, 0.2, 0.02, 0.02, 0.002]),
        (
            {"schedule": "step", "step_every": 10, "step_factor": 0.5, "warmup_steps": 20},
            [9, 10, 25],
            [0.1, 0.2 * 0.5 * 11 / 20, 0.05],
        ),
        ({"schedule": "linear", "final_rate": 0.1}, [0, 50, 100, 150], [0.2, 0.11, 0.02, 0.02]),
        ({"schedule": "linear", "warmup_steps": 0.2}, [0, 19, 20, 60, 100], [0.01, 0.2, 0.2, 0.1, 0.0]),
        ({"schedule": "polynomial"}, [0, 50, 100], [0.2, 0.05, 0.0]),
        ({"schedule": "polynomial", "power": 0.5, "final_rate": 0.5}, [75], [0.2 * (0.5 + 0.5 * 0.5)]),
        ({"schedule": "exponential", "final_rate": 0.01}, [0, 50, 100], [0.2, 0.02, 0.002]),
        (
            {"schedule": "cosine_restarts", "step_every": 10},
            [0, 5, 10, 15, 99],
            [0.2, 0.1, 0.2, 0.1, 0.2 * cosine(0.9)],
        ),
        ({"schedule": "one_cycle"}, [0, 15, 30, 65, 100], [0.008, 0.2 * 0.52, 0.2, 0.1, 0.0]),
        ({"schedule": "one_cycle", "warmup_steps": 10, "final_rate": 0.1}, [10, 55, 100], [0.2, 0.11, 0.02]),
    ]
    found = isolated(rates, [({"learning_rate": 0.2, **options}, 32, 100, steps) for options, steps, _ in cases])
    for (options, _, wanted), values in zip(cases, found, strict=True):
        assert values == pytest.approx([*wanted, *wanted], rel=1e-5, abs=1e-8), options


def follow_given() -> tuple[list[float], str]:
    """The rates of a schedule of Keras's with a warm-up, and the refusal of something else."""
    import keras

    from scaleflow.optimizer import make_learning_rate

    options = Optimizer(NOWHERE, learning_rate=7.0, schedule=NOWHERE, warmup_steps=4, scale="linear", base_batch_size=8)
    given = functools.partial(keras.optimizers.schedules.PiecewiseConstantDecay, [5], [0.5, 0.25])
    made = make_learning_rate(options, 16, 100, given)
    assert not isinstance(made, float)
    with pytest.raises(ConfigError) as refusal:
        make_learning_rate(options, 16, 100, list)
    return [float(made(step)) for step in (0, 3, 5, 6)], str(refusal.value)


def test_a_schedule_of_keras_is_scaled_and_warmed_up(isolated: Callable[..., Any]) -> None:
    found, refused = isolated(follow_given)
    assert found == pytest.approx([0.25, 1.0, 1.0, 0.5])
    assert "optimizer.schedule: it made a list, expected a keras.optimizers.schedules.LearningRateSchedule" in refused


def test_the_rate_scales_with_the_global_batch(isolated: Callable[..., Any]) -> None:
    options = {"learning_rate": 0.1, "base_batch_size": 64}
    none, linear, root, smaller, warm = isolated(
        rates,
        [
            (options, 256, 10, [0]),
            ({**options, "scale": "linear"}, 256, 10, [0]),
            ({**options, "scale": "sqrt"}, 256, 10, [0]),
            ({**options, "scale": "linear"}, 32, 10, [0]),
            ({**options, "scale": "linear", "warmup_steps": 2}, 256, 10, [0, 1]),
        ],
    )
    assert (none, linear, root, smaller) == ([0.1] * 2, [0.4] * 2, [0.2] * 2, [0.05] * 2)
    assert warm == pytest.approx([0.2, 0.4] * 2)


def applied(plan: Any) -> tuple[float, list[float]]:
    """The resolved rate, and the rate that each of three updates was made with, seen on the bias."""
    from scaleflow.worker.build import build_training
    from tests.training.fake_engine import ignore

    built = build_training(plan, ignore)
    rate = built.engine.optimizer.learning_rate
    seen = []
    for step in range(3):
        seen.append(float(built.engine.optimizer._get_current_learning_rate()))
        built.engine.start_epoch()
        built.engine.train(built.feeds.train, built.feeds.train.open(step, 0), step, 0, 1, step)
    assert rate is not None
    return built.facts.resolved["learning_rate"], seen


def test_the_built_optimizer_takes_the_schedule(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    chosen = plan(
        "hardware=cpu", "hardware.logical_devices=2", "training.batch_size=16", "training.accumulate=4",
        "optimizer=sgd", "optimizer.learning_rate=0.1", "optimizer.scale=linear", "optimizer.base_batch_size=64",
        "optimizer.warmup_steps=2", "tracking=none",
    )  # fmt: skip
    resolved, seen = isolated(applied, chosen)
    assert resolved == pytest.approx(0.2)
    assert seen == pytest.approx([0.1, 0.2, 0.2])


def doubts() -> list[str | None]:
    from scaleflow.optimizer import find_warm_up_warning

    return [find_warm_up_warning(Optimizer(NOWHERE, warmup_steps=steps), 10) for steps in (0, 9, 10)]


def test_a_warm_up_as_long_as_the_run_is_pointed_out(isolated: Callable[..., Any]) -> None:
    none, shorter, longer = isolated(doubts)
    assert none is shorter is None
    assert "optimizer.warmup_steps=10: the run has only 10 steps" in longer
