"""The types that parts of the worker exchange: batches, the training step, snapshots and traces.

A replica is one device's copy of the model. A step is one optimizer update. It uses one global batch, which `Batching`
divides into micro-batches. A "traced" function runs inside a `tf.function`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf


class Workers(Protocol):
    """The processes that take each step together. Makes decisions that must be the same in all of them.

    Both methods are collective: every worker must make the same calls in the same order.
    """

    def from_chief(self, make: Callable[[], str]) -> str:
        """Returns on every worker the text that `make` returns on the chief. Only the chief calls `make`."""

    def all(self, condition: bool) -> bool:
        """Returns whether `condition` is true on every worker."""


@dataclass(frozen=True)
class Batching:
    """The division of a global batch into `replicas` x `accumulate` micro-batches."""

    batch_size: int  # examples of one micro-batch
    accumulate: int  # micro-batches of one update on one replica
    replicas: int  # replicas that share the global batch

    @property
    def share(self) -> int:
        """The number of examples of a global batch for one replica."""
        return self.batch_size * self.accumulate

    @property
    def global_size(self) -> int:
        """The number of examples of a global batch."""
        return self.share * self.replicas

    def steps(self, examples: int) -> int:
        """Returns the number of global batches of an epoch. A partial last batch is padded, and counts."""
        return -(-examples // self.global_size)


class Feed(Protocol):
    """A split as the compiled loop reads it: from a position to a padded batch.

    A batch depends only on (epoch, step), so a global batch has the same examples on any number of replicas.
    """

    @property
    def examples(self) -> int:
        """The number of examples of the split, without padding."""

    @property
    def batching(self) -> Batching:
        """How each global batch is divided."""

    @property
    def ahead(self) -> bool:
        """Whether the loop may read the next step's batch while it trains on this step's."""

    @property
    def is_indexed(self) -> bool:
        """Whether it is an `IndexedFeed`."""

    @property
    def continues(self) -> bool:
        """Whether each epoch continues where the last one ended, so that the result of `open` can be read on."""

    def open(self, epoch: int, step: int) -> Any:
        """Returns the argument of the compiled function to read from `step` of `epoch` on (both from 0)."""

    def fetch(self, opened: Any) -> Any:
        """Returns this step's argument for each replica, from the result of `open`. Traced, outside the replicas."""

    def micro_batch(
        self, fetched: Any, epoch: tf.Tensor, step: tf.Tensor, replica: tf.Tensor, index: tf.Tensor
    ) -> tuple[Any, ...]:
        """Reads one micro-batch. Traced, in a replica.

        Args:
            fetched: the result of `fetch` for this replica.
            epoch, step: the position, int64 scalars from 0; `step` counts within the epoch.
            replica: the replica's index over all workers, an integer scalar.
            index: the micro-batch's index within the replica's share, an int64 scalar.

        Returns:
            (inputs [b, ...], targets [b, ...], mask [b] float32: 1 for an example, 0 for padding), and, if the source
            has weights, the weights [b] float32, 0 for padding. Inputs and targets are tensors or dicts of tensors.
        """

    def batches(self, epochs: int, steps_per_epoch: int) -> tf.data.Dataset:
        """Returns the global batches of the first `epochs`, for Keras's `fit`: (inputs, targets, mask), and any
        weights.

        The replicas' shares follow each other within a batch.
        """


class IndexedFeed(Feed, Protocol):
    """A feed of arrays whose order can be computed before the steps, for an XLA program of many steps."""

    def list_indices(self, epoch: tf.Tensor, first: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        """Returns the indices [steps x global batch] int32 of the examples from the epoch's step `first` on. Traced."""

    def with_indices(self, indices: tf.Tensor, first: tf.Tensor) -> Feed:
        """Returns a feed that reads the examples at these indices. The first index belongs to the step `first`."""


class CoordinatedFeed(Feed, Protocol):
    """A feed for `parameter_server`: the coordinator sends groups of steps to workers, which run in any order."""

    def worker_argument(self, opened: Any, first: int, steps: int) -> Any:
        """Returns a worker's argument for `steps` steps from the epoch's step `first` on. Call it in order of steps."""


@dataclass(frozen=True)
class FreezePhase:
    """The trained parts of the model from an epoch on, if `model.freeze` changes during the run."""

    epoch: int  # its first epoch, from 0
    trainable: Sequence[tuple[Any, bool]]  # (part, whether it trains) for each layer and variable of the model


class ScoreCollector(Protocol):
    """Collects the scores of an evaluation. Batches may come in any order."""

    def add(
        self, scores: np.ndarray[Any, Any], is_positive: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]
    ) -> None:
        """Adds rows [m, columns], as `Measure.scores` returns them."""

    def to_bytes(self) -> bytes:
        """Serializes the collected scores, for `merge` in another process."""

    def merge(self, content: bytes) -> None:
        """Adds the scores that another process collected."""


