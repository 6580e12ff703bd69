"""Creates the optimizer and its learning rate, and changes its updates.

The rate is a function of the step: batch size scaling, warm-up and schedule. The optimizer does not sum gradients over
the replicas as Keras does. Under the default strategy it updates each variable on the variable's device: there Keras
does not place an update, and TensorFlow uses the first device. The gradients, slots and weights of all pipeline stages
would be copied there and back in each step.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.compat import keras as private
from scaleflow.compat.keras import find_index, list_own_weights, to_tf_variable, wrap
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Optimizer
from scaleflow.optimizer.lazy_adam import LazyAdam

#: An optimizer's method that updates one variable: (gradient, variable, learning rate).
Update = Callable[[Any, Any, Any], None]


def update_in_place(optimizer: keras.optimizers.Optimizer) -> None:
    """Replaces the optimizer's methods by ones that compute each update on the variable's device."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        unscale_in_place(optimizer)
        optimizer = optimizer.inner_optimizer

    def update_step(update: Update, gradient: Any, variable: Any, learning_rate: Any) -> None:
        with tf.device(device_of(variable)):
            update(gradient, variable, learning_rate)

    def change_in_place(change: Callable[[Sequence[Any]], None], variables: Sequence[Any]) -> None:
        for variable in variables:
            with tf.device(device_of(variable)):
                change([variable])

    wrap(optimizer, "update_step", update_step)
    for name in (private.DECAY, private.AVERAGE):
        wrap(optimizer, name, change_in_place)


