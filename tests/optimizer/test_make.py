from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from scaleflow.errors import ConfigError


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
        "optimizer.clipvalue=2.0: use training.clip_norm, which is correct on every strategy",
        "optimizer.gradient_accumulation_steps=4: use training.accumulate, which is correct on every strategy",
        "optimizer.loss_scale_factor=128.0: use precision=mixed_float16, which is correct on every strategy",
        "optimizer: Adam has use_ema=True, and Keras's moving average of the weights would be neither evaluated nor "
        "saved; leave it out, and use optimizer.ema=0.99",
        "optimizer: the factory returned a float, expected a keras.optimizers.Optimizer",
    ]
