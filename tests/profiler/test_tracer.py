"""A trace that a child process writes, which may die of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def traced_apart(folder: Path, deaths: int) -> tuple[str, list[str], list[int]]:
    """Traces a product, so many children dying; gives what was raised, operations that were seen, and levels after."""
    import tensorflow as tf

    from scaleflow.profiler import tracer

    real, levels, left = tracer.collect_trace, [], [1, 1][:deaths]
    level = tracer.trace_level()
    assert level is not None

    def collect(*arguments: Any, frees: bool = True) -> None:
        if len(left) == 2 or (left and frees):
            os.abort()
        real(*arguments, frees=frees)

    tracer.collect_trace = collect
    product = tf.function(lambda: tf.linalg.matmul(tf.ones([8, 8]), tf.random.normal([8, 8])))
    raised = ""
    for name in ("first", "second"):
        tf.profiler.experimental.start(str(folder / name))
        product()
        levels.append(level.value)
        try:
            tracer.stop_in_child()
        except OSError as error:
            raised = str(error)
        levels.append(level.value)
    traces = [path.read_bytes() for path in sorted(folder.rglob("*.xplane.pb"))]
    return raised, ["MatMul" if b"MatMul" in trace else "nothing" for trace in traces], levels


@pytest.mark.parametrize("deaths", [0, 1, 2])
def test_a_child_that_dies_of_a_trace_takes_nothing_with_it(
    isolated: Callable[..., Any], tmp_path: Path, deaths: int
) -> None:
    raised, seen, levels = isolated(traced_apart, tmp_path, deaths)
    assert raised == ("" if deaths < 2 else "TensorFlow's profiler has crashed")
    assert seen == ([] if deaths == 2 else ["MatMul", "MatMul"])
    assert levels[0] > 0
    assert levels == [levels[0], -1, levels[0], -1]


def says() -> tuple[str | None, str | None, str | None]:
    from scaleflow.profiler.tracer import run_in_child

    def complain() -> None:
        raise OSError("no space left")

    return run_in_child(lambda: None), run_in_child(complain), run_in_child(os.abort)


def test_a_child_says_what_it_has_against_it(isolated: Callable[..., Any]) -> None:
    assert isolated(says) == ("", "no space left", None)
