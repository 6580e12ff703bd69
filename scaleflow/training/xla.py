"""`hardware.xla`: chooses what to compile with XLA."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import keras
import tensorflow as tf

from scaleflow.compat.keras import LOSSES, flatten_layers
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Feed, InputStructure, Plan, label_leaf, name_leaves
from scaleflow.training.graph import CONVOLUTIONS, list_operation_types

#: Replicas of these strategies communicate with a call that TensorFlow allows neither in a graph loop nor in an XLA
#: program.
STRATEGIES_THAT_MEET = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.ParameterServerStrategy,
    tf.distribute.TPUStrategy,
)


def list_synchronized_layers(model: keras.Model, strategy: tf.distribute.Strategy) -> list[str]:
    """Names the layers, at any depth, that communicate with the other replicas in a training step.

    A frozen BatchNormalization uses its stored statistics, so it does not communicate.
    """
    if not isinstance(strategy, STRATEGIES_THAT_MEET):
        return []
    layers = [layer for layer in flatten_layers(model) if getattr(layer, "synchronized", False)]
    return [layer.name for layer in layers if layer.trainable]


def list_aggregated_variables(model: keras.Model, strategy: tf.distribute.Strategy) -> list[str]:
    """Lists the paths of variables whose changes in the forward pass would be combined over the replicas.

    Keras's layers have none: each replica has its own seeds, and its own statistics without `synchronized`.
    """
    if not isinstance(strategy, STRATEGIES_THAT_MEET):
        return []
    return [variable.path for variable in model.non_trainable_variables if variable.aggregation != "none"]


def keep_losses_apart(model: keras.Model) -> None:
    """Gives each replica its own list of the losses that layers add.

    Keras has one list per layer. Replicas that synchronize in the forward pass run it interleaved, each in its own
    thread. With a shared list, one replica would clear or use the losses of another.
    """
    for layer in flatten_layers(model):
        object.__setattr__(layer, LOSSES, ReplicaLosses())


class ReplicaLosses(threading.local):
    """The losses that a layer adds in this thread, with the methods of a list that Keras calls."""

    def __init__(self) -> None:
        self._losses: list[Any] = []

    def __getitem__(self, place: slice) -> list[Any]:
        return self._losses[place]

    def extend(self, losses: Iterable[Any]) -> None:
        self._losses.extend(losses)

    def clear(self) -> None:
        self._losses.clear()


#: Layers that are slow with XLA on a CPU: gradients of convolutions and poolings, and loops over positions.
SLOW_LAYERS = (
    *(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D),
    *(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose),
    *(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D),
    *(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D),
    *(keras.layers.MaxPooling1D, keras.layers.MaxPooling2D, keras.layers.MaxPooling3D),
    *(keras.layers.AveragePooling1D, keras.layers.AveragePooling2D, keras.layers.AveragePooling3D),
    keras.layers.RNN,
)

#: The types of such operations begin with these.
SLOW_OPERATIONS = (*CONVOLUTIONS, "MaxPool", "AvgPool")

#: TensorFlow's functions that draw random numbers from a seed, each with its argument for the algorithm.
DRAWING = (
    (tf.nn.experimental, "stateless_dropout", "rng_alg"),
    *((tf.random, f"stateless_{name}", "alg") for name in ("normal", "truncated_normal", "uniform")),
)

#: A run is compiled if steps x square root of parameters is at least this. Shorter runs do not save the time that
#: compiling takes (docs/performance.md has the measurements).
MIN_WORK = 400_000

#: The maximum number of operations of a training step. It is a rough limit: XLA's time to compile grows with them.
MAX_OPERATIONS = 4000


@dataclass(frozen=True)
class XlaChoice:
    """The part of training that XLA compiles.

    Attributes:
        mode: `loop`: many steps as one program; `passes`: the forward and backward pass of each step; `none`.
    """

    mode: Literal["loop", "passes", "none"]
    reason: str

    def __str__(self) -> str:
        words = {"loop": "whole loop", "passes": "forward and backward pass", "none": "false"}
        return f"{words[self.mode]}: {self.reason}"


def with_xla(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function to one XLA program per combination of input shapes.

    The function may neither read data nor, on a CPU, communicate with other replicas: XLA compiles neither.
    """

    def program(*arguments: Any) -> Any:
        with draw_by_threefry():
            return function(*arguments)

    compiled: Callable[..., Any] = tf.function(program, autograph=False, jit_compile=True)
    return compiled


