"""Private names of Keras."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend import get_keras_mask as read_mask  # that Keras passes on with a tensor; None for none
from keras.src.backend import get_stateless_scope as find_stateless_scope  # that replaces variables' values, or None
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import Variable as KerasVariable
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import loss as loss_module
from keras.src.models.functional import Functional
from keras.src.optimizers.base_optimizer import BaseOptimizer


def to_tf_variable(variable: Any) -> Any:
    """Returns the TensorFlow variable of a Keras variable; anything else unchanged."""
    return variable.value if isinstance(variable, keras.Variable) else variable


# Layers and models


def flatten_layers(layer: Any, *, include_self: bool = True, recursive: bool = True) -> list[Any]:
    """Lists the layers inside a layer, at any depth. Keras's `layers` has only the outermost layers of a model."""
    return list(layer._flatten_layers(include_self=include_self, recursive=recursive))


def find_functional(layer: Any) -> Any:
    """Returns a functional model itself, or the one inside a sequential model; None for other layers."""
    functional = getattr(layer, "_functional", None) or layer
    return functional if isinstance(functional, Functional) else None


def find_plain_graph(layer: Any) -> Any:
    """Returns the functional model of a layer like `find_functional`, but None if its class overrides `call`."""
    graph = find_functional(layer)
    kind = keras.Sequential if isinstance(layer, keras.Sequential) else Functional
    return graph if graph is not None and type(layer).call is kind.call else None


def list_nodes(graph: Any) -> list[Any]:
    """Lists the calls of layers in a functional model, in Keras's order of execution, without the inputs."""
    by_depth = graph._nodes_by_depth
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth] if not node.is_input]


def find_node(tensor: Any) -> tuple[Any, int]:
    """Returns the layer call that computes a symbolic tensor, and the tensor's index in the call's outputs."""
    history = tensor._keras_history
    return history.operation._inbound_nodes[history.node_index], history.tensor_index


def standardize_inputs(model: Any, graph: Any, model_inputs: Any) -> list[tf.Tensor]:
    """Converts a model's inputs as Keras does before the first layer."""
    if model._convert_input_args:
        model_inputs = keras.tree.map_structure(
            lambda x: model.dtype_policy.convert_input(x, model.autocast, model.input_dtype), model_inputs
        )
    inputs: list[tf.Tensor] = graph._standardize_inputs(model_inputs)
    return inputs


def list_own_losses(layer: Any) -> list[tf.Tensor]:
    """Lists the losses that a layer and its inner layers have added, without the regularization of weights."""
    return [loss for part in flatten_layers(layer) for loss in part._get_own_losses()]


#: The attribute with the losses that a layer adds.
LOSSES = "_losses"


def is_training(layer: Any) -> bool:
    """Returns whether the current call of a layer is in training mode."""
    return bool(layer._get_call_context().training)


def set_trainable(trainable: Iterable[tuple[Any, bool]]) -> None:
    """Sets whether each layer or variable trains. Keras's own setter also changes inner layers."""
    for part, is_trained in trainable:
        part._trainable = is_trained


#: Returns a layer's own trainable weights, without inner layers, or the variables that an optimizer was built for.
list_own_weights = attrgetter("_trainable_variables")


#: A layer's attributes for LoRA: the weight matrix, and the two low-rank matrices whose product is added to it.
LORA = (("_kernel", "lora_kernel_a", "lora_kernel_b"), ("_embeddings", "lora_embeddings_a", "lora_embeddings_b"))


def list_lora_matrices(layer: Any) -> tuple[Any, Any, Any]:
    """Returns a layer's weight matrix and LoRA's two matrices. Keras's public attribute is only their sum."""
    for weights_name, first_name, second_name in LORA:
        if hasattr(layer, first_name):
            return getattr(layer, weights_name), getattr(layer, first_name), getattr(layer, second_name)
    raise ValueError(f"the layer {layer.name} has no matrices of LoRA")


