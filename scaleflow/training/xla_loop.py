"""The loop as one XLA program, for one device.

XLA fuses the small operations of a step, and the program is started once for many steps. On a CPU this is about twice
as fast for a small MLP.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import tensorflow as tf

from scaleflow.interfaces import Feed, IndexedFeed
from scaleflow.training.graph import has_convolution, repeat_in_graph
from scaleflow.training.loop import NEVER, CallResult, Loop
from scaleflow.training.xla import XlaChoice, find_slow_operation, with_xla

#: The maximum number of examples in one run of the program: about half a second of steps of a small model.
CALL_EXAMPLES = 1 << 17


class XlaLoop(Loop):
    """The loop for the strategy `one_device` and examples on the device, as one XLA program.

    XLA has no `index_shuffle`. So the indices of a call's examples are computed before the program, which takes them as
    a tensor of a fixed size. A call of more steps runs the program several times. Single steps for the profiler are not
    compiled, because XLA's programs have no name scopes in a profile.

    `Loop` trains a model that XLA cannot compile or makes slower; the reason is then in `xla`.
    """

    _chosen: XlaChoice | None = None  # the choice before the first trace

    def trace(self, train: Feed, *others: Feed) -> None:
        if self._chosen is None:
            self._chosen = self.xla
        self.xla = self._chosen  # again for each phase of `freezing`
        if self.xla.mode != "loop":
            super().trace(train, *others)
            return
        obstacle = self._trace_program(train, others)
        if obstacle is not None:
            self.xla = XlaChoice("passes" if self._has_xla_passes else "none", obstacle)
            self._functions.clear()
        self._trace_training(train)

    def _trace_program(self, train: Feed, others: Sequence[Feed]) -> str | None:
        """Compiles the program, and traces the evaluations of other feeds.

        Returns the reason if the loop should not be one program.
        """
        zero = tf.constant(0, tf.int64)
        position = (train.open(0, 0), zero, zero, zero)
        function = self._function(train)
        graph = function.get_concrete_function(*position).graph
        self._note_state(graph)
        self._evaluation.overlaps &= not has_convolution(graph)
        slow = find_slow_operation(graph)
        with ThreadPoolExecutor(1) as pool:  # XLA compiles while Python traces the evaluations
            compiled = None if slow else pool.submit(function, *position)  # takes no step
            for feed in others:
                self._evaluation.trace(feed)
            error = compiled.exception() if compiled else None
        if error is None:
            return slow
        if isinstance(error, tf.errors.OpError):
            return explain_compile_error(error)
        raise error

    def _compile(self, feed: Feed) -> Any:
        if self.xla.mode != "loop":
            return super()._compile(feed)
        indexed = cast(IndexedFeed, feed)
        program = with_xla(functools.partial(self._take_steps, indexed))
        length = count_program_steps(feed) * feed.batching.global_size

        @tf.function(autograph=False, reduce_retracing=True)
        def call(opened: Any, epoch: tf.Tensor, first: tf.Tensor, steps: tf.Tensor) -> CallResult:
            indices = indexed.list_indices(epoch, first, tf.maximum(steps, 1))  # `index_shuffle` needs one
            padded = tf.ensure_shape(tf.pad(indices, [[0, length - tf.size(indices)]]), [length])
            result: CallResult = self.strategy.run(program, args=(opened, padded, epoch, first, steps))
            return result

        return call

    def _take_steps(
        self, feed: IndexedFeed, arrays: Any, indices: tf.Tensor, epoch: tf.Tensor, first: tf.Tensor, steps: tf.Tensor
    ) -> CallResult:
        """Takes steps with the examples at these indices. XLA compiles it."""
        listed = feed.with_indices(indices, first)

        def update(step: tf.Tensor, *state: Any) -> Any:
            return self._step(listed, arrays, (epoch, step, first + steps), state=state)

        sums, first_bad, norm, _ = repeat_in_graph(update, first, steps, state=(*self._zero_state(), ()))
        return sums, first_bad, norm

    def _take(self, feed: Feed, opened: Any, epoch: int, first: int, steps: int) -> tuple[np.ndarray[Any, Any], int]:
        """Takes steps, in several runs of the program if they are many; see `Loop`."""
        if self.xla.mode != "loop" or self._is_alone:
            return super()._take(feed, opened, epoch, first=first, steps=steps)
        sums = np.zeros(self._metric_sums.size)
        bad = NEVER
        end = first + steps
        while first < end and bad == NEVER:
            count = min(end - first, count_program_steps(feed))
            own_sums, bad = super()._take(feed, opened, epoch, first=first, steps=count)
            sums = sums + own_sums
            first += count
        return sums, bad


def count_program_steps(feed: Feed) -> int:
    """Returns the maximum number of steps in one run of the program."""
    steps = min(CALL_EXAMPLES // feed.batching.global_size, feed.batching.steps(feed.examples))
    return max(1, steps)


def explain_compile_error(error: tf.errors.OpError) -> str:
    """Returns why XLA cannot compile the loop, with the operation if the error names it."""
    operation = re.search(r"Detected unsupported operations .*?: (\w+)", error.message)
    if operation is None:
        return "XLA cannot compile the training step"
    return f"XLA cannot compile the operation {operation[1]}"
