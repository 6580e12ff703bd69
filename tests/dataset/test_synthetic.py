from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Inputs, Outputs


def made(*cases: dict[str, Any]) -> list[tuple[Inputs, Outputs, Arrays, Arrays] | str]:
    """For each case the source's inputs, outputs, train and test split, or its refusal."""
    return [make(case) for case in cases]


def make(case: dict[str, Any]) -> tuple[Inputs, Outputs, Arrays, Arrays] | str:
    from scaleflow.dataset.synthetic import Synthetic

    try:
        source = Synthetic(**{"examples": 50, "shape": [4], **case})
    except ConfigError as refusal:
        return str(refusal)
    return source.inputs, source.outputs, source.load("train"), source.load("test")


def test_the_seed_decides_the_examples(isolated: Callable[..., Any]) -> None:
    first, again, other = (train for _, _, train, _ in isolated(made, {"seed": 1}, {"seed": 1}, {"seed": 2}))
    np.testing.assert_array_equal(first.inputs, again.inputs)
    np.testing.assert_array_equal(first.targets, again.targets)
    assert not np.array_equal(first.inputs, other.inputs)
    assert not np.array_equal(first.targets, other.targets)


def test_targets_follow_one_map_in_train_and_test(isolated: Callable[..., Any]) -> None:
    ((_, _, train, test),) = isolated(made, {"examples": 20_000, "kind": "regression", "outputs": 2})
    assert (len(train), len(test)) == (16_000, 4000)
    assert not np.array_equal(train.inputs[:4000], test.inputs)
    train_map, test_map = (np.linalg.lstsq(s.inputs, s.targets, rcond=None)[0] for s in (train, test))
    assert np.abs(train_map).max() > 0.2
    np.testing.assert_allclose(train_map, test_map, atol=0.05)


def test_targets_are_what_the_kind_says(isolated: Callable[..., Any]) -> None:
    kinds = [
        ("classification", 3, (3,), (), np.int32),
        ("binary", 10, (1,), (1,), np.float32),
        ("multi_label", 4, (4,), (4,), np.float32),
        ("regression", 2, (2,), (2,), np.float32),
    ]
    found = isolated(made, *({"kind": k, "outputs": n, "shape": [3, 2]} for k, n, *_ in kinds))
    for (kind, outputs, shape, target, dtype), (inputs, described, examples, test) in zip(kinds, found, strict=True):
        assert inputs == Inputs((3, 2))
        assert described == Outputs(kind, shape)
        assert (len(examples), len(test)) == (40, 10)
        assert examples.inputs.shape == (40, 3, 2)
        assert examples.inputs.dtype == np.float32
        assert examples.targets.shape == (40, *target)
        assert examples.targets.dtype == dtype
        values = set(np.unique(examples.targets).tolist())
        if kind == "regression":
            assert len(values) == 80
        else:
            assert values == (set(range(outputs)) if kind == "classification" else {0.0, 1.0})


def test_sizes_that_make_no_sense_are_refused(isolated: Callable[..., Any]) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"examples": 1}, "dataset.examples=1: expected an integer, at least 2"),
        ({"examples": 10.5}, "dataset.examples=10.5"),
        ({"examples": True}, "dataset.examples=True"),
        ({"shape": []}, "dataset.shape=[]: expected a list of sizes"),
        ({"shape": [3, 0]}, "dataset.shape=[3, 0]"),
        ({"shape": 3}, "dataset.shape=3"),
        ({"shape": "32"}, "dataset.shape=32"),
        ({"kind": "ranking"}, "dataset.kind=ranking: expected one of classification, binary"),
        ({"outputs": 1}, "dataset.outputs=1: expected an integer, at least 2"),
        ({"seed": "abc"}, "dataset.seed=abc: expected an integer, at least 0"),
        ({"kind": "regression", "outputs": 0}, "dataset.outputs=0: expected an integer, at least 1"),
    ]
    found = isolated(made, *(case for case, _ in cases))
    for (_, words), message in zip(cases, found, strict=True):
        assert isinstance(message, str), words
        assert message.startswith(words)