def remove_lora(layer: Any) -> None:
    """Removes LoRA from a layer. Keras does this only in the files that it writes."""
    _, *matrices = list_lora_matrices(layer)
    layer.lora_enabled = False
    layer.lora_rank = None
    layer.lora_alpha = None
    for variable in matrices:
        layer._untrack_variable(variable)


@contextlib.contextmanager
def hide_default_signatures() -> Iterator[None]:
    """Hides the functions that Keras adds to a SavedModel for each model: unused, and slow to trace (twice)."""
    name = "_default_save_signature"
    owner = next((base for base in keras.Model.__mro__ if name in vars(base)), None)
    before = vars(owner)[name] if owner else None
    try:
        if owner:
            setattr(owner, name, None)
        yield
    finally:
        if owner:
            setattr(owner, name, before)


# Variables and tensors


#: Returns the TensorFlow variable of a Keras variable, even in a stateless scope; None before it exists.
read_stored = attrgetter("_value")


def store_variable(variable: Any, value: Any) -> None:
    """Replaces the TensorFlow variable of a Keras variable. A value becomes a new variable on the current device."""
    if isinstance(value, tf.Variable):  # `_initialize` of Keras before 3.12 would copy it to another variable
        variable._value = value
    else:
        variable._initialize(value)


def cast_like(variable: Any, value: tf.Tensor) -> tf.Tensor:
    """Casts a value to the current layer's compute dtype, as Keras does when it reads a variable."""
    return variable._maybe_autocast(value)


def set_mask(tensor: Any, mask: Any) -> None:
    """Gives a tensor a Keras mask. Does nothing for None."""
    if mask is not None:
        backend.set_keras_mask(tensor, mask)


# State of a process or a thread


#: The module with Keras's operations on TensorFlow.
OPERATIONS = backend.numpy

#: Thread state that Keras's layers read: the call that they are part of (`training`), and the compute dtype.
LAYER_STATE = ("current_call_ctx", "autocast_scope")


def read_layer_state() -> dict[str, Any]:
    """Returns a copy of the thread state in `LAYER_STATE`. Layers change it later."""
    return {name: copy.copy(global_state.get_global_attribute(name)) for name in LAYER_STATE}


@contextlib.contextmanager
def use_layer_state(layer_state: Mapping[str, Any]) -> Iterator[None]:
    """Sets the thread state from `read_layer_state` for layers in the `with` block."""
    before = {name: global_state.get_global_attribute(name) for name in LAYER_STATE}
    for name in LAYER_STATE:
        global_state.set_global_attribute(name, copy.copy(layer_state[name]))
    try:
        yield
    finally:
        for name in LAYER_STATE:
            global_state.set_global_attribute(name, before[name])


def keep_names(make: Callable[[], Any]) -> Callable[[], Any]:
    """Wraps a function that makes a model, so that layers have the same names at each call.

    Keras numbers layers across the whole process. A coordinator makes its model twice, and the config's patterns must
    match both.
    """
    first: list[dict[str, int]] = []

    def make_again() -> Any:
        if not first:
            first.append(dict(global_state.get_global_attribute("object_name_uids") or {}))
        global_state.set_global_attribute("object_name_uids", defaultdict(int, first[0]))
        return make()

    return make_again


