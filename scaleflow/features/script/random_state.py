"""Reads and restores the states that random numbers of a script come from."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaleflow.compat.keras import find_global_seeds
from scaleflow.compat.tensorflow import find_seed_generator


@dataclass(frozen=True)
class RandomState:
    """The states of the generators of a process.

    Attributes:
        python: that of Python's module `random`.
        numpy: that of `numpy.random`.
        tensorflow: that of the seeds for TensorFlow's operations; None: no seed was set.
        keras: that of the generator for Keras's operations without a seed; None: it was not used yet.
    """

    python: Any
    numpy: Any
    tensorflow: Any
    keras: Any


def read_random_state() -> RandomState:
    seeds = find_seed_generator()
    keras_seeds = find_global_seeds()
    return RandomState(
        python=random.getstate(),
        numpy=np.random.get_state(),
        tensorflow=None if seeds is None else seeds.getstate(),
        keras=None if keras_seeds is None else np.array(keras_seeds.state),
    )


def restore_random_state(state: RandomState, is_data_from_python: bool) -> None:
    """Restores the generators.

    Args:
        is_data_from_python: whether the script's Python code makes the data. It may run ahead of the training, so the
            generators of Python and NumPy have the right state only if they are left alone.
    """
    if not is_data_from_python:
        random.setstate(state.python)
        np.random.set_state(state.numpy)
    seeds = find_seed_generator()
    if seeds is not None and state.tensorflow is not None:
        seeds.setstate(state.tensorflow)
    keras_seeds = find_global_seeds()
    if keras_seeds is not None and state.keras is not None:
        keras_seeds.state.assign(state.keras)