def unscale_in_place(optimizer: keras.optimizers.LossScaleOptimizer) -> None:
    """Makes loss scaling compute on each variable's device: the check for finite gradients, and unscaling."""

    def check_finite(gradients: Sequence[Any]) -> tf.Tensor:
        finite = []
        for gradient, variable in zip(gradients, list_own_weights(optimizer), strict=True):
            if gradient is not None:
                with tf.device(device_of(variable)):
                    finite.append(tf.reduce_all(tf.math.is_finite(gradient)))
        return tf.reduce_all(tf.stack(finite))

    def handle_finite(finish: Callable[..., None], gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        unscaled = []
        for gradient, variable in zip(gradients, variables, strict=True):
            with tf.device(device_of(variable)):
                unscaled.append(None if gradient is None else gradient / optimizer.dynamic_scale)
        finish(unscaled, variables)

    optimizer.check_finite = check_finite
    wrap(optimizer, private.FINITE, handle_finite)
    wrap(optimizer, private.IS_UNSCALED, lambda *_: True)  # else Keras unscales a second time


def device_of(variable: Any) -> str:
    return str(to_tf_variable(variable).device)


def count_from_own_start(optimizer: keras.optimizers.Optimizer, find_start: Callable[[Any], int]) -> None:
    """Makes an optimizer correct the bias of a variable's averages by the updates since the variable's first one.

    Adam's averages start at 0, and it corrects this bias with a divisor that depends on the number of updates (Kingma
    and Ba 2014, https://arxiv.org/abs/1412.6980). If a variable starts to train late and the divisor uses the run's
    updates, the variable's first updates are up to six times too large.

    Args:
        optimizer: the optimizer, built or not.
        find_start: a variable of the optimizer -> the number of updates before its first one. It is called when an
            update is traced.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)

    def update_step(update: Update, gradient: Any, variable: Any, learning_rate: Any) -> None:
        start = find_start(list_own_weights(inner)[find_index(inner, variable)])
        before = inner.iterations
        object.__setattr__(inner, private.ITERATIONS, before - start if start > 0 else before)
        try:
            update(gradient, variable, learning_rate)
        finally:
            object.__setattr__(inner, private.ITERATIONS, before)

    wrap(inner, "update_step", update_step)


def scale_rates(
    optimizer: keras.optimizers.Optimizer, factors: Sequence[float], are_decayed: Sequence[bool] | None = None
) -> None:
    """Makes an optimizer use a factor of the learning rate for each variable, also in its weight decay.

    Args:
        optimizer: not built yet.
        factors: one for each variable that the optimizer will be built for, in their order.
        are_decayed: whether each of these variables has weight decay; None for all.

    Raises ConfigError if some variables should have no weight decay, but the optimizer has no weight decay at all.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if are_decayed is not None and not (inner.weight_decay or getattr(inner, "adam_weight_decay", None)):
        raise ConfigError(f"optimizer.no_decay: {type(inner).__name__} has no weight decay; set optimizer.weight_decay")

    def find_amounts(variable: Any) -> tuple[float, float]:
        """Returns the weight decay and the factor of the rate."""
        index = find_index(inner, variable)
        is_decayed = are_decayed is None or are_decayed[index]
        return private.find_decay(inner, variable) if is_decayed else 0.0, float(factors[index])

    def update_step(update: Update, gradient: Any, variable: Any, learning_rate: Any) -> None:
        update(gradient, variable, learning_rate * float(factors[find_index(inner, variable)]))

    def decay(distribution: tf.distribute.Strategy, decayed: Sequence[tuple[Any, tuple[float, float]]]) -> None:
        for variable, arguments in decayed:
            distribution.extended.update(variable, decay_one, args=arguments, group=False)

    def decay_one(variable: Any, amount: float, factor: float) -> None:
        rate = tf.cast(inner.learning_rate, variable.dtype) * factor
        variable.assign_sub(variable * tf.cast(amount, variable.dtype) * rate)

    def apply_weight_decay(_: object, variables: Sequence[Any]) -> None:
        pairs = [(to_tf_variable(variable), find_amounts(variable)) for variable in variables]
        decayed = [pair for pair in pairs if pair[1][0]]
        private.merge_call(inner, decay, decayed)

    if any(factor != 1 for factor in factors):
        wrap(inner, "update_step", update_step)
    wrap(inner, private.DECAY, apply_weight_decay)


def clip_values(optimizer: keras.optimizers.Optimizer, largest: float) -> None:
    """Makes an optimizer clip each element of its gradients, after their sum and, for float16, after unscaling."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)

    def update_step(update: Update, gradient: Any, variable: Any, learning_rate: Any) -> None:
        update(tf.clip_by_value(gradient, -largest, largest), variable, learning_rate)

    wrap(inner, "update_step", update_step)


def average_weights(optimizer: keras.optimizers.Optimizer, momentum: float) -> None:
    """Makes an optimizer keep an average of each variable. Call it before `build`.

    After the first update the average is the weights, later momentum x average + (1 - momentum) x weights, as with
    Keras's `use_ema`. Keras's own update does not work on several replicas, and it averages weights before their
    constraints are applied. Here, the average uses the weights after their constraints.

    Args:
        optimizer: not built yet, and not wrapped for loss scaling.
        momentum: above 0, below 1.
    """
    optimizer.use_ema = True
    optimizer.ema_momentum = momentum
    optimizer.ema_overwrite_frequency = None

    def update_averages(_: object, variables: Sequence[Any]) -> None:
        averages = private.list_averages(optimizer)
        constraints = [weight.constraint for weight in list_own_weights(optimizer)]
        values = []
        for variable in variables:
            index = find_index(optimizer, variable)
            average = averages[index]
            if average is not None:
                values.append((to_tf_variable(variable), to_tf_variable(average), constraints[index]))
        is_first = tf.equal(optimizer.iterations.value, 0)  # it is counted after the averages are updated
        share = tf.where(is_first, 1.0, 1.0 - momentum)
        private.merge_call(optimizer, move_averages, values, share)

    wrap(optimizer, private.AVERAGE, update_averages)
    optimizer.finalize_variable_values = keep_values


def move_averages(distribution: tf.distribute.Strategy, values: Sequence[tuple[Any, Any, Any]], share: Any) -> None:
    """Moves each average towards its variable, on the devices that hold them.

    Args:
        values: (variable, its average, its constraint or None).
        share: the weight of the variable in the new average.
    """
    for variable, average, constraint in values:
        move = functools.partial(move_average, constraint=constraint)
        distribution.extended.update(average, move, args=(variable, share), group=False)


def move_average(average: tf.Variable, variable: tf.Variable, share: tf.Tensor, constraint: Any = None) -> None:
    """Moves an average. Keras applies the constraint to the variable later in the same update."""
    share = tf.cast(share, average.dtype)
    value = variable if constraint is None else constraint(tf.convert_to_tensor(variable))
    average.assign((1 - share) * average + share * tf.cast(value, average.dtype))


def keep_values(variables: Sequence[Any]) -> None:
    """Replaces the end of Keras's `fit`, which would overwrite the weights although the run may continue."""


#: Keras's optimizer option -> scaleflow's. Keras clips each replica's gradient before the sum, and its accumulation
#: fails in a strategy's scope.
INSTEAD = {
    "clipnorm": "training.clip_norm",
    "global_clipnorm": "training.clip_norm",
    "clipvalue": "optimizer.clip_value",
    "gradient_accumulation_steps": "training.accumulate",
    "loss_scale_factor": "precision=mixed_float16",
}


def create_optimizer(
    factory: Callable[..., Any], rate: Any, loss_scaling: bool, takes_summed: bool = True, ema: float | None = None
) -> keras.optimizers.Optimizer:
    """Creates the optimizer. Call it in the strategy's scope.

    Args:
        factory: a Keras optimizer class with all arguments but `learning_rate` bound.
        rate: a float or a schedule.
        loss_scaling: wrap the optimizer for float16 gradients (dynamic scale, Micikevicius et al. 2017,
            https://arxiv.org/abs/1710.03740).
        takes_summed: whether the caller sums the gradients over the replicas; else the optimizer does.
        ema: the momentum of an average of the weights; None for no average.

    Raises ConfigError if the factory makes no optimizer or rejects a value, or if an option of `INSTEAD` or `use_ema`
    is set.
    """
    check_arguments_are_numbers(factory)
    try:
        optimizer = factory(learning_rate=rate)
    except ValueError as error:  # Keras rejects a value
        raise ConfigError(f"{keys_in(str(error), factory)}: {' '.join(str(error).split())}") from error
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            f"optimizer: the factory returned a {type(optimizer).__name__}, expected a keras.optimizers.Optimizer"
        )
    for name, instead in INSTEAD.items():
        if getattr(optimizer, name, None):
            raise ConfigError(
                f"optimizer.{name}={getattr(optimizer, name)}: use {instead}, which is correct on every strategy"
            )
    if getattr(optimizer, "use_ema", False):
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} has use_ema={optimizer.use_ema}, and Keras's moving average of the "
            "weights would be neither evaluated nor saved; leave it out, and use optimizer.ema=0.99"
        )
    if ema is not None:
        average_weights(optimizer, ema)
    (take_summed_gradients if takes_summed else sum_dense_gradients)(optimizer)
    return keras.optimizers.LossScaleOptimizer(optimizer) if loss_scaling else optimizer


