"""State outside of the model and the optimizer that a traced step has: variables, and TensorFlow's random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from scaleflow.errors import ConfigError
from scaleflow.training.graph_loop import list_operation_types

#: How the names of operations begin that draw random numbers, if they have a state: not `StatelessRandom...`.
RANDOM_OPERATIONS = (
    *("Random", "TruncatedNormal", "ParameterizedTruncatedNormal", "Multinomial", "SampleDistortedBoundingBox"),
    *("Stateful", "Rng", "LogUniformCandidate", "UniformCandidate", "LearnedUnigramCandidate"),
    *("FixedUnigramCandidate", "ThreadUnsafeUnigramCandidate", "AllCandidate"),
)

#: The product of a replica's number and this is added to the seeds that it draws: 2**31 divided by the golden ratio.
SEED_STRIDE = 1_327_217_885

#: The start of the names of captured variables in a checkpoint.
CAPTURED = "captured/"


def check_random(graph: Any) -> None:
    """Raises ConfigError if a traced step draws random numbers from TensorFlow's own state."""
    for operation in {*list_operation_types(graph), *(each.type for each in graph.get_operations())}:
        described = op_def_registry.get(operation) if operation.startswith(RANDOM_OPERATIONS) else None
        if described is not None and described.is_stateful and not operation.startswith("StatefulPartitionedCall"):
            raise ConfigError(
                f"the training step draws random numbers with TensorFlow ({operation}): a resumed run would draw "
                "others, and several workers the same ones; use keras.random, such as keras.random.normal(shape, "
                "seed=generator), with a keras.random.SeedGenerator that a layer holds"
            )


def list_captured(graph: Any, known: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Lists the variables that a traced function uses and that are not `known`, in the order of their use."""
    handles = {id(part.handle) for parts in known.values() for each in parts for part in list_copies(each)}
    by_handle = {id(variable.handle): variable for variable in graph.variables}
    unknown = [by_handle[id(handle)] for handle, _ in graph.captures if id(handle) in by_handle.keys() - handles]
    return list({id(each): each for each in map(find_whole, unknown)}.values())


def check_copies(variables: Iterable[Any]) -> None:
    """Raises ConfigError if a variable has no copy for each replica."""
    for variable in variables:
        if not isinstance(variable, tf.distribute.DistributedValues):
            raise ConfigError(
                f"the training step uses the variable {variable.name}, which several replicas would change at once; "
                "make it in a layer: with self.add_weight(...), or as a keras.random.SeedGenerator"
            )


def list_copies(variable: Any) -> Iterable[Any]:
    """Lists the copies of a variable on the replicas of this process."""
    return getattr(variable, "values", None) or [variable]


def find_whole(variable: Any) -> Any:
    """Returns the variable of all replicas that a variable is a copy of, or itself."""
    container = getattr(variable, "_distributed_container", None)
    return (container() if callable(container) else None) or variable


def draw_by_replica() -> None:
    """Makes the seed generators of Keras give each replica random numbers of its own. It can be called again.

    Their states are equal on all replicas, and in checkpoints. The first replica draws what one device does.
    """
    original = keras.random.SeedGenerator.next
    if getattr(original, "is_by_replica", False):
        return

    def next_of_replica(self: keras.random.SeedGenerator, *arguments: Any, **options: Any) -> tf.Tensor:
        seed = original(self, *arguments, **options)
        replica = tf.distribute.get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            return seed
        shift = tf.cast(replica.replica_id_in_sync_group, tf.int64) * SEED_STRIDE % 2**31
        return seed + tf.cast(tf.stack([shift, tf.zeros_like(shift)]), seed.dtype)

    next_of_replica.is_by_replica = True  # type: ignore[attr-defined]
    keras.random.SeedGenerator.next = next_of_replica
