"""Compiled evaluation of a split: the loss, the metrics and the confusion matrix, every example once.

The values of metrics are computed from sums over examples, also in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from scaleflow.errors import RunError
from scaleflow.interfaces import NOT_FINITE, READ_SCOPE, STEP_SCOPE, Feed, Objective, OutputKeeper, ScoreCollector
from scaleflow.training.graph import has_convolution, repeat_in_graph

if TYPE_CHECKING:
    from scaleflow.profiler.tracer import StepTracer

#: The metric of the extra loss: the part of the loss that the model adds itself (regularizers, `add_loss`).
EXTRA = "extra_loss"

#: The maximum number of bytes that `gather_bytes` sends at once.
MAX_PIECE = 1 << 22


def gather_bytes(
    add_up: Callable[[tf.Tensor], tf.Tensor],
    content: bytes,
    worker: int,
    workers: int,
    local_replicas: int,
    is_kept: bool = True,
) -> list[bytes]:
    """Returns the content of each worker. All workers must call it.

    The bytes of one worker after the other are summed over all workers, who have zeros instead. Pieces of `MAX_PIECE`
    keep the memory small.

    Args:
        add_up: sums a tensor over all replicas.
        worker: the number of this worker.
        is_kept: whether this worker needs the result. Otherwise it is empty.
    """
    sizes = np.zeros(workers, np.int64)
    sizes[worker] = len(content)
    sizes = add_up(tf.constant(sizes)).numpy() // local_replicas
    gathered: list[bytes] = []
    for owner, size in enumerate(map(int, sizes)):
        parts = []
        for first in range(0, size, MAX_PIECE):
            numbers = np.zeros(min(MAX_PIECE, size - first), np.float32)  # one byte each, so that sums are exact
            if worker == owner:
                numbers[:] = np.frombuffer(content, np.uint8, len(numbers), first)
            summed = add_up(tf.constant(numbers)).numpy() / local_replicas
            if is_kept:
                parts.append(summed.astype(np.uint8).tobytes())
        if is_kept:
            gathered.append(b"".join(parts))
    return gathered


class MetricSums:
    """Computes sums [count, loss, *measures] over examples, the weight if there are weights, and the extra loss.

    Evaluations also count the examples with outputs that are not finite. These are wrong answers.

    Callers accumulate the sums in float64. The extra loss is the part that the model adds to the loss of its outputs
    (regularizers, `add_loss`). It is reported, and is a part of the reported loss, if the traced model adds any.

    Args:
        evaluates: whether the sums are for evaluations, which have more measures.
        takes_scores: whether the caller collects scores (`take_scores`). Some measures are exact only with scores.
    """

    def __init__(self, objective: Objective, evaluates: bool = False, takes_scores: bool = False) -> None:
        self.takes_scores = takes_scores
        self._loss = objective.reported_loss or objective.loss
        self._recomputes_loss = objective.reported_loss is not None
        self._measures = tuple(objective.measures)
        if evaluates:
            self._measures += tuple(objective.evaluation_measures)
        self._is_weighted = objective.is_weighted
        self._answers = objective.answers if evaluates else None
        self._has_not_finite = False
        self.names: tuple[str, ...] = ("loss",)
        for measure in self._measures:
            self.names += tuple(measure.names)
        self._after_measures = 2 + sum(measure.size for measure in self._measures)
        self.size = self._after_measures + (self._answers is not None) + self._is_weighted + 1
        self._has_extra = False
        #: Plain sums of a batch are exact enough in float32.
        self.dtype = tf.float64 if any(measure.size > 1 for measure in self._measures) else tf.float32

    def take_answers(self, targets: Any, outputs: Any, weights: tf.Tensor) -> tuple[Any, Any, tf.Tensor | None]:
        """Returns (outputs for the loss, outputs for metrics, which examples have outputs that are not finite)."""
        if self._answers is None:
            return outputs, outputs, None
        return self._answers(targets, outputs, weights)

    def compute(
        self,
        targets: Any,
        outputs: Any,
        loss: tf.Tensor | None,
        mask: tf.Tensor,
        weights: tf.Tensor | None = None,
        extra: tf.Tensor | None = None,
        answers: tuple[Any, Any, tf.Tensor | None] | None = None,
    ) -> tf.Tensor:
        """Computes one batch's sums [size] of `dtype`.

        Args:
            targets, outputs: tensors [b, ...], or dicts of them.
            loss: the minimised loss, scalar, summed over the valid examples, times their weights if there are any;
                None if unknown. It is reported, unless the objective reports another loss.
            mask: [b] float32, 1 for valid examples and 0 for padding.
            weights: [b] float32, the weights of the examples, 0 for padding; None: 1 for each valid example.
            extra: the extra loss times the number of valid examples of the global batch, this batch's part of it.
            answers: the result of `take_answers` for them, if it was called before.
        """
        self._has_extra |= extra is not None
        weights = mask if weights is None else weights
        usable, measured, is_bad = answers or self.take_answers(targets, outputs, weights)
        if loss is None or self._recomputes_loss:
            loss = tf.reduce_sum(self._loss(targets, usable) * weights)
        sums = []
        for measure in self._measures:
            if self.takes_scores and measure.scores is not None:  # it is computed from its scores
                sums.append(tf.zeros([measure.size], tf.float64))
            else:
                sums.append(measure.sums(targets, usable if measure.is_loss else measured, weights))
        sums = [tf.reduce_sum(mask), loss, *sums]
        if is_bad is not None:
            sums.append(tf.reduce_sum(tf.cast(is_bad & (weights > 0), tf.float32)))
        if self._is_weighted:
            sums.append(tf.reduce_sum(weights))
        sums.append(tf.zeros([]) if extra is None else extra)
        if self.dtype == tf.float32:
            return tf.stack(sums)
        flat = [tf.reshape(tf.cast(part, self.dtype), [-1]) for part in sums]
        return tf.concat(flat, axis=0)

    def take_scores(self, targets: Any, measured: Any, weights: tf.Tensor) -> dict[str, tuple[tf.Tensor, ...]]:
        """Returns the scores of a batch, by the key of their measure; empty without measures that have scores.

        `measured` is the second result of `take_answers`.
        """
        if not self.takes_scores:
            return {}
        scores = {}
        for key, measure in enumerate(self._measures):
            if measure.scores is not None:
                scores[str(key)] = measure.scores(targets, measured, weights)
        return scores

    def make_collectors(self) -> dict[str, ScoreCollector]:
        """Makes the collectors of the scores of an evaluation, by the same keys."""
        if not self.takes_scores:
            return {}
        collectors = {}
        for key, measure in enumerate(self._measures):
            if measure.make_collector is not None:
                collectors[str(key)] = measure.make_collector()
        return collectors

    def means(
        self, sums: np.ndarray[Any, Any], expected: int, collectors: Mapping[str, ScoreCollector] | None = None
    ) -> Mapping[str, float]:
        """Converts sums to the reported values.

        Args:
            sums: [size].
            expected: the number of examples according to the dataset's source.
            collectors: with the scores of all batches, if they were collected.

        Raises RunError if the count is not the expected number.
        """
        count = round(float(sums[0]))
        if count != expected:
            raise RunError(f"the dataset yielded {count} examples, but its source promised {expected}")
        total = self.total(sums)
        values = [self.compute_mean_loss(sums)]
        first = 2
        for key, measure in enumerate(self._measures):
            if collectors and str(key) in collectors:
                assert measure.finish_scores is not None
                values.extend(measure.finish_scores(collectors[str(key)]))
            else:
                values.extend(measure.finish(sums[first : first + measure.size], total))
            first += measure.size
        means = dict(zip(self.names, values, strict=True))
        if self._has_extra and count:
            means[EXTRA] = float(sums[-1]) / count
        if self._answers is not None:
            not_finite = float(sums[self._after_measures])
            self._has_not_finite |= not_finite > 0
            if self._has_not_finite:  # from then on also 0, so that the last value is of the last evaluation
                means[NOT_FINITE] = not_finite
        return means

    def compute_mean_loss(self, sums: np.ndarray[Any, Any]) -> float:
        """Returns the mean loss of the examples of sums [size]; NaN without examples."""
        total = self.total(sums)
        if not total:
            return float("nan")
        return float(sums[1]) / total + float(sums[-1] / sums[0])

    def restore(self, sums: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns a copy of saved sums."""
        return np.array(sums)

    def total(self, sums: np.ndarray[Any, Any]) -> float:
        """Returns the sum of the examples' weights."""
        return float(sums[-2] if self._is_weighted else sums[0])


