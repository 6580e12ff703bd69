"""All that an engine's variables hold, whole and by names that do not depend on the strategy.

Under a strategy a variable may be a copy to each replica, or divided among parameter servers; its optimizer's slots
follow it. What is read here is one array for each variable and slot, so that what was saved under one strategy is
restored under another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from scaleflow.errors import ConfigError
from scaleflow.training.forward_backward import to_tf_variable

#: Name -> the TensorFlow variables that hold its parts along the first axis; most often one.
Named = Mapping[str, Sequence[Any]]


#: The sums of the epoch so far.
SUMS = "training/sums"


def list_variables(variable: Any) -> list[Any]:
    """TensorFlow's variables behind one of Keras's: its shards, where it is partitioned."""
    value = to_tf_variable(variable)
    return list(getattr(value, "variables", None) or [value])


class Slots:
    """Builds an optimizer, and notes which of its variables belongs to which of the model's.

    Args:
        optimizer: not built yet.
        variables: what it updates; of a partitioned one its shards.
        model: whose variables they are.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[Any], model: keras.Model) -> None:
        self._optimizer = optimizer
        self._places = {
            id(part): index for index, v in enumerate(model.trainable_variables) for part in list_variables(v)
        }
        self._made: list[tuple[int, str, Any]] = []
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        make = inner.add_variable_from_reference

        def note_slot(reference_variable: Any, name: str | None = None, initializer: Any = "zeros") -> Any:
            made = make(reference_variable, name=name, initializer=initializer)
            self._made.append((id(to_tf_variable(reference_variable)), name or "slot", made))
            return made

        inner.add_variable_from_reference = note_slot
        try:
            optimizer.build(variables)
        finally:
            del inner.add_variable_from_reference

    def by_name(self) -> dict[str, list[Any]]:
        """The optimizer's variables: slots by the model's variable that they belong to, the others by their place."""
        found: dict[str, list[Any]] = {}
        for reference, name, made in self._made:
            found.setdefault(f"optimizer/{name}/{self._places[reference]}", []).append(to_tf_variable(made))
        slots = {id(to_tf_variable(made)) for _, _, made in self._made}
        others = [v for v in self._optimizer.variables if id(to_tf_variable(v)) not in slots]
        return found | {f"optimizer/{index}": list_variables(v) for index, v in enumerate(others)}


def name_model_variables(model: keras.Model) -> dict[str, list[Any]]:
    """The model's variables, those of its random generators too."""
    return {f"model/{index}": list_variables(v) for index, v in enumerate(model.variables)}


def read_variables(named: Named) -> dict[str, np.ndarray[Any, Any]]:
    """Copies of all of them on the host. Under a strategy of several processes each has to call it."""
    found = {}
    for name, pieces in named.items():
        values = [np.array(piece.read_value().numpy()) for piece in pieces]
        found[name] = values[0] if len(values) == 1 else np.concatenate(values, axis=0)
    return found


def write_variables(named: Named, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Puts values into all of them.

    Raises:
        ConfigError: if one is missing, or has another shape.
    """
    for name, pieces in named.items():
        value = values.get(name)
        length = sum(piece.shape[0] for piece in pieces) if len(pieces) > 1 else None
        shape = tuple(pieces[0].shape) if length is None else (length, *pieces[0].shape[1:])
        if value is None or value.shape != shape:
            raise ConfigError(
                f"resume: the checkpoint has {'no ' if value is None else ''}{name}"
                + ("" if value is None else f" of shape {value.shape}, and the run needs {shape}")
                + "; has the model's code changed since?"
            )
        first = 0
        for piece in pieces:
            last = first + piece.shape[0] if length is not None else None
            piece.assign(tf.cast(value if last is None else value[first:last], piece.dtype))
            first = last or 0
