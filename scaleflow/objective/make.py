"""Makes the objective of a run from the description of its outputs and the config group `objective`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tensorflow as tf

from scaleflow.interfaces import Measure, Objective, Outputs
from scaleflow.objective.kinds import Defaults, defaults_for
from scaleflow.objective.measures import divide
from scaleflow.objective.positions import average_positions, find_counted, replace_ignored


def make_objective(outputs: Outputs | Mapping[str, Outputs], is_weighted: bool = False) -> Objective:
    """Returns the loss and the metrics.

    Args:
        outputs: the outputs of the dataset: one, or several by name.
        is_weighted: whether examples have weights.
    """
    if isinstance(outputs, Outputs):
        parts = defaults_for(outputs)
        return Objective(
            example_loss(outputs, parts),
            parts.measures,
            parts.evaluation_measures,
            is_weighted=is_weighted,
            modes={"loss": "min", **parts.modes},
            classes=parts.classes,
            decide=parts.decide,
        )
    named = {name: make_objective(each) for name, each in outputs.items()}

    def loss(targets: Any, predicted: Any) -> tf.Tensor:
        return tf.add_n([part.loss(targets[name], predicted[name]) for name, part in named.items()])

    return Objective(
        loss,
        [m for name, part in named.items() for m in (loss_measure(name, part), *select_all(name, part.measures))],
        [m for name, part in named.items() for m in select_all(name, part.evaluation_measures)],
        is_weighted=is_weighted,
        modes={"loss": "min", **{f"{name}/{k}": v for name, part in named.items() for k, v in part.modes.items()}},
    )


def example_loss(described: Outputs, parts: Defaults) -> Any:
    """Returns the loss of each example [b] of one output."""

    def loss(targets: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
        counted = find_counted(described, targets)
        return average_positions(parts.loss(replace_ignored(targets, counted), predicted), counted)

    return loss


def loss_measure(output: str, part: Objective) -> Measure:
    """Makes the mean loss of one of several outputs."""

    def sums(targets: Any, predicted: Any, weights: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(part.loss(targets[output], predicted[output]) * weights)

    return Measure((f"{output}/loss",), sums, lambda values, total: [divide(values[0], total)])


def select_all(output: str, measures: Any) -> list[Measure]:
    """Returns measures that select one of several outputs."""

    def select(measure: Measure) -> Measure:
        def sums(targets: Any, predicted: Any, weights: tf.Tensor) -> tf.Tensor:
            return measure.sums(targets[output], predicted[output], weights)

        return replace(measure, names=tuple(f"{output}/{name}" for name in measure.names), sums=sums)

    return [select(measure) for measure in measures]