def read_optimizer_defaults(name: str) -> tuple[str, dict[str, Any]]:
    """Returns the name of the Keras optimizer that a short name such as `sgd` means, and its default options.

    An unknown name is returned without options.
    """
    for class_name, cls in vars(keras.optimizers).items():
        if class_name.lower() == name.lower() and inspect.isclass(cls):
            defaults = {}
            for parameter in inspect.signature(cls).parameters.values():
                if parameter.kind is not parameter.VAR_KEYWORD:
                    defaults[parameter.name] = parameter.default
            return class_name, defaults
    return name, {}


def check_arguments_are_numbers(factory: Callable[..., Any]) -> None:
    """Rejects text for an argument that is a number. Keras does not check all of them."""
    if not isinstance(factory, functools.partial):
        return
    is_keras = factory.func.__module__.startswith("keras.")  # there, null stands for a number that is not set
    numbers = (int, float, type(None)) if is_keras else (int, float)
    parameters = inspect.signature(factory.func).parameters
    for key, value in factory.keywords.items():
        if isinstance(value, str) and key in parameters and type(parameters[key].default) in numbers:
            raise ConfigError(f"optimizer.{key}={value}: expected a number")


def keys_in(message: str, factory: Callable[..., Any]) -> str:
    """Lists the config keys that an error message of an optimizer names, with their values."""
    values: Mapping[str, Any] = getattr(factory, "keywords", {})
    return " with ".join(f"optimizer.{key}={value}" for key, value in values.items() if key in message) or "optimizer"


