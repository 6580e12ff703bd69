"""Loops in a TensorFlow graph, and the state of a traced step outside of its model and optimizer.

Such state is variables of the user's code, and TensorFlow's random numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from scaleflow.compat.keras import wrap_once
from scaleflow.compat.tensorflow import draws_random, find_whole
from scaleflow.errors import ConfigError

#: Iterations of a loop that may overlap. TensorFlow's own default.
OVERLAPPING_ITERATIONS = 10

#: How the names of convolutions begin, as types of operations.
CONVOLUTIONS = ("Conv", "DepthwiseConv")


def repeat_in_graph(
    body: Callable[..., Any], first: tf.Tensor, count: tf.Tensor, state: Any, *, overlaps: bool = False
) -> Any:
    """Runs `state = body(index, *state)` for `count` indices from `first` on, in the graph; returns the last state.

    Iterations run one at a time (`parallel_iterations=1`). If they overlap, one kernel runs several times at once.
    oneDNN's convolution with a fused bias and sum keeps its working data in the kernel, so it then reads freed memory:
    it crashes, hangs, or is wrong (TF 2.21: an evaluation on a CPU with ten parallel iterations ends with SIGSEGV).
    For work that must overlap, `body` does it one iteration ahead and passes it on in the state, or the caller sets
    `overlaps`, for a body that has no convolution.
    """
    last = first + count
    return tf.while_loop(
        lambda index, *_: index < last,
        lambda index, *carried: (index + 1, *body(index, *carried)),
        (first, *state),
        parallel_iterations=OVERLAPPING_ITERATIONS if overlaps else 1,
    )[1:]


def list_operation_types(graph: Any) -> list[str]:
    """Lists the types of the operations in the functions that a graph calls, such as the body of its loop."""
    types = []
    for function in graph.as_graph_def().library.function:
        types += [node.op for node in function.node_def]
    return types


def has_convolution(graph: Any) -> bool:
    """Returns whether the loop of a traced training call computes convolutions."""
    return any(operation.startswith(CONVOLUTIONS) for operation in list_operation_types(graph))


@contextlib.contextmanager
def keep_devices() -> Iterator[None]:
    """Keeps the state of the loops in this context on the devices that computed it.

    TensorFlow passes the results of a loop's body through identities without a device and places those on the first
    device. Without this context the state is copied there and back in each iteration.
    """
    with tf.compat.v1.get_default_graph().device(find_input_device):
        yield


def find_input_device(operation: tf.Operation) -> str:
    """Returns the device of an operation, or of its input for an identity without a device."""
    uses_input_device = operation.type == "Identity" and not operation.device
    return str(operation.inputs[0].device if uses_input_device else operation.device)


#: The product of a replica's number and this is added to the seeds that it draws: 2**31 divided by the golden ratio.
SEED_STRIDE = 1_327_217_885

#: The start of the names of captured variables in a checkpoint.
CAPTURED = "captured/"


def check_random(graph: Any) -> None:
    """Raises ConfigError if a traced step draws random numbers from TensorFlow's own state."""
    types = set(list_operation_types(graph))
    types.update(operation.type for operation in graph.get_operations())
    for operation in types:
        if draws_random(operation):
            raise ConfigError(
                f"the training step draws random numbers with TensorFlow ({operation}): a resumed run would draw "
                "others, and several workers the same ones; use keras.random, such as keras.random.normal(shape, "
                "seed=generator), with a keras.random.SeedGenerator that a layer holds"
            )


def list_captured(graph: Any, known: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Lists the variables that a traced function uses and that are not `known`, in the order of their use."""
    known_handles: set[int] = set()
    for variables in known.values():
        for variable in variables:
            known_handles.update(id(copy.handle) for copy in list_copies(variable))
    by_handle = {id(variable.handle): variable for variable in graph.variables}
    unknown: dict[int, Any] = {}
    for handle, _ in graph.captures:
        if id(handle) in by_handle and id(handle) not in known_handles:
            whole = find_whole(by_handle[id(handle)])
            unknown[id(whole)] = whole
    return list(unknown.values())


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


def draw_by_replica() -> None:
    """Makes the seed generators of Keras give each replica other random numbers. It can be called again.

    Their states are equal on all replicas, and in checkpoints. The first replica draws what one device does.
    """

    def next_of_replica(original: Callable[..., tf.Tensor], *arguments: Any, **options: Any) -> tf.Tensor:
        seed = original(*arguments, **options)
        replica = tf.distribute.get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            return seed
        shift = tf.cast(replica.replica_id_in_sync_group, tf.int64) * SEED_STRIDE % 2**31
        return seed + tf.cast(tf.stack([shift, tf.zeros_like(shift)]), seed.dtype)

    wrap_once(keras.random.SeedGenerator, "next", next_of_replica)
