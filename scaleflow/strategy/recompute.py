"""Rematerialization: a part of a model is computed again in the backward pass, and its activations are not kept.

This is the gradient checkpointing of Chen et al. 2016 (arXiv:1604.06174). It trades time for memory: the forward pass
of such a part runs twice. Both runs use the same weights and the same states of random generators, so they compute
the same values, with the same dropout masks. States (of random generators, moving averages) are updated by the first
run only.

`tf.recompute_grad` copies all its arguments, the weights too, and takes no boolean ones. Keras's `RematScope` does not
work inside a `tf.function`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.eager import record

from scaleflow.errors import ConfigError

#: How the names of operations begin that draw other numbers each time. Keras's random functions use none of them.
RANDOM_OPERATIONS = (
    *("Random", "TruncatedNormal", "ParameterizedTruncatedNormal", "Multinomial"),
    *("StatefulRandom", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal"),
)

#: What Keras's layers read from the thread: the call they are part of (`training`), and the dtype they compute in.
LAYER_STATE = ("current_call_ctx", "autocast_scope")


def recompute(
    function: Callable[[Any], Any], arguments: Any, weights: Sequence[keras.Variable], label: str
) -> tuple[Any, list[tf.Tensor]]:
    """Calls a function of layers; its activations are computed again in the backward pass.

    Args:
        function: takes `arguments` and returns a structure of tensors. It is called again in the backward pass.
        arguments: a structure with tensors.
        weights: the trainable variables that the function uses.
        label: what the function is, for a message.

    Returns:
        (what the function returns, the losses that its layers add).

    Raises:
        ConfigError: if a second run would not compute the same.
    """
    leaves = {id(leaf): leaf for leaf in keras.tree.flatten(arguments) if isinstance(leaf, tf.Tensor)}
    inputs = {key: x for key, x in leaves.items() if is_differentiable(x) and may_have_gradient(x)}
    masks = {key: keras.src.backend.get_keras_mask(x) for key, x in inputs.items()}
    around = keras.src.backend.get_stateless_scope()
    values = [read_value(weight, around) for weight in weights]
    layer_state = read_layer_state()

    def run(tensors: Sequence[tf.Tensor], states: Iterable[tuple[Any, tf.Tensor]]) -> tuple[Any, RunScope]:
        replaced = dict(zip(inputs, tensors, strict=False))  # the weights' values follow
        for key, tensor in replaced.items():
            if masks[key] is not None:
                keras.src.backend.set_keras_mask(tensor, masks[key])
        given = keras.tree.map_structure(lambda leaf: replaced.get(id(leaf), leaf), arguments)
        scope = RunScope([*zip(weights, tensors[len(inputs) :], strict=True), *states], label)
        with use_layer_state(layer_state), scope:
            return function(given), scope

    first: list[tuple[Any, RunScope]] = []

    @tf.custom_gradient
    def differentiate(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        with record.stop_recording():
            first.append(run(tensors, ()))

        def backward(*gradients: tf.Tensor, variables: Sequence[Any] = ()) -> Any:
            known = [gradient for gradient in gradients if gradient is not None]
            # The dependency keeps TensorFlow from starting early, and from reusing the first run's results.
            with tf.control_dependencies(known), tf.GradientTape() as tape:
                again = [tf.identity(tensor) for tensor in tensors]
                tape.watch(again)
                targets = list_differentiable(*run(again, first[0][1].first_values()))
            pairs = [pair for pair in zip(targets, gradients, strict=True) if pair[1] is not None]
            results = tape.gradient([t for t, _ in pairs], again, output_gradients=[g for _, g in pairs])
            results = [None if result is None else tf.convert_to_tensor(result) for result in results]
            return (results, [None for _ in variables]) if variables else results  # these are frozen

        return list_differentiable(*first[0]), backward

    before = count_graph_operations()
    if inputs or weights:
        tensors = iter(differentiate(*inputs.values(), *values))
    else:
        first.append(run((), ()))
        tensors = iter(list_differentiable(*first[0]))
    check_operations(before, label)
    check_captures(before, [*inputs.values(), *values], label)
    outputs, scope = first[0]
    scope.apply_updates()
    return keras.tree.map_structure(lambda x: replace_output(x, tensors, label), outputs), list(tensors)


def list_differentiable(outputs: Any, scope: RunScope) -> list[tf.Tensor]:
    """Lists the tensors of a run that have gradients: outputs, then the losses that layers added."""
    return [*filter(is_differentiable, keras.tree.flatten(outputs)), *scope.added]


def is_differentiable(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_complex)


def may_have_gradient(tensor: tf.Tensor) -> bool:
    """Returns whether a gradient of a tensor may be needed. A function that is called in a step does not know it."""
    return not tf.executing_eagerly() or record.should_record_backprop([tensor])


def replace_output(output: Any, tensors: Iterator[tf.Tensor], label: str) -> Any:
    """Returns the next of `tensors` for an output that has a gradient, with the output's mask; others unchanged.

    Raises ConfigError for a structure that would lose its gradient.
    """
    if not isinstance(output, tf.Tensor | bool | int | float | str | None):
        raise ConfigError(
            f"hardware.remat: {label} returns a {type(output).__name__}, whose gradient would be lost; return tensors "
            "in tuples, lists or dicts, or use hardware.remat=false"
        )
    if not is_differentiable(output):
        return output
    tensor, mask = next(tensors), keras.src.backend.get_keras_mask(output)
    if mask is not None:
        keras.src.backend.set_keras_mask(tensor, mask)
    return tensor


class RunScope(keras.StatelessScope):  # type: ignore[misc]  # keras has no types
    """Gives layers the values of their variables, and collects updates and losses instead of applying them.

    Args:
        values: (variable, value) pairs. Other variables are read once, when a layer first uses them.
        label: what runs, for a message.
    """

    def __init__(self, values: Iterable[tuple[keras.Variable, tf.Tensor]], label: str) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        # Not by Keras, which would cast them to the dtype that the layer around computes in.
        self.state_mapping = {id(variable): value for variable, value in values}
        self.added: list[tf.Tensor] = []  # Keras removes a layer's losses when it is called again outside a model
        self._label = label
        self._graph = tf.compat.v1.get_default_graph()
        self._read: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self._updated: dict[int, keras.Variable] = {}

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor:
        if id(variable) not in self.state_mapping:
            if variable.trainable:
                raise ConfigError(
                    f"hardware.remat: {self._label} uses the weights {variable.path} of another layer, whose gradient "
                    "would be lost; make them weights of the layer that uses them, or use hardware.remat=false"
                )
            value = read_value(variable, self.original_scope)
            self._read[id(variable)] = variable, value
            self.state_mapping[id(variable)] = value
        return self.state_mapping[id(variable)]

    def add_loss(self, loss: tf.Tensor) -> None:
        super().add_loss(loss)
        self.added.append(loss)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        if tf.compat.v1.get_default_graph() is not self._graph:  # of a loop, whose values do not leave it
            raise ConfigError(
                f"hardware.remat: {self._label} changes {update[0].path} in a loop or a branch, which cannot be run "
                "again; use hardware.remat=false, or name other layers"
            )
        self.get_current_value(update[0])
        self._updated[id(update[0])] = update[0]
        super().add_update(update)

    def first_values(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns the variables that were read, with the values that they had before the run."""
        return list(self._read.values())

    def apply_updates(self) -> None:
        """Assigns the collected updates. Call it outside the scope."""
        for key, variable in self._updated.items():
            variable.assign(self.state_mapping[key])