def take_summed_gradients(optimizer: keras.optimizers.Optimizer) -> None:
    """Disables Keras's sum over the replicas, because the loop sums the gradients itself.

    The loop does so before clipping and before the check for overflow: Keras's LossScaleOptimizer checks only the
    first replica's gradients.
    """
    wrap(optimizer, private.SUM, lambda _, grads_and_vars: grads_and_vars)


def sum_dense_gradients(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes gradients dense before Keras sums them over the replicas.

    An embedding's sparse gradient may contain a row several times. Adam would square these parts instead of their sum.
    """

    def sum_dense(sum_all: Callable[..., Any], pairs: Iterable[tuple[Any, Any]]) -> Any:
        return sum_all([(None if g is None else tf.convert_to_tensor(g), variable) for g, variable in pairs])

    wrap(optimizer, private.SUM, sum_dense)


def scale_to_batch(options: Optimizer, global_batch_size: int) -> float:
    """Scales the peak learning rate with the global batch size.

    `linear` is the rule of Goyal et al. 2017 (https://arxiv.org/abs/1706.02677). `sqrt` keeps the variance of the
    update constant (Krizhevsky 2014, https://arxiv.org/abs/1404.5997).
    """
    ratio = global_batch_size / options.base_batch_size
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[options.scale]
    return options.learning_rate * factor


def make_learning_rate(
    options: Optimizer, global_batch_size: int, total_steps: int, make_own_schedule: Callable[[], Any] | None = None
) -> float | Schedule:
    """Returns the `learning_rate` argument for a Keras optimizer: a float if it is constant, else a schedule.

    `make_own_schedule` makes the user's schedule (`optimizer.schedule._target_`). Its rates are scaled like a peak
    rate.

    Raises ConfigError if it does not return a schedule of Keras.
    """
    peak = scale_to_batch(options, global_batch_size)
    if options.schedule in ("constant", "plateau") and not options.warmup_steps:
        return peak
    schedule = Schedule(peak, options, total_steps)
    if make_own_schedule is not None:
        schedule.peak = peak / options.learning_rate
        schedule.own_schedule = make_own_schedule()
        if not isinstance(schedule.own_schedule, keras.optimizers.schedules.LearningRateSchedule):
            raise ConfigError(
                f"optimizer.schedule: it made a {type(schedule.own_schedule).__name__}, expected a "
                "keras.optimizers.schedules.LearningRateSchedule"
            )
    return schedule


def count_warm_up(options: Optimizer, total_steps: int) -> int:
    """Returns the updates of the warm-up, which may be given as a fraction of the run."""
    share = 0.3 if options.schedule == "one_cycle" and not options.warmup_steps else options.warmup_steps
    return max(1, round(share * total_steps)) if isinstance(share, float) and share else int(share)


def find_warm_up_warning(options: Optimizer, total_steps: int) -> str | None:
    """Returns a warning if the warm-up is not shorter than the run, else None."""
    if count_warm_up(options, total_steps) < total_steps or not options.warmup_steps:
        return None
    return (
        f"optimizer.warmup_steps={options.warmup_steps}: the run has only {total_steps} steps, so the warm-up would "
        "not end; use a smaller number"
    )


class Schedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]  # keras has no types
    """Linear warm-up from 0 to `peak`, then what `optimizer.schedule` says, up to `total_steps`.

    Cosine decay and its restarts are of Loshchilov and Hutter 2016 (https://arxiv.org/abs/1608.03983). One cycle (Smith
    and Topin 2017, https://arxiv.org/abs/1708.07120) rises from peak / 25 as half a cosine, and falls as one. Step
    decay counts from the first update, including the warm-up.

    Attributes:
        factor: multiplies the rate. Functions that are already traced do not see a change.
        own_schedule: the user's schedule, whose rate replaces the decay; None if `optimizer.schedule` is a name.
    """

    def __init__(self, peak: float, options: Optimizer, total_steps: int) -> None:
        self.peak = peak
        self.options = options
        self.total_steps = total_steps
        self.factor = 1.0
        self.own_schedule: Any = None
        self._warmup = count_warm_up(options, total_steps)

    def __call__(self, step: Any) -> tf.Tensor:
        """Returns the rate of the update after `step` updates, a float32 scalar; without TensorFlow for an `int`."""
        own_rate = None if self.own_schedule is None else tf.cast(self.own_schedule(step), tf.float32)
        if isinstance(step, int):
            functions = np
            step = np.float32(step)
        else:
            functions = tf.math
            step = tf.cast(step, tf.float32)
        rate = self.peak * self.factor * (self._decay(step, functions) if own_rate is None else own_rate)
        if self.options.schedule == "one_cycle":
            return rate * (1 - 0.96 * 0.5 * (1 + functions.cos(math.pi * functions.minimum(1.0, step / self._warmup))))
        return rate * functions.minimum(1.0, (step + 1) / self._warmup) if self._warmup else rate

    def _decay(self, step: Any, functions: Any) -> Any:
        options = self.options
        name = self.options.schedule
        if name == "step":
            return options.step_factor ** (step // float(options.step_every or 1))
        if name in ("constant", "plateau"):  # `PlateauRate` changes `factor`
            return 0.0 * step + 1.0
        length = max(1, self.total_steps - self._warmup)
        progress = functions.minimum(functions.maximum((step - self._warmup) / length, 0.0), 1.0)
        if name == "cosine_restarts":
            every = float(options.step_every or 1)
            progress = functions.maximum(step - self._warmup, 0.0) % every / every
        if name == "exponential":
            return options.final_rate**progress
        if name in ("linear", "polynomial"):
            power = 1.0 if name == "linear" else options.power
            return options.final_rate + (1 - options.final_rate) * (1 - progress) ** power
        return options.final_rate + (1 - options.final_rate) * 0.5 * (1 + functions.cos(math.pi * progress))

    def get_config(self) -> dict[str, Any]:
        return {"peak": self.peak, "schedule": str(self.options.schedule), "total_steps": self.total_steps}


def mark_tables(optimizer: keras.optimizers.Optimizer, are_tables: Sequence[bool]) -> None:
    """Tells an optimizer with special updates of embedding tables which of its variables are tables.

    Args:
        optimizer: not built yet.
        are_tables: for each variable that the optimizer will be built for, in their order.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, LazyAdam):
        inner.tables = frozenset(index for index, is_table in enumerate(are_tables) if is_table)


def find_dense_cause(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Returns the reason why an update changes rows without a gradient, for a message; None if it does not."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if type(inner) not in (keras.optimizers.Adagrad, keras.optimizers.SGD, LazyAdam):
        return type(inner).__name__
    momentum = getattr(inner, "momentum", 0)  # Adagrad has none
    causes = {"weight decay": inner.weight_decay, "momentum": momentum, "optimizer.ema": inner.use_ema}
    return next((f"{type(inner).__name__} with {cause}" for cause, value in causes.items() if value), None)


def update_by_rows(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer update only the rows of a `tf.IndexedSlices` gradient, if it may leave other rows unchanged.

    Each row may occur once. Keras's own update of Adagrad reads the whole table and writes a root of all its values.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer.check_finite = are_finite
        optimizer = optimizer.inner_optimizer

    def update_step(update_all: Update, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices):
            update_rows(optimizer, gradient, variable, rate=tf.cast(learning_rate, variable.dtype))
        else:
            update_all(gradient, variable, learning_rate)

    wrap(optimizer, "update_step", update_step)


def update_rows(optimizer: keras.optimizers.Optimizer, gradient: Any, variable: Any, rate: tf.Tensor) -> None:
    """Updates the rows of `gradient`, as LazyAdam, Keras's SGD (without momentum) or Adagrad updates a variable."""
    if isinstance(optimizer, LazyAdam):
        optimizer.update_rows(gradient, variable, rate)
        return
    values = tf.cast(gradient.values, variable.dtype)
    rows = gradient.indices
    if isinstance(optimizer, keras.optimizers.Adagrad):
        accumulator = private.find_slots(optimizer, variable)[0].value
        squares = tf.gather(accumulator, rows) + tf.square(values)  # faster than `scatter_add`: rows are prefetched
        accumulator.scatter_update(tf.IndexedSlices(squares, rows))
        values = values / tf.sqrt(squares + optimizer.epsilon)
    variable.scatter_sub(tf.IndexedSlices(rate * values, rows))


def are_finite(gradients: Any) -> tf.Tensor:
    """Returns whether all gradients are finite. For `tf.IndexedSlices` it checks the rows."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    return tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(value)) for value in values]))
