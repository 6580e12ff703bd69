"""The loop of one device as a single XLA program of many steps.

XLA fuses the small operations of a step, and a program of many steps is started once. On a CPU this is about twice as
fast for a small MLP, where most of a step is the start of its operations.
"""

from __future__ import annotations

import functools
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import tensorflow as tf

from scaleflow.interfaces import Feed, IndexedFeed
from scaleflow.training.graph_loop import has_convolution, repeat_in_graph
from scaleflow.training.loop import NEVER, Loop
from scaleflow.training.xla import XlaChoice, find_slow_operation, with_xla

#: Examples whose order one call of the program takes: about half a second of steps of a small model.
CALL_EXAMPLES = 1 << 17


class XlaLoop(Loop):
    """The loop for the strategy `one_device` and examples on the device, as one XLA program.

    XLA has no `index_shuffle`. So the indices of a call's examples are computed before the program, which takes them as
    a tensor of a fixed size, and a call of more steps runs the program several times. Single steps for the profiler are
    not compiled: XLA's programs have no name scopes in a profile.

    What XLA cannot compile, and what it makes slower, is trained as by `Loop`; `xla` then says why.
    """

    _chosen: XlaChoice | None = None

    def _compile(self, feed: Feed) -> Any:
        if self.xla.mode != "loop":
            return super()._compile(feed)
        indexed = cast(IndexedFeed, feed)
        program = with_xla(functools.partial(self._take_steps, indexed))
        length = most_steps(feed) * feed.batching.global_size

        @tf.function(autograph=False, reduce_retracing=True)
        def call(opened: Any, epoch: tf.Tensor, first: tf.Tensor, steps: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            indices = indexed.list_indices(epoch, first, tf.maximum(steps, 1))  # `index_shuffle` needs one
            padded = tf.ensure_shape(tf.pad(indices, [[0, length - tf.size(indices)]]), [length])
            result: tuple[tf.Tensor, tf.Tensor]
            result = self.strategy.run(program, args=(opened, padded, epoch, first, steps))
            return result

        return call

    def _take_steps(
        self, feed: IndexedFeed, arrays: Any, indices: tf.Tensor, epoch: tf.Tensor, first: tf.Tensor, steps: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        listed = feed.with_indices(indices, first)

        def update(step: tf.Tensor, *state: Any) -> Any:
            return self._step(listed, False, arrays, epoch, step, *state)

        sums, first_bad, _ = repeat_in_graph(update, first, steps, (*self._zero_sums(), ()))
        return sums, first_bad

    def _take(self, feed: Feed, opened: Any, epoch: int, first: int, steps: int) -> tuple[np.ndarray[Any, Any], int]:
        if self.xla.mode != "loop" or self._is_alone:
            return super()._take(feed, opened, epoch, first, steps)
        sums, bad, last = np.zeros(self._metric_sums.size), NEVER, first + steps
        while first < last and bad == NEVER:
            count = min(last - first, most_steps(feed))
            more, bad = super()._take(feed, opened, epoch, first, count)
            sums, first = sums + more, first + count
        return sums, bad

    def trace(self, train: Feed, *others: Feed | None) -> None:
        self.xla = self._chosen = self._chosen or self.xla  # each phase of `freezing` is tried by itself
        if self.xla.mode != "loop":
            super().trace(train, *others)
            return
        zero = tf.constant(0, tf.int64)
        position = train.open(0, 0), zero, zero, zero
        function = self._function(train)
        graph = function.get_concrete_function(*position).graph
        self._note_state(graph)
        self._evaluation.overlaps &= not has_convolution(graph)
        slow = find_slow_operation(graph)
        with ThreadPoolExecutor(1) as pool:  # XLA compiles while Python traces the evaluations
            compiled = None if slow else pool.submit(function, *position)  # takes no step
            for feed in filter(None, others):
                self._evaluation.trace(feed)
            error = compiled.exception() if compiled else None
        if isinstance(error, tf.errors.OpError):
            found = re.search(r"Detected unsupported operations .*?: (\w+)", error.message)
            slow = f"XLA cannot compile {f'the operation {found[1]}' if found else 'the training step'}"
        elif error is not None:
            raise error
        if slow is not None:
            self.xla = XlaChoice("passes" if self._has_xla_passes else "none", slow)
            self._functions.clear()
        self._trace_training(train)


def most_steps(feed: Feed) -> int:
    """Returns the most steps that one call of the program takes."""
    return max(1, min(CALL_EXAMPLES // feed.batching.global_size, feed.batching.steps(feed.examples)))
