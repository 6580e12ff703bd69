"""The user's own training steps: their checks, and the loop for steps that apply their own optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    Feed,
    LossStep,
    MakeOptimizer,
    Objective,
    OutputStructure,
    OwnUpdates,
    Plan,
    describe_keys,
    label_leaf,
    map_leaves,
    name_leaves,
)
from scaleflow.training.loop import CallResult, Loop
from scaleflow.training.state import list_variables_in

KEY = "training.step._target_"


def add_checks(step: LossStep, name: str, outputs: OutputStructure) -> LossStep:
    """Wraps a step to check its results while it is traced.

    Args:
        step: (model, batch, weights) -> (loss, outputs).
        name: the configured `training.step._target_`.
        outputs: the outputs that the dataset's targets need.

    Returns:
        The wrapped step. It raises ConfigError if the loss is not a real scalar, or the outputs have another shape. It
        casts the loss to float32, and values and their targets to the dtype of the model's outputs.
    """
    dtypes = map_leaves(lambda output: output.dtype, outputs)

    def call_checked(model: Any, batch: tuple[Any, Any], weights: Any) -> tuple[tf.Tensor, Any]:
        inputs, targets = batch
        targets = map_leaves(cast_float64, targets, dtypes)
        returned = step(model, (inputs, targets), weights)
        if not isinstance(returned, tuple | list) or len(returned) != 2 or any(part is None for part in returned):
            raise ConfigError(f"{KEY}={name}: returned {describe_result(returned)}, expected (loss, outputs)")
        loss = tf.convert_to_tensor(returned[0])
        check_loss(loss, name)
        values = check_outputs(returned[1], outputs, weights, name)
        return tf.cast(loss, tf.float32), map_leaves(tf.cast, values, dtypes)

    return call_checked


def cast_float64(target: tf.Tensor, dtype: str) -> tf.Tensor:
    """Casts a target to a dtype if it is float64."""
    return tf.cast(target, dtype) if target.dtype == tf.float64 else target


def check_loss(loss: tf.Tensor, name: str) -> None:
    """Raises ConfigError if the loss of the step `name` is not a real scalar."""
    if not loss.shape.is_compatible_with([]) or not loss.dtype.is_floating:
        raise ConfigError(
            f"{KEY}={name}: returned a loss of shape {loss.shape} and type {loss.dtype.name}, expected a real "
            "scalar: tf.reduce_sum(losses * weights)"
        )


def check_outputs(values: Any, outputs: OutputStructure, weights: tf.Tensor, name: str) -> Any:
    """Converts the outputs of the step `name` to tensors, in their structure.

    Raises ConfigError if their keys or shapes differ from `outputs`. `weights` has the shape of the batch.
    """
    if set(name_leaves(values)) != set(name_leaves(outputs)):
        raise ConfigError(
            f"{KEY}={name}: returned outputs that {describe_keys(values)}, but the dataset's outputs "
            f"{describe_keys(outputs)}"
        )
    values = map_leaves(tf.convert_to_tensor, values)
    for key, output in name_leaves(outputs).items():
        tensor = values[key] if key else values
        if not tensor.shape.is_compatible_with((*weights.shape, *output.shape)):
            raise ConfigError(
                f"{KEY}={name}: returned {label_leaf('outputs', key)} of shape {tensor.shape}, but the dataset's "
                f"{output.kind} targets need {(*weights.shape, *output.shape)}"
            )
    return values


def describe_result(returned: Any) -> str:
    """Describes the type of a returned value for a message."""
    if isinstance(returned, tuple | list):
        return "(" + ", ".join(type(part).__name__ for part in returned) + ")"
    return f"a {type(returned).__name__}"


class CustomUpdateLoop(Loop):
    """The loop for a step that applies its own optimizers. Construct it in the strategy's scope.

    Args:
        strategy, model, objective: as for `Engine`. The objective's loss is used in evaluations only.
        name: the configured `training.step._target_`.

    Raises:
        ConfigError: if `own` lacks the methods of `OwnUpdates`.
    """

    def __init__(
        self,
        *,
        strategy: tf.distribute.Strategy,
        model: keras.Model,
        objective: Objective,
        outputs: OutputStructure,
        own: OwnUpdates,
        name: str,
        make_optimizer: MakeOptimizer,
    ) -> None:
        super().__init__(strategy=strategy, model=model, optimizer=None, objective=objective)
        check_methods(own, name)
        own.build(model, make_optimizer)
        self._own = own
        self._own_update = add_checks(own.update, name, outputs)

    @property
    def own_variables(self) -> list[tf.Variable]:
        """The step's variables outside the model, such as the state of its optimizers and other models."""
        known_ids = {id(variable.value) for variable in self.model.variables}
        variables = []
        for variable in list_variables_in(vars(self._own)):
            if id(variable) not in known_ids:
                known_ids.add(id(variable))
                variables.append(variable)
        return variables

    def variables_by_name(self) -> dict[str, list[Any]]:
        named = {f"step/{index}": [variable] for index, variable in enumerate(self.own_variables)}
        return {**super().variables_by_name(), **named}

    def _update(self, feed: Feed, read: Callable[..., Any], weight: tf.Tensor, is_last: tf.Tensor) -> CallResult:
        inputs, targets, mask, *own = read()
        weights = own[0] if own else mask
        loss, outputs = self._own_update(self.model, (inputs, targets), weights * weight)
        _, total = self._sum_over_replicas([], loss)
        sums = self._metric_sums.compute(targets, outputs, loss / weight, mask=mask, weights=weights)
        return sums, total, tf.constant(float("nan"))


