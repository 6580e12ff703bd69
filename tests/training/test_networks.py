"""The networks for images and text train, on several devices as on one, in mixed precision and in stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Arrays, Hardware, Inputs
from tests.training.fake_engine import Course, assemble, far, follow_each, take
from tests.training.words import Words

STEPS = 12
IMAGES = Inputs((8, 8, 1))


def images() -> Arrays:
    """Bars, lying or standing, in noise."""
    random = np.random.default_rng(0)
    stands = random.integers(2, size=64)
    pictures = 0.1 * random.standard_normal((64, 8, 8, 1))
    pictures[stands == 1, :, 3:5] += 1
    pictures[stands == 0, 3:5] += 1
    return Arrays(pictures.astype(np.float32), stands.astype(np.int32))


def followed(strategies: Sequence[str], policy: str) -> list[Mapping[str, Course]]:
    """Each network's way under each strategy, one after the other."""
    from scaleflow import hardware, strategy

    devices = hardware.configure_devices(Hardware(name="cpu", logical_devices=2)).names
    return [follow_networks(strategy.create_strategy(name, devices)[0], policy) for name in strategies]


def follow_networks(strategy: Any, policy: str) -> Mapping[str, Course]:
    from scaleflow.model import linear, resnet, text, transformer

    words = Words().load("train")
    cases: dict[str, Any] = {
        "resnet": (images(), "classification", 2, resnet.build, IMAGES, "SGD", 0.02),
        "linear": (images(), "classification", 2, linear.build, IMAGES, "SGD", 0.02),
        "text": (words, "binary", 1, text.build, Words.inputs, "Adam", 0.1),
        "transformer": (
            *(words, "binary", 1, lambda i, o: transformer.build(i, o, 16, 2, 1, 16), Words.inputs),
            *("Adam", 0.01),
        ),
    }
    found = {}
    for name, (examples, kind, outputs, factory, inputs, optimizer, rate) in cases.items():
        parts = assemble(
            *(strategy, examples, kind, outputs, factory),
            batch_size=16 // strategy.num_replicas_in_sync,
            optimizer=optimizer,
            rate=rate,
            policy=policy,
            inputs=inputs,
        )
        found[name] = take(parts.loop, parts.feed, STEPS)
    return found


@pytest.mark.slow
def test_each_network_learns_and_does_on_two_devices_what_it_does_on_one(isolated: Callable[..., Any]) -> None:
    one, two = isolated(followed, ["one_device", "mirrored"], "float32")
    for name in one:
        assert np.mean(one[name].losses[-3:]) < 0.8 * np.mean(one[name].losses[:2]), name
        np.testing.assert_allclose(two[name].losses, one[name].losses, rtol=0, atol=1e-4, err_msg=name)
        if name in ("resnet", "linear"):  # Adam makes steps of what is only rounding: the bias of attention's keys
            assert far(two[name].weights, one[name].weights) < 1e-4, name


@pytest.mark.slow
def test_each_network_learns_in_mixed_precision(isolated: Callable[..., Any]) -> None:
    (found,) = isolated(followed, ["one_device"], "mixed_bfloat16")
    for name, course in found.items():
        assert np.mean(course.losses[-3:]) < 0.8 * np.mean(course.losses[:2]), name
        assert {weight.dtype for weight in course.weights} == {np.dtype(np.float32)}, name


@pytest.mark.parametrize(
    "recipe",
    [
        ("model=resnet", "optimizer=sgd", "dataset.limit=400"),
        ("model=transformer", "dataset._target_=tests.training.words.Words", "model.width=16", "model.units=16"),
        ("model=text", "dataset._target_=tests.training.words.Words"),
    ],
    ids=["resnet", "transformer", "text"],
)
def test_each_network_can_be_cut_into_stages(
    isolated: Callable[..., Any], plan: Callable[..., Any], recipe: tuple[str, ...]
) -> None:
    chosen = (*recipe, "hardware=cpu", "hardware.logical_devices=2", "tracking=none")
    ways = [("strategy=one_device",), ("strategy=pipeline", "strategy.micro_batches=1")]
    one, stages = isolated(follow_each, [plan(*chosen, *way) for way in ways], 6)
    np.testing.assert_allclose(stages.losses, one.losses, rtol=0, atol=1e-4)