class Evaluation:
    """Evaluates one model under one strategy, with one compiled function per split.

    For classes it also counts the confusion matrix.

    Args:
        strategy: its replicas share the batches.
        forward: maps inputs [b, ...] to outputs [b, ...], which `Objective.report` takes.

    Attributes:
        overlaps: whether several batches are computed at once. It is faster, but the memory of a GPU or TPU may be too
            small. It becomes False when a traced evaluation has a convolution (`repeat_in_graph`). A caller who knows
            this before can set it, which saves a second trace.
        check_graph: takes the graph of each traced evaluation; it may raise.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, forward: Callable[[tf.Tensor], tf.Tensor], objective: Objective
    ) -> None:
        devices = tf.config.list_logical_devices("GPU") + tf.config.list_logical_devices("TPU")
        self.overlaps = not devices  # each batch takes memory of the device
        self._strategy = strategy
        self._forward = forward
        self._report = objective.report
        # A TPU cannot pass values to Python: there, measures with scores have Keras's thresholds.
        takes_scores = not isinstance(strategy, tf.distribute.TPUStrategy)
        self._metric_sums = MetricSums(objective, evaluates=True, takes_scores=takes_scores)
        self._collectors: dict[str, ScoreCollector] = {}
        self._worker = 0  # the number of this process in the strategy
        self._decide = objective.decide
        self._classes = objective.classes
        self._functions: dict[int, Any] = {}
        self._predict: Any = None
        self._keepers: dict[int, OutputKeeper] = {}
        self.check_graph: Callable[[Any], object] = bool
        self._confusions: dict[int, np.ndarray[Any, Any]] = {}

    def keep_outputs(self, feed: Feed, keeper: OutputKeeper) -> None:
        """Makes each evaluation of a feed pass the model's outputs to `keeper`. Call it before `trace`."""
        self._keepers[id(feed)] = keeper

    def adjust_outputs(self, adjust: Callable[[Any], Any]) -> None:
        """Makes evaluations and predictions use `adjust` of the outputs, traced. They are compiled anew."""
        report = self._report
        self._report = lambda outputs, evaluates: adjust(report(outputs, evaluates))
        self._predict = None
        self._functions.clear()

    def trace(self, feed: Feed) -> None:
        """Compiles for a feed without running anything."""
        self._trace(feed, feed.open(0, 0))

    def __call__(self, feed: Feed) -> Mapping[str, float]:
        """Computes the loss and metrics over a whole split."""
        steps = feed.batching.steps(feed.examples)
        opened = feed.open(0, 0)
        if id(feed) not in self._functions:
            self._trace(feed, opened)
        keeper = self._keepers.get(id(feed))
        if keeper is not None:
            keeper.begin()
        self._collectors = self._metric_sums.make_collectors()
        sums, *counts = self._functions[id(feed)](opened, tf.constant(steps, tf.int64))
        for count in counts:
            self._confusions[id(feed)] = np.reshape(count.numpy(), [self._classes or 0, -1]).astype(np.int64)
        totals = sums.numpy()
        for collector in self._collectors.values():
            self._share_scores(collector)
        means = self._metric_sums.means(totals, feed.examples, self._collectors)
        self._collectors = {}
        if not self._metric_sums.total(totals):
            raise RunError(f"the weights of all {feed.examples} examples of a split are 0: they have no mean loss")
        return means

    def profile(self, feed: Feed, tracer: StepTracer) -> None:
        """Evaluates a split batch by batch, repeatedly, until the tracer has no window left."""
        steps = feed.batching.steps(feed.examples)
        done = 0
        one = self._compile_one(feed)
        opened: Any = None
        while tracer.steps_left(done) is not None:
            if done % steps == 0:
                opened = feed.open(0, 0)
            with tracer.trace_call(done + 1):
                for tensor in one(opened, tf.constant(done % steps, tf.int64)):
                    tensor.numpy()
            done += 1
            tracer.count_steps(done)
            tracer.report(None)

    def predict(self, inputs: Any) -> Any:
        """Returns the model's outputs for inputs [n, ...] in the memory of this process: arrays, or dicts of them.

        It computes on the first replica of this process, and needs no other process.
        """
        if self._predict is None:

            @tf.function(autograph=False, reduce_retracing=True)
            def compute(inputs: Any) -> Any:
                outputs = self._strategy.run(self._compute_outputs, args=(inputs,))
                return tf.nest.map_structure(self._take_first_result, outputs)

            self._predict = compute
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), self._predict(inputs))

    def _compute_outputs(self, inputs: Any) -> Any:
        return self._report(self._forward(inputs), False)

    def _take_first_result(self, value: Any) -> tf.Tensor:
        """Returns the value of the first replica of this process."""
        return self._strategy.experimental_local_results(value)[0]

    @property
    def traces(self) -> int:
        """How often the evaluation was traced (for tests): once per feed."""
        return sum(function.experimental_get_tracing_count() for function in self._functions.values())

    def read_confusion(self, feed: Feed) -> np.ndarray[Any, Any] | None:
        """Returns the confusion matrix of a split's last evaluation.

        Returns:
            [classes, classes] int64: row = true class, column = predicted class. None if there are no classes, too
            many of them, or if the split was not evaluated.
        """
        return self._confusions.get(id(feed))

    def _trace(self, feed: Feed, opened: Any) -> None:
        function = self._compile(feed)
        graph = function.get_concrete_function(opened, tf.constant(0, tf.int64)).graph
        self.check_graph(graph)
        if self.overlaps and has_convolution(graph):
            self.overlaps = False
            function = self._compile(feed)
            function.get_concrete_function(opened, tf.constant(0, tf.int64))
        self._functions[id(feed)] = function

    def _compile(self, feed: Feed) -> Any:
        @tf.function(autograph=False)
        def evaluate(opened: Any, steps: tf.Tensor) -> tuple[tf.Tensor, ...]:
            def batch(step: tf.Tensor, *carried: tf.Tensor) -> Any:
                new, kept, scored = self._strategy.run(self._step, args=(feed, feed.fetch(opened), step, *carried))
                if kept:
                    self._pass_to_keeper(self._keepers[id(feed)], step, kept)
                if scored:
                    self._pass_to_collectors(scored)
                return new

            start = self._strategy.run(self._zero_sums)
            carried = repeat_in_graph(batch, tf.constant(0, tf.int64), steps, state=start, overlaps=self.overlaps)
            return self._sum_over_replicas(carried)

        return evaluate

    def _compile_one(self, feed: Feed) -> Any:
        """Compiles one batch per call, to be traced: xprof finds the name scopes of operations outside loops only."""

        @tf.function(autograph=False)
        def one(opened: Any, step: tf.Tensor) -> tuple[tf.Tensor, ...]:
            with tf.name_scope(STEP_SCOPE):
                with tf.name_scope(READ_SCOPE):
                    fetched = feed.fetch(opened)
                start = self._strategy.run(self._zero_sums)
                carried, *_ = self._strategy.run(self._step, args=(feed, fetched, step, *start))
            return self._sum_over_replicas(carried)

        return one

    def _sum_over_replicas(self, values: Sequence[Any]) -> tuple[tf.Tensor, ...]:
        return tuple(self._strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None) for value in values)

    def _zero_sums(self) -> tuple[tf.Tensor, ...]:
        """Returns a replica's loop state: the sums and, for classes, the flat confusion matrix."""
        sums = tf.zeros([self._metric_sums.size], tf.float64)
        if self._classes is None:
            return (sums,)
        return sums, tf.zeros([self._classes**2], tf.float64)

    def _step(
        self, feed: Feed, fetched: Any, step: tf.Tensor, sums: tf.Tensor, *counts: tf.Tensor
    ) -> tuple[tuple[tf.Tensor, ...], dict[str, tf.Tensor], dict[str, tuple[tf.Tensor, ...]]]:
        """Evaluates one batch in a replica.

        Returns:
            The new loop state, the values for the keeper, if the feed has one, and the scores of measures.
        """
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        first = tf.constant(0, tf.int64)
        with tf.name_scope(READ_SCOPE):
            inputs, targets, mask, *own = feed.micro_batch(fetched, first, step, replica=replica, index=first)
        outputs = self._report(self._forward(inputs), True)
        weights = own[0] if own else mask
        answers = self._metric_sums.take_answers(targets, outputs, weights)
        _, measured, _ = answers
        new_counts = []
        for count in counts:
            new_counts.append(count + self._count_confusion(targets, measured, mask, dtype=count.dtype))
        new_sums = self._metric_sums.compute(targets, outputs, None, mask=mask, weights=weights, answers=answers)
        kept: dict[str, tf.Tensor] = {}
        keeper = self._keepers.get(id(feed))
        if keeper is not None:
            kept = {**keeper.reduce(targets, outputs), "mask": mask, "replica": tf.convert_to_tensor(replica)}
            if own:
                kept["weight"] = own[0]
        scored = self._metric_sums.take_scores(targets, measured, weights)
        if scored:
            scored["replica"] = (tf.convert_to_tensor(replica),)
        state = (sums + tf.cast(new_sums, sums.dtype), *new_counts)
        return state, kept, scored

    def _pass_to_keeper(self, keeper: OutputKeeper, step: tf.Tensor, kept: Mapping[str, Any]) -> None:
        """Passes the kept values of a batch, from this process's replicas, to Python."""
        by_name = {name: self._strategy.experimental_local_results(values) for name, values in kept.items()}
        names = list(by_name)

        def receive(step: np.ndarray[Any, Any], *flat: np.ndarray[Any, Any]) -> None:
            for first in range(0, len(flat), len(names)):
                values = dict(zip(names, flat[first : first + len(names)], strict=True))
                keeper.add(int(step), int(values.pop("replica")), values.pop("mask"), values=values)

        flat = []
        for replica in range(len(by_name["mask"])):
            flat += [values[replica] for values in by_name.values()]
        with tf.device("CPU:0"):
            tf.numpy_function(receive, [step, *flat], [])

    def _pass_to_collectors(self, scored: Mapping[str, tuple[Any, ...]]) -> None:
        """Passes the scores of this process's replicas to Python."""
        keys = [key for key in scored if key != "replica"]
        replicas = self._strategy.experimental_local_results(scored["replica"][0])

        def receive(first_replica: np.ndarray[Any, Any], *flat: np.ndarray[Any, Any]) -> None:
            self._worker = int(first_replica) // len(replicas)
            parts = iter(flat)
            for _ in replicas:
                for key in keys:
                    self._collectors[key].add(next(parts), next(parts), next(parts))

        flat = []
        for number, _ in enumerate(replicas):
            for key in keys:
                for part in scored[key]:
                    flat.append(self._strategy.experimental_local_results(part)[number])
        with tf.device("CPU:0"):
            tf.numpy_function(receive, [replicas[0], *flat], [])

    def _share_scores(self, collector: ScoreCollector) -> None:
        """Gives a collector the scores of all processes of the strategy. All of them must call it."""
        local_replicas = len(self._strategy.experimental_local_results(self._strategy.run(lambda: tf.zeros([]))))
        workers = self._strategy.num_replicas_in_sync // local_replicas
        if workers == 1:
            return
        contents = gather_bytes(self._sum, collector.to_bytes(), self._worker, workers, local_replicas)
        for worker, content in enumerate(contents):
            if worker != self._worker:
                collector.merge(content)

    @tf.function(autograph=False, reduce_retracing=True)
    def _sum(self, values: tf.Tensor) -> tf.Tensor:
        of_replicas = self._strategy.run(tf.identity, args=(values,))
        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, of_replicas, axis=None)

    def _count_confusion(self, targets: tf.Tensor, outputs: tf.Tensor, mask: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """Counts one batch's confusion matrix, flat [classes * classes], in the order of the true classes."""
        assert self._classes is not None
        assert self._decide is not None
        true, predicted, counted = self._decide(targets, outputs, mask)
        return tf.math.unsorted_segment_sum(tf.cast(counted, dtype), true * self._classes + predicted, self._classes**2)