def check_methods(own: Any, name: str) -> None:
    """Raises ConfigError if an object lacks the methods of `OwnUpdates`."""
    for method, arguments in (("build", "model, make_optimizer"), ("update", "model, batch, weights")):
        if not accepts_arguments(getattr(own, method, None), arguments.count(",") + 1):
            raise ConfigError(
                f"{KEY}={name}: a class needs the methods build(model, make_optimizer) and update(model, batch, "
                f"weights); its {method}({arguments}) is missing or has other parameters. A loss is a function "
                "(model, batch, weights)"
            )


def accepts_arguments(method: Callable[..., Any] | None, count: int) -> bool:
    """Returns whether a method can be called with `count` positional arguments."""
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*[None] * count)
    except TypeError:
        return False
    return True


def check_own_updates(plan: Plan, name: str, policy: str) -> None:
    """Rejects options that act on the loop's gradients or optimizer. A step with its own optimizers ignores them.

    Args:
        name: the configured `training.step._target_`.
        policy: the precision, resolved.

    Raises ConfigError if one of these options is set.
    """
    options = plan.training
    optimizer = plan.optimizer
    if plan.hardware.xla is True:
        raise ConfigError(
            f"hardware.xla=true with {KEY}={name}: its update applies optimizers, which XLA does not compile here; use "
            "hardware.xla=false, or write a function (model, batch, weights) -> (loss, outputs)"
        )
    conflicts = {
        "optimizer.no_decay": bool(optimizer.no_decay),
        "optimizer.rate_factors": optimizer.rate_factors is not None,
        f"optimizer.ema={optimizer.ema}": optimizer.ema is not None,
        "optimizer.schedule=plateau": optimizer.watched is not None,
        f"training.accumulate={options.accumulate}": options.accumulate > 1,
        f"training.clip_norm={options.clip_norm}": options.clip_norm is not None,
        f"precision={policy}": policy == "mixed_float16",
        f"training.on_nan={options.on_nan}": options.on_nan != "stop",
    }
    for setting, applies in conflicts.items():
        if applies:
            raise ConfigError(
                f"{setting} with {KEY}={name}: this class applies its own optimizers, so the loop has no gradient to "
                "accumulate, clip or scale, no rate to lower, and no optimizer to change; do that in its update method "
                "and remove this key, or write a function (model, batch, weights) -> (loss, outputs)"
            )
