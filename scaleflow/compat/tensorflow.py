"""Private names of TensorFlow."""

from __future__ import annotations

import random
from typing import Any

from tensorflow.python.distribute.values import MirroredVariable
from tensorflow.python.eager import context
from tensorflow.python.eager.record import should_record_backprop as are_recorded  # whether a tape records tensors
from tensorflow.python.eager.record import stop_recording  # a context in which no tape records
from tensorflow.python.framework import op_def_registry

#: Prefixes of the types of operations that draw random numbers from a state, unlike `StatelessRandom...`.
RANDOM_OPERATIONS = (
    *("Random", "TruncatedNormal", "ParameterizedTruncatedNormal", "Multinomial", "SampleDistortedBoundingBox"),
    *("StatefulRandom", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal", "Rng"),
    *("LogUniformCandidate", "UniformCandidate", "LearnedUnigramCandidate", "FixedUnigramCandidate"),
    *("ThreadUnsafeUnigramCandidate", "AllCandidate"),
)


def draws_random(kind: str) -> bool:
    """Returns whether operations of this type draw random numbers from TensorFlow's own state."""
    described = op_def_registry.get(kind) if kind.startswith(RANDOM_OPERATIONS) else None
    return described is not None and bool(described.is_stateful)


def has_runtime() -> bool:
    """Returns whether TensorFlow has started its runtime in this process. If so, the process must not fork."""
    started = context.context_safe()
    return started is not None and bool(started._initialized)


def find_called_graph(graph: Any, name: str) -> Any:
    """Returns the graph of a function that an operation calls by name, such as a loop's body; None if unknown."""
    return getattr(graph._get_function(name), "graph", None)


def find_first_copy(variable: Any) -> Any:
    """Returns the first replica's copy of a mirrored variable; None for other variables."""
    return variable._primary if isinstance(variable, MirroredVariable) else None


def find_whole(variable: Any) -> Any:
    """Returns the distributed variable that a variable is a copy of, or else the variable itself."""
    container = getattr(variable.handle, "_distributed_container", lambda: None)
    whole = container()
    return variable if whole is None else whole


def find_seed_generator() -> random.Random | None:
    """Returns the generator that seeds operations without a seed of their own; None before a seed is set."""
    generator: random.Random | None = getattr(context.context(), "_rng", None)
    return generator