@dataclass(frozen=True)
class Measure:
    """Reported values that are computed from sums over examples: a mean, or the result of a Keras metric.

    Attributes:
        names: the names of the values, without the split: `accuracy`, or `age/mae` with several outputs.
        sums: (targets, outputs, weights [b] float32) -> this batch's sums, [size]; a scalar if `size` is 1. Traced. An
            example of weight 0 must not count.
        finish: (the sums of all batches [size] float64, the sum of all weights) -> a value for each name.
        size: the number of sums. Several sums are added in float64.
        scores: (targets, outputs, weights [b] float32) -> scores float64, whether they are positives, and weights, each
            [m, columns]. Traced. Evaluations collect scores instead of sums, if they can. None: there are only sums.
        make_collector: with `scores`: makes an object that collects them.
        finish_scores: with `scores`: (a collector with the scores of all batches) -> a value for each name.
        is_loss: whether it is the loss of an output, which is NaN for outputs that are not finite.
    """

    names: tuple[str, ...]
    sums: Callable[[Any, Any, tf.Tensor], tf.Tensor]
    finish: Callable[[np.ndarray[Any, Any], float], Sequence[float]]
    size: int = 1
    scores: Callable[[Any, Any, tf.Tensor], tuple[tf.Tensor, ...]] | None = None
    make_collector: Callable[[], ScoreCollector] | None = None
    finish_scores: Callable[[Any], Sequence[float]] | None = None
    is_loss: bool = False


@dataclass(frozen=True)
class Objective:
    """The loss to minimise and the metrics to report.

    Targets and outputs are tensors [b, ...], or dicts of such tensors by output name.

    Attributes:
        loss: (targets, outputs float32) -> [b] float32: the loss to minimise.
        measures: reported values in addition to the loss, for training and evaluations.
        evaluation_measures: values reported only for evaluations.
        reported_loss: the loss that is reported: without class weights, computed from the result of `report`. None:
            `loss`.
        report: (the model's result, whether in an evaluation) -> the outputs from which everything else is computed.
            They differ in an ensemble, whose members have their own losses.
        answers: (targets, outputs, weights [b] float32) -> (outputs for the loss: those that are not finite become 0 if
            no target counts; outputs for metrics: wrong answers replace the others that are not finite; whether an
            example has such others, [b] bool). Used by evaluations. None: outputs are used unchanged.
        is_weighted: whether examples have weights. Reported values are then weighted means.
        modes: name of a value -> `min` or `max`, which is better, if known.
        replaced: names of default metrics that metrics of the config replace.
        classes: the number of classes, if there is one output and its targets are classes; otherwise None.
        decide: with `classes`: (targets, outputs, mask [b]) -> (the true class [n], the predicted class [n], whether it
            counts [n]), int32. With targets for each position, n is the number of positions of the batch.
    """

    loss: Callable[[Any, Any], tf.Tensor]
    measures: Sequence[Measure] = ()
    evaluation_measures: Sequence[Measure] = ()
    reported_loss: Callable[[Any, Any], tf.Tensor] | None = None
    report: Callable[[Any, bool], Any] = field(default=lambda outputs, evaluates: outputs)
    answers: Callable[[Any, Any, tf.Tensor], tuple[Any, Any, tf.Tensor]] | None = None
    is_weighted: bool = False
    modes: Mapping[str, Literal["min", "max"]] = field(default_factory=dict)
    replaced: Set[str] = frozenset()
    classes: int | None = None
    decide: Callable[[Any, Any, tf.Tensor], tuple[tf.Tensor, ...]] | None = None


class OutputKeeper(Protocol):
    """Keeps the model's outputs for each example of a split during an evaluation."""

    def reduce(self, targets: Any, outputs: Any) -> Mapping[str, tf.Tensor]:
        """Returns the values of a batch to keep, [b, ...] by name. Traced, in a replica."""

    def begin(self) -> None:
        """Begins an evaluation of the split, and discards the previous one."""

    def add(self, step: int, replica: int, mask: np.ndarray[Any, Any], values: Mapping[str, Any]) -> None:
        """Receives the values of a replica's share of a batch. Steps may come in any order.

        Args:
            step: the index of the batch.
            replica: the replica's index over all workers.
            mask: [b], 0 for padding.
            values: the result of `reduce`, as arrays, and `weight` [b] if examples have weights.
        """


LossStep = Callable[[Any, tuple[Any, Any], Any], tuple[Any, Any]]
"""A user's training step that is a function: (model, batch, weights) -> (loss, outputs).

- `batch` is (inputs, targets) [b, ...], `weights` is [b] float32.
- `loss` is the scalar sum of the examples' losses times their weights.
- `outputs` are [b, *Outputs.shape], logits or values. The `train/` metrics are computed from them.

Inputs, targets and outputs are dicts of such tensors if the dataset's are.

`training.step._target_` names the function; the other keys there are its further arguments. The loop calls it in a
replica, for one micro-batch, under its gradient tape. The loop does the rest: it adds the model's own losses
(regularization), scales the loss for float16, accumulates, sums over the replicas, clips and updates.

Weights sum to 1 over all micro-batches and replicas of an update, unless the dataset gives examples weights of their
own, which they are multiplied by. A padding example has weight 0 and is a copy of a real one. Multiply a term that is
not a sum over examples by the sum of the weights, so that it counts once. With `dataset.augment.mixup`, class targets
are [b, classes].
"""


