"""Reads and writes an engine's variables as whole arrays, under names that do not depend on the strategy.

A strategy may mirror a variable and its optimizer slots, or divide them among parameter servers. Here each is one
array, so that a state saved under one strategy can be restored under another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.compat.keras import list_averages, to_tf_variable
from scaleflow.errors import ConfigError

#: Name -> the TensorFlow variables that hold its shards along the first axis; usually one.
Named = Mapping[str, Sequence[Any]]


#: Name of the metric sums of the epoch so far.
SUMS = "training/sums"

#: The start of the names of averaged weights: Keras's name of the slot.
AVERAGES = "optimizer/average/"


def list_variables(variable: Any) -> list[Any]:
    """Lists the TensorFlow variables of a Keras variable: its shards if it is partitioned."""
    value = to_tf_variable(variable)
    return list(getattr(value, "variables", None) or [value])


@dataclass(frozen=True)
class WeightAverage:
    """The moving average of a variable (`optimizer.ema`)."""

    variable: Any  # TensorFlow's
    average: Any  # TensorFlow's
    constraint: Any = None  # Keras's constraint of the variable; None if it has none

    def read_value(self) -> Any:
        """Returns the average with the constraint applied: an average of valid weights can be invalid."""
        value = self.average.read_value()
        return value if self.constraint is None else tf.cast(self.constraint(value), value.dtype)


class Slots:
    """Builds an optimizer, and records which of the model's variables each of its slots belongs to.

    Args:
        optimizer: not built yet.
        variables: the variables to update; the shards of partitioned ones.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any], model: keras.Model) -> None:
        self._optimizer = optimizer
        self._indices: dict[int, int] = {}  # of the model's variables, by id(shard)
        self._constraints: dict[int, Any] = {}
        for index, variable in enumerate(model.trainable_variables):
            for shard in list_variables(variable):
                self._indices[id(shard)] = index
                self._constraints[id(shard)] = variable.constraint
        self._made: list[tuple[Any, str, Any]] = []
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        make = inner.add_variable_from_reference

        def note_slot(reference_variable: Any, name: str | None = None, initializer: Any = "zeros") -> Any:
            slot = make(reference_variable, name=name, initializer=initializer)
            self._made.append((to_tf_variable(reference_variable), name or "slot", slot))
            return slot

        inner.add_variable_from_reference = note_slot
        try:
            optimizer.build(variables)
        finally:
            del inner.add_variable_from_reference

    def by_name(self) -> dict[str, list[Any]]:
        """Returns the optimizer's variables: slots under the index of the model's variable, others under their own."""
        named: dict[str, list[Any]] = {}
        for reference, name, slot in self._made:
            index = self._indices[id(reference)]
            named.setdefault(f"optimizer/{name}/{index}", []).append(to_tf_variable(slot))
        slot_ids = {id(to_tf_variable(slot)) for _, _, slot in self._made}
        count = 0
        for variable in list_optimizer_variables(self._optimizer):
            if id(to_tf_variable(variable)) not in slot_ids:
                named[f"optimizer/{count}"] = list_variables(variable)
                count += 1
        return named

    def list_averages(self) -> list[WeightAverage]:
        """Lists the averages of the variables that the optimizer averages."""
        inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        average_ids = {id(average) for average in list_averages(inner)}
        averages = []
        for reference, _, slot in self._made:
            if id(slot) in average_ids:
                constraint = self._constraints.get(id(reference))
                averages.append(WeightAverage(reference, to_tf_variable(slot), constraint))
        return averages


def list_optimizer_variables(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Lists an optimizer's Keras variables, including variables that the loss scale's optimizer hides.

    `LossScaleOptimizer(Nadam())` does not list Nadam's product of momentum factors: Keras does not track attributes
    that an inner optimizer sets in `build`.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    listed = list(optimizer.variables)
    ids = {id(variable) for variable in listed}
    for value in vars(inner).values():
        if isinstance(value, keras.Variable) and id(value) not in ids:
            listed.append(value)
    return listed


def name_model_variables(model: keras.Model) -> dict[str, list[Any]]:
    """Names the model's variables, including the states of its random generators."""
    return {f"model/{index}": list_variables(v) for index, v in enumerate(model.variables)}


def read_variables(named: Named) -> dict[str, np.ndarray[Any, Any]]:
    """Copies all variables to the host. Under a strategy with several processes, all of them must call it."""
    values = {}
    for name, shards in named.items():
        # On a CPU the array of a tensor is the variable's own memory, so it is copied.
        parts = [np.asarray(shard.read_value()) for shard in shards]
        values[name] = parts[0].copy() if len(parts) == 1 else np.concatenate(parts, axis=0)
    return values


def write_variables(named: Named, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Assigns values to all variables. Raises ConfigError if a value is missing, or has another shape."""
    for name, shards in named.items():
        value = values.get(name)
        is_divided = len(shards) > 1
        shape = tuple(shards[0].shape)
        if is_divided:
            shape = (sum(shard.shape[0] for shard in shards), *shape[1:])
        if value is None or value.shape != shape:
            raise ConfigError(
                f"resume: the checkpoint has {'no ' if value is None else ''}{name}"
                + ("" if value is None else f" of shape {value.shape}, and the run needs {shape}")
                + "; has the model's code changed since?"
            )
        if not is_divided:
            shards[0].assign(tf.cast(value, shards[0].dtype))
            continue
        first = 0
        for shard in shards:
            last = first + shard.shape[0]
            shard.assign(tf.cast(value[first:last], shard.dtype))
            first = last


def list_variables_in(value: Any) -> Iterator[tf.Variable]:
    """Yields the TensorFlow variables in a value: itself, in nested containers, and in Keras objects."""
    if isinstance(value, keras.Variable):
        yield value.value
    elif isinstance(value, tf.Variable):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        parts = value.values() if isinstance(value, Mapping) else value
        for part in parts:
            yield from list_variables_in(part)
    elif hasattr(value, "variables"):
        yield from list_variables_in(list(value.variables))