def read_value(variable: keras.Variable, scope: keras.StatelessScope | None) -> tf.Tensor:
    """Returns the value of a variable in a scope of Keras, or its own."""
    value = None if scope is None else scope.get_current_value(variable)
    return tf.convert_to_tensor(variable._value if value is None else value)


def read_layer_state() -> dict[str, Any]:
    """Copies what Keras's layers read from the thread: layers change it later."""
    return {name: copy.copy(global_state.get_global_attribute(name)) for name in LAYER_STATE}


@contextlib.contextmanager
def use_layer_state(layer_state: Mapping[str, Any]) -> Iterator[None]:
    """Makes layers in this context run as at the time of `read_layer_state`."""
    before = {name: global_state.get_global_attribute(name) for name in LAYER_STATE}
    for name in LAYER_STATE:
        global_state.set_global_attribute(name, copy.copy(layer_state[name]))
    try:
        yield
    finally:
        for name in LAYER_STATE:
            global_state.set_global_attribute(name, before[name])


def count_graph_operations() -> int:
    """Returns the number of operations of the graph so far; 0 without a graph."""
    return 0 if tf.executing_eagerly() else len(tf.compat.v1.get_default_graph().get_operations())


def check_operations(first: int, label: str) -> None:
    """Raises ConfigError if an operation of the graph, from index `first` on, draws other numbers each time."""
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    for operation in list_operations(graph, graph.get_operations()[first:]):
        if operation.type.startswith(RANDOM_OPERATIONS) and operation.op_def.is_stateful:
            raise ConfigError(
                f"hardware.remat: {label} draws random numbers with TensorFlow ({operation.type}), which are others "
                "when it is computed again; use keras.random with a keras.random.SeedGenerator, or hardware.remat=false"
            )


def list_operations(graph: Any, operations: Iterable[Any]) -> Iterator[Any]:
    """Yields operations, and those of the functions that they call, such as the bodies of loops."""
    for operation in operations:
        yield operation
        for value in operation.node_def.attr.values():
            function: Any = graph._get_function(value.func.name) if value.HasField("func") else None
            if getattr(function, "graph", None) is not None:
                yield from list_operations(function.graph, function.graph.get_operations())


def check_captures(first: int, given: Iterable[tf.Tensor], label: str) -> None:
    """Raises ConfigError if operations from index `first` on take a tensor with a gradient that is not `given`."""
    if tf.executing_eagerly():
        return
    operations = tf.compat.v1.get_default_graph().get_operations()
    earlier, known = {each.name for each in operations[:first]}, {tensor.name for tensor in given}
    for tensor in (tensor for operation in operations[first:] for tensor in operation.inputs):
        is_taken = tensor.op.name in earlier and tensor.name not in known
        if is_taken and is_differentiable(tensor) and record.should_record_backprop([tensor]):
            raise ConfigError(
                f"hardware.remat: {label} uses the tensor {tensor.name}, which is not an argument of its call, so its "
                "gradient would be lost; pass it as an argument, or use hardware.remat=false"
            )