@contextlib.contextmanager
def draw_by_threefry() -> Iterator[None]:
    """Makes TensorFlow draw random numbers with the algorithm that XLA computes fast on a CPU, while it traces.

    The algorithm is Threefry (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405). With TensorFlow's choice a
    step of a small model with dropout takes ten times as long.
    """
    if tf.config.list_logical_devices("GPU"):
        yield
        return
    originals = [getattr(module, name) for module, name, _ in DRAWING]
    try:
        for (module, name, argument), original in zip(DRAWING, originals, strict=True):
            setattr(module, name, functools.partial(original, **{argument: "threefry"}))
        yield
    finally:
        for (module, name, _), original in zip(DRAWING, originals, strict=True):
            setattr(module, name, original)


def check_xla(model: keras.Model, inputs: InputStructure, strategy: tf.distribute.Strategy) -> None:
    """Rejects models that XLA cannot compile. Otherwise the error would come in the first step only.

    Raises ConfigError if the inputs are text, or if layers communicate with other replicas.
    """
    for name, leaf in name_leaves(inputs).items():
        if leaf.dtype == "string":
            label = label_leaf("inputs", name)
            raise ConfigError(
                f"hardware.xla=true: the dataset's {label} are text, which XLA cannot compile; use hardware.xla=false"
            )
    meeting = [f"the layer {name} is synchronised" for name in list_synchronized_layers(model, strategy)]
    meeting += [f"the variable {path} is aggregated" for path in list_aggregated_variables(model, strategy)]
    if meeting:
        replicas = strategy.num_replicas_in_sync
        raise ConfigError(
            f"hardware.xla=true: {meeting[0]} over {replicas} replica{'s' if replicas > 1 else ''}, "
            "inside what XLA compiles; use hardware.xla=false, or strategy=one_device"
        )


def choose_xla(
    plan: Plan,
    model: keras.Model,
    feed: Feed,
    *,
    strategy_name: str,
    device_kind: str,
    policy: str,
    keeps_rows: bool,
    steps: int,
) -> XlaChoice:
    """Chooses what XLA compiles, by rules that depend on the config, the model and the kind of device only.

    Args:
        strategy_name: the resolved strategy.
        device_kind: `CPU`, `GPU` or `TPU`.
        policy: the precision policy.
        keeps_rows: whether gradients of embedding tables are by rows.
    """
    setting = plan.hardware.xla
    if setting is False:
        return XlaChoice("none", "hardware.xla=false")
    obstacle = find_obstacle(
        plan,
        model,
        feed,
        strategy_name=strategy_name,
        device_kind=device_kind,
        policy=policy,
        keeps_rows=keeps_rows,
    )
    if setting == "auto" and obstacle is None and is_short(steps, model.count_params()):
        return XlaChoice("none", f"compiling takes longer than it saves in {steps:,} steps of this model")
    if obstacle is None:
        return XlaChoice("loop", "faster on a CPU for models without convolutions, pooling or recurrent layers")
    if setting is True:
        return XlaChoice("passes", f"hardware.xla=true; {obstacle}")
    return XlaChoice("none", obstacle)


def is_short(steps: int, parameters: int) -> bool:
    """Returns whether a run saves less time than XLA takes to compile."""
    return steps * math.sqrt(parameters) < MIN_WORK


def find_obstacle(
    plan: Plan,
    model: keras.Model,
    feed: Feed,
    *,
    strategy_name: str,
    device_kind: str,
    policy: str,
    keeps_rows: bool,
) -> str | None:
    """Returns why the whole loop is not compiled, or None. `choose_xla` describes the arguments."""
    obstacles = {
        f"strategy={strategy_name}: only one device's loop is compiled as a whole": strategy_name != "one_device",
        "training.engine=fit": plan.training.engine == "fit",
        "hardware.deterministic=true": plan.hardware.deterministic,
        "debug.eager=true": plan.debug.eager,
        "debug.nan=true": plan.debug.nan,
        "training.step": plan.training.step is not None,
        "hardware.remat: XLA would reuse what is to be computed again": plan.hardware.remat is not False,
        f"not measured on a {device_kind}": device_kind != "CPU",
        f"precision={policy}": policy != "float32",
        "the examples are no arrays in the device's memory, or are augmented": not feed.is_indexed,
        "embedding tables are updated by rows": keeps_rows,
    }
    for obstacle, applies in obstacles.items():
        if applies:
            return obstacle
    for layer in flatten_layers(model):
        if isinstance(layer, SLOW_LAYERS):
            return f"the layer {layer.name}: XLA is slow with {type(layer).__name__} on a CPU"
    return None


def find_slow_operation(graph: Any) -> str | None:
    """Returns why compiling the traced loop would be slow; None if it would not."""
    operations = list_operation_types(graph)
    for operation in operations:
        if operation.startswith(SLOW_OPERATIONS):
            return f"XLA is slow with the operation {operation} on a CPU"
    if len(operations) > MAX_OPERATIONS:
        return f"a training step has {len(operations)} operations, and XLA compiles more than {MAX_OPERATIONS} slowly"
    return None