def wrap(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replaces a method of an optimizer or a layer. The new function gets the old method as its first argument."""
    object.__setattr__(owner, name, partial(function, getattr(owner, name)))


def wrap_once(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replaces a function of a module or a class like `wrap`, in this process. Further calls have no effect."""
    plain = getattr(owner, name)
    if hasattr(plain, "replaces"):
        return

    def call(*arguments: Any, **named: Any) -> Any:
        return function(plain, *arguments, **named)

    call.replaces = plain  # type: ignore[attr-defined]
    setattr(owner, name, call)


# Optimizers


#: Methods of an optimizer that scaleflow replaces: weight decay, moving averages of weights, and the sum of gradients
#: over replicas. The last two are methods of a LossScaleOptimizer: the update with finite gradients, and the question
#: whether the gradient of a variable is not scaled.
DECAY = "_apply_weight_decay"
AVERAGE = "_update_model_variables_moving_average"
SUM = "_all_reduce_sum_gradients"
FINITE = "_stateful_handle_finite_grads"
IS_UNSCALED = "_overwrite_variable_with_gradient"

#: The number of an optimizer's updates.
ITERATIONS = "_iterations"


def merge_call(optimizer: Any, function: Callable[..., None], *arguments: Any) -> None:
    """Calls `function(strategy, *arguments)` once for all replicas, as Keras's optimizers do for their updates."""
    strategy = optimizer._distribution_strategy
    tf.__internal__.distribute.interim.maybe_merge_call(function, strategy, *arguments)


def find_index(optimizer: Any, variable: Any) -> int:
    """Returns the index of a variable, or of the variable that it is a copy of, in an optimizer's variables."""
    return int(optimizer._get_variable_index(variable))


def find_slots(optimizer: Any, variable: Any) -> list[Any]:
    """Returns the slots of a variable: the squares of Adagrad, or the mean and the squares of Adam."""
    names = ("_accumulators",) if isinstance(optimizer, keras.optimizers.Adagrad) else ("_momentums", "_velocities")
    return [getattr(optimizer, name)[find_index(optimizer, variable)] for name in names]


def list_averages(optimizer: Any) -> list[Any]:
    """Lists an optimizer's moving averages of the model's variables; [] without moving averages."""
    return list(optimizer._model_variables_moving_average) if optimizer.use_ema else []


def find_rate(optimizer: Any) -> Any:
    """Returns the schedule or variable of an optimizer's learning rate. Keras's public attribute is only the rate."""
    return getattr(optimizer, "inner_optimizer", optimizer)._learning_rate


def find_decay(optimizer: Any, variable: Any) -> float:
    """Returns the weight decay of a variable. Muon has another value for variables that it updates like Adam."""
    adam = getattr(optimizer, "adam_weight_decay", None)
    amount = optimizer.weight_decay if adam is None or not optimizer._should_use_adamw(variable) else adam
    return (amount or 0.0) * bool(optimizer._use_weight_decay(variable))


#: Returns the metric with the mean loss of a model in `fit`.
find_loss_mean = attrgetter("_loss_tracker")

#: DIRECTION: a metric's attribute with `up` or `down`, if larger or smaller results are better. DECIDE: a callback's
#: method that determines the direction, which Keras calls after the first epoch. Some metrics and callbacks lack them.
DIRECTION = "_direction"
DECIDE = "_set_monitor_op"


#: The attribute of a model with the first epoch of the next `fit`, which a callback has set; None: the argument counts.
INITIAL_EPOCH = "_initial_epoch"


def find_global_seeds() -> Any:
    """Returns the generator for Keras's random operations without a seed; None if none was used in this process."""
    return global_state.get_global_attribute("global_seed_generator")


# Training by Keras on several replicas


@contextlib.contextmanager
def train_like_one_replica() -> Iterator[None]:
    """Makes Keras's `fit` on several replicas train as on one, where Keras itself does not.

    - Losses: Keras divides a loss that it computes by the number of replicas, and adds up the gradients. A loss of the
      user's own `train_step` is not divided, so its gradient is too large; and a divided loss, returned by an own
      `train_step`, is reported. Here no loss is divided, and each gradient is, before the sum.
    - Clipping: Keras clips the gradient of each replica. Here it clips their sum, as on one device.
    - Building: Keras takes a batch from the data to build a model, and a generator loses it. It also adds up the
      batches of all replicas, which fails for texts. Here a built model takes no batch, and others take that of one
      replica.
    - Numbers: `int(model.optimizer.iterations)` fails.
    """
    with contextlib.ExitStack() as replaced:

        def replace(owner: Any, name: str, value: Any) -> None:
            replaced.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        replace(loss_module, "reduce_values", make_reduction(loss_module.reduce_values))
        replace(loss_module, "scale_loss_for_distribution", keep_loss)
        replace(loss_module, "unscale_loss_for_distribution", keep_loss)
        replace(BaseOptimizer, "_clip_gradients", make_clip_of_sum(BaseOptimizer._clip_gradients))
        replace(TFOptimizer, "_all_reduce_sum_gradients", keep_gradients)
        replace(TensorFlowTrainer, "_maybe_symbolic_build", make_build(TensorFlowTrainer._symbolic_build))
        replace(KerasVariable, "__int__", lambda variable: int(keras.ops.convert_to_numpy(variable)))
        replace(KerasVariable, "__float__", lambda variable: float(keras.ops.convert_to_numpy(variable)))
        yield


def make_reduction(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras's reduction of losses, for gradients that are averaged over the replicas.

    A loss that is a sum over the examples, or is not reduced, has to be added up over the replicas.
    """
    signature = inspect.signature(reduce)

    def reduce_for_average(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        reduced = reduce(*arguments, **named)
        is_scalar = tuple(bound.arguments["values"].shape) == ()
        if is_scalar or bound.arguments["reduction"] not in ("sum", "none", None):
            return reduced
        return reduced * tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, reduced.dtype)

    return reduce_for_average


def keep_loss(value: Any) -> Any:
    return value


def keep_gradients(optimizer: Any, grads_and_vars: Any) -> Any:
    """Returns gradients unchanged: `make_clip_of_sum` has summed them."""
    return grads_and_vars


def make_clip_of_sum(clip: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a function that averages the gradients of all replicas before it clips them."""

    def clip_sum(optimizer: Any, gradients: Any) -> Any:
        context = tf.distribute.get_replica_context()
        if context is None:
            return clip(optimizer, gradients)
        replicas = context.num_replicas_in_sync
        present = [divide_gradient(gradient, replicas) for gradient in gradients if gradient is not None]
        if present:
            present = list(context.all_reduce(tf.distribute.ReduceOp.SUM, present))
        averaged = [None if gradient is None else present.pop(0) for gradient in gradients]
        return clip(optimizer, averaged)

    return clip_sum


def make_build(build: Callable[..., Any]) -> Callable[..., None]:
    """Returns a function that builds the model, the loss and the metrics of a trainer from a batch of one replica."""

    def build_once(model: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if model._distribute_strategy is None or is_compiled_and_built(model):
            return
        batch = data_batch
        if iterator is not None:
            batch = read_local_batch(model.distribute_strategy, iterator)
        with model.distribute_strategy.scope():
            try:
                build(model, data_batch=batch)
            except Exception:
                if not model.run_eagerly:  # an eager metric may need values, and is built by the first step
                    raise

    return build_once


def build_from_batch(model: Any, batch: Any) -> None:
    """Builds a model, its loss and its metrics in the scope of its strategy, from a batch (x, y) or (x, y, weights)."""
    model._maybe_symbolic_build(data_batch=batch)


def is_compiled_and_built(model: Any) -> bool:
    """Returns whether a model, its loss, its metrics and its optimizer have all their variables."""
    parts = [model._compile_loss, model._compile_metrics, model.optimizer]
    layers = flatten_layers(model)
    return all(layer.built for layer in layers) and all(part.built for part in parts if part is not None)


def read_local_batch(strategy: Any, iterator: Any) -> Any:
    """Returns the part of the next batch that the first replica of this process gets."""

    def read_first(value: Any) -> Any:
        if isinstance(value, tf.distribute.DistributedValues):
            return strategy.experimental_local_results(value)[0]
        return value

    for *_, batches in iterator:
        return keras.tree.map_structure(read_first, next(batches))
    return None


def divide_gradient(gradient: Any, replicas: int) -> Any:
    """Returns a gradient divided by the number of replicas."""
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(replicas, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(replicas, gradient.dtype)
