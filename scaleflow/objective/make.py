"""Makes the objective of a run from the description of its outputs and the config group `objective`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Measure, Objective, ObjectiveOptions, Outputs, Target
from scaleflow.objective.class_weight import weigh_classes
from scaleflow.objective.forms import Loader
from scaleflow.objective.kinds import Loss, defaults_for
from scaleflow.objective.losses import choose_loss
from scaleflow.objective.measures import divide
from scaleflow.objective.metrics import Mode, make_measure
from scaleflow.objective.positions import average_positions, find_counted, replace_ignored
from scaleflow.objective.short_names import find_loss, find_metrics, is_free_of_unit
from scaleflow.objective.structure import Described, by_output

#: Names of other values that are reported under `train/`.
RESERVED = ("loss", "extra_loss", "loss_scale", "rollbacks", "lr")


def make_objective(
    outputs: Described,
    options: ObjectiveOptions | None = None,
    *,
    loader: Loader | None = None,
    class_weights: Mapping[str, Sequence[float]] | None = None,
    is_weighted: bool = False,
) -> Objective:
    """Makes the loss and the metrics.

    Args:
        outputs: the outputs of the dataset: one, or several by name.
        options: the config group `objective`, whose `class_weight` is not used. None: the defaults.
        loader: loads the classes that the options name; None if they name none.
        class_weights: the weight of each class by output, as `find_class_weights` returns it; None: no weights.
        is_weighted: whether examples have weights.

    Raises:
        ConfigError: if a loss or metric does not fit the outputs.
    """
    options = options or ObjectiveOptions()
    check_smoothing(outputs, options.label_smoothing)
    losses = by_output(outputs, options.loss, "objective.loss", is_one=lambda each: isinstance(each, Target | str))
    metrics = by_output(outputs, options.metrics, "objective.metrics", is_one=lambda each: isinstance(each, list))
    factors = by_output(outputs, options.loss_weights, "objective.loss_weights", is_one=lambda each: False)

    def make_one(name: str, described: Outputs) -> Objective:
        weights = (class_weights or {}).get(name)
        smoothing = 0.0 if described.kind == "regression" else options.label_smoothing
        dot = "." if name else ""
        target = find_loss(described, losses.get(name), f"objective.loss{dot}{name}")
        parts = make_output_objective(described, target, smoothing, weights, loader)
        if metrics.get(name) == []:
            return drop_metrics(parts)
        targets = find_metrics(described, parts, metrics.get(name, ()), f"objective.metrics{dot}{name}")
        return add_metrics(parts, described, targets, loader, is_weighted)

    if isinstance(outputs, Outputs):
        return replace(make_one("", outputs), is_weighted=is_weighted)
    named = {name: make_one(name, each) for name, each in outputs.items()}
    return replace(join_outputs(named, {name: factors.get(name, 1.0) for name in named}), is_weighted=is_weighted)


def check_smoothing(outputs: Described, smoothing: float) -> None:
    named = outputs if isinstance(outputs, Mapping) else {"": outputs}
    if smoothing and all(each.kind == "regression" for each in named.values()):
        raise ConfigError(f"objective.label_smoothing={smoothing:g}: the targets are values, not classes; leave it 0")


# ---------------------------------------------------------------------------------------------
# One output
# ---------------------------------------------------------------------------------------------


def make_output_objective(
    described: Outputs, target: Target | None, smoothing: float, weights: Sequence[float] | None, loader: Loader | None
) -> Objective:
    """Makes the loss of one output, with the metrics of its kind."""
    parts = defaults_for(described)
    loss = choose_loss(described, parts, target, smoothing, loader, weights is not None)
    if described.scaling is not None and is_free_of_unit(target):
        loss = standardise_loss(loss, *described.scaling)
    plain = example_loss(described, loss)
    minimised = plain if weights is None else example_loss(described, loss, weights)
    return Objective(
        minimised,
        parts.measures,
        parts.evaluation_measures,
        None if minimised is plain else plain,
        modes={"loss": "min", **parts.modes},
        classes=parts.classes,
        decide=parts.decide,
    )


def example_loss(described: Outputs, loss: Loss, weights: Sequence[float] | None = None) -> Loss:
    """Returns the loss of each example [b]: the mean over its positions that count, times the weights of classes."""

    def losses(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        counted = find_counted(described, targets)
        valid = replace_ignored(targets, counted)
        values = loss(valid, outputs)
        if weights is not None:
            factors = weigh_classes(described, list(weights), valid, outputs)
            values *= (
                tf.reshape(factors, tf.shape(values)) if values.shape.rank > 1 or factors.shape.rank > 1 else factors
            )
        return average_positions(values, counted)

    return losses


def standardise_loss(loss: Loss, mean: float, deviation: float) -> Loss:
    """Returns the loss of values with mean 0 and deviation 1, from targets and outputs in their unit."""

    def compute(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        return loss(
            *(tf.cast((tf.cast(each, tf.float64) - mean) / deviation, tf.float32) for each in (targets, outputs))
        )

    return compute


def drop_metrics(parts: Objective) -> Objective:
    """Returns the objective with the loss alone: no metrics of the kind, no confusion matrix, no baselines of them."""
    modes = {"loss": parts.modes["loss"]}
    dropped = replace(parts, measures=(), evaluation_measures=(), modes=modes, classes=None, decide=None)
    return replace(dropped, replaced=name_measures(parts))


def name_measures(parts: Objective) -> set[str]:
    return {name for measure in (*parts.measures, *parts.evaluation_measures) for name in measure.names}


def add_metrics(
    parts: Objective, described: Outputs, targets: Sequence[Target], loader: Loader | None, is_weighted: bool
) -> Objective:
    """Adds the metrics that the config names. They replace those of the kind that have the same name."""
    if not targets:
        return parts
    assert loader is not None
    made = [make_measure(described, target, loader, is_weighted) for target in targets]
    own = [name for measure, _ in made for name in measure.names]
    for name, count in Counter([*own, *RESERVED]).items():
        if count > 1:
            raise ConfigError(
                f"{targets[0].key}: two values would have the name {name}; give a metric another name: {{_target_: "
                f"{targets[0].path}, name: my_{name}}}"
            )
    modes = {name: mode for name, mode in parts.modes.items() if name not in own}
    modes |= {name: mode for _, of_measure in made for name, mode in of_measure.items()}
    kept, of_evaluations = (
        [measure for measure in measures if not set(measure.names) & set(own)]
        for measures in (parts.measures, parts.evaluation_measures)
    )
    return replace(
        parts,
        measures=[*kept, *(measure for measure, _ in made)],
        evaluation_measures=of_evaluations,
        modes=modes,
        replaced=name_measures(parts) & set(own),
    )


# ---------------------------------------------------------------------------------------------
# Several outputs
# ---------------------------------------------------------------------------------------------


def join_outputs(named: Mapping[str, Objective], factors: Mapping[str, float]) -> Objective:
    """Makes the objective of several outputs, which minimises the weighted sum of their losses."""

    def add_losses(losses: Mapping[str, Loss]) -> Any:
        def loss(targets: Any, outputs: Any) -> tf.Tensor:
            return tf.add_n([factors[name] * each(targets[name], outputs[name]) for name, each in losses.items()])

        return loss

    reported = {name: part.reported_loss or part.loss for name, part in named.items()}
    has_class_weights = any(part.reported_loss is not None for part in named.values())
    measures: list[Measure] = []
    for name, part in named.items():
        measures += select_all(name, [loss_measure(reported[name]), *part.measures])
    modes: dict[str, Mode] = {f"{name}/{key}": mode for name, part in named.items() for key, mode in part.modes.items()}
    return Objective(
        add_losses({name: part.loss for name, part in named.items()}),
        measures,
        [m for name, part in named.items() for m in select_all(name, part.evaluation_measures)],
        add_losses(reported) if has_class_weights else None,
        modes={"loss": "min", **modes},
        replaced={f"{name}/{key}" for name, part in named.items() for key in part.replaced},
    )


def loss_measure(loss: Loss) -> Measure:
    """Makes the mean loss of one of several outputs."""

    def sums(targets: tf.Tensor, outputs: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(loss(targets, outputs) * weights)

    return Measure(("loss",), sums, lambda values, total: [divide(values[0], total)])


def select_all(output: str, measures: Sequence[Measure]) -> list[Measure]:
    """Returns measures of one of several outputs, with its name."""

    def select(measure: Measure) -> Measure:
        def sums(targets: Any, outputs: Any, weights: tf.Tensor) -> tf.Tensor:
            return measure.sums(targets[output], outputs[output], weights)

        return replace(measure, names=tuple(f"{output}/{name}" for name in measure.names), sums=sums)

    return [select(measure) for measure in measures]