class MakeOptimizer(Protocol):
    """Makes more optimizers as the config group `optimizer` describes them."""

    def __call__(self, variables: Sequence[Any], rate_factor: float = 1.0) -> Any:
        """Returns a Keras optimizer, built for `variables`.

        Its `apply_gradients` takes this replica's gradients of the weighted loss and sums them over the replicas.

        Args:
            variables: the trainable variables that it updates.
            rate_factor: the factor of the config's learning rate.
        """


class OwnUpdates(Protocol):
    """A user's training step that applies its own optimizers.

    `training.step._target_` names the class; the other keys there are its arguments. Each worker makes one object. The
    step handles gradients itself, so options that change them in the loop are rejected: accumulation, clipping,
    float16's loss scaling and rollback. Keep everything that must survive a step (optimizers, models, variables) in
    attributes, or in lists, tuples and dicts there: checkpoints save these objects.
    """

    def build(self, model: Any, make_optimizer: MakeOptimizer) -> None:
        """Makes all variables. Called once, in the strategy's scope."""

    def update(self, model: Any, batch: tuple[Any, Any], weights: Any) -> tuple[Any, Any]:
        """Makes one update. Traced, in a replica.

        Args:
            model: the model of the config group `model`.
            batch: (inputs, targets) [b, ...], this replica's share of the global batch.
            weights: [b] float32. They sum to 1 over all replicas; a padding example has 0.

        Returns:
            (the scalar sum of this replica's losses times weights, outputs [b, *Outputs.shape]: logits or values).
            The loop sums the loss over the replicas, reports it, and ends the run if it is not finite. The
            optimizers of `make_optimizer` sum the gradients. `update` itself adds the model's own losses
            (regularization), divided by the number of replicas.
        """


class ForwardBackward(Protocol):
    """The model's forward pass, and its forward and backward pass, for one micro-batch. Traced in a replica."""

    @property
    def variables(self) -> Sequence[Any]:
        """The variables that get gradients and that the optimizer updates."""

    @property
    def devices(self) -> Sequence[str]:
        """The device of each variable's gradient, in the order of `variables`; "" is the replica's own."""

    @property
    def keeps_rows(self) -> bool:
        """Whether the gradient of an embedding table may be `tf.IndexedSlices`, in which rows may
        occur several times.
        """

    def forward(self, inputs: Any) -> Any:
        """Returns the outputs [b, ...] float32 of an evaluation, a tensor or a dict."""

    def backward(
        self, batch: tuple[Any, Any], weights: tf.Tensor, parts: int, scale: Callable[[Any], Any]
    ) -> tuple[tf.Tensor, tf.Tensor | None, Any, list[tf.Tensor | tf.IndexedSlices | None]]:
        """Computes the gradient of the weighted loss.

        Args:
            batch: (inputs, targets) of one micro-batch.
            weights: [b] float32, one for each example; 0 for padding. They include the examples' own weights.
            parts: micro-batches of an update, over all replicas. The model's own losses are divided by it, so that they
                count once for each update.
            scale: applied to the loss before the backward pass, for float16.

        Returns:
            (the scalar sum of losses times weights, the model's own losses divided by `parts` or None if it adds none,
            outputs [b, ...], a gradient or None for each of `variables`).
        """


@dataclass(frozen=True)
class Snapshot:
    """Everything that a run needs to continue from a step."""

    step: int  # the number of steps taken
    #: The whole value of each variable, by name. Names and values do not depend on the strategy.
    tensors: Mapping[str, np.ndarray[Any, Any]]
    host: Mapping[str, Any]  # the state of the Python side, as plain values that JSON can hold


#: Keys of an ensemble's result in training: its outputs, its members' outputs [b, k, *Outputs.shape], and, with folds,
#: the weight of each member's loss [b, k], and the outputs of the members that did not train on an example.
PREDICTION = "prediction"
MEMBERS = "members"
SHARES = "shares"
HELD_OUT = "held_out"

#: The name of an evaluation's value: the number of examples of a split with outputs that are not finite.
NOT_FINITE = "not_finite"

#: Name scopes in the graphs of the loop and of `fit`: a whole step, reading its batch, the sum over replicas. The
#: profiler uses them to assign the operations of a trace.
STEP_SCOPE = "train_step"
READ_SCOPE = "read_batch"
SUM_SCOPE = "sum_over_replicas"
