"""Sets up the process of a script: devices, strategy, precision and seed, as the command asks for them."""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from scaleflow import hardware, precision, strategy
from scaleflow.compat.keras import train_like_one_replica
from scaleflow.config.plan import check_rules, set_values
from scaleflow.features.script.feature import ScriptOptions
from scaleflow.features.script.interruptions import ScriptRefused
from scaleflow.features.script.source import Program
from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import Emit, Note

#: The strategies of TensorFlow that a script can create.
STRATEGIES = ("MirroredStrategy", "MultiWorkerMirroredStrategy", "OneDeviceStrategy", "TPUStrategy")
OTHER_STRATEGIES = ("ParameterServerStrategy", "CentralStorageStrategy")


@dataclass(frozen=True)
class ScriptRuntime:
    """The strategy, the precision and the devices that a script runs with.

    Attributes:
        strategy: the strategy whose scope the script runs in. None if it runs in no scope; then it may create its own.
        strategy_name: its name in the params of the run.
        policy: Keras's dtype policy before the script begins.
        device_kind: the kind of the devices, `CPU` or `GPU`.
    """

    strategy: tf.distribute.Strategy | None
    strategy_name: str
    policy: str
    device_kind: str

    def to_values(self) -> dict[str, Any]:
        """Returns the `resolved.` params of the run."""
        replicas = 1 if self.strategy is None else self.strategy.num_replicas_in_sync
        hardware_name = self.device_kind.lower()
        return {
            "strategy": self.strategy_name,
            "precision": self.policy,
            "hardware": hardware_name,
            "replicas": replicas,
        }


def set_up_runtime(plan: Plan, program: Program, emit: Emit) -> ScriptRuntime:
    """Sets up TensorFlow and Keras. Call it before any operation of TensorFlow.

    Raises ConfigError if this machine or the script does not allow what the command asks for.
    """
    typed = plan.of(ScriptOptions).typed
    devices = hardware.configure_devices(plan.hardware)
    name = strategy.resolve_strategy(plan.strategy, devices.names)
    strategy_line = find_strategy_line(program.tree)
    if strategy_line is not None and "strategy" not in typed:
        name = "one_device"
        emit(Note(f"{program.path.name}, line {strategy_line}: the script creates its own strategy, which is used"))
    if name == "mirrored" and "GradientTape" in ast.dump(program.tree) and not may_call_fit(program):
        name = "one_device"
        emit(
            Note(
                f"{program.path.name} never calls model.fit, so its own loop runs without strategy={plan.strategy.name}"
            )
        )
    policy = precision.resolve_policy(plan.precision, devices.kind)
    known = {"strategy.name": name, "hardware.name": devices.kind.lower(), "precision.name": policy}
    for warning in check_rules(set_values(plan, known)):
        emit(Note(warning))
    created = None
    if name == "mirrored":
        created, note = strategy.create_strategy(name, devices.names, plan.strategy)
        if note is not None:
            emit(Note(note))
    if "seed" in typed:
        keras.utils.set_random_seed(plan.seed)
    if "precision" in typed:
        precision.apply_policy(policy)
    return ScriptRuntime(created, name, keras.config.dtype_policy().name, devices.kind)


def find_strategy_line(tree: ast.Module) -> int | None:
    """Returns the line where a script creates a strategy of TensorFlow; None if it creates none."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in STRATEGIES or called in OTHER_STRATEGIES:
            return node.lineno
    return None


def may_call_fit(program: Program) -> bool:
    """Returns whether a script calls a method `fit`, or imports a module of its own, which may call it."""
    folder = program.path.absolute().parent
    for node in ast.walk(program.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("fit", "train_on_batch"):
            return True
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            top = folder / name.partition(".")[0]
            if top.is_dir() or top.with_suffix(".py").is_file():
                return True
    return False


@contextlib.contextmanager
def enter_runtime(runtime: ScriptRuntime, plan: Plan, program: Program, emit: Emit) -> Iterator[None]:
    """Enters the strategy of a script, and keeps the script from changing what the command has set.

    With a strategy, losses and gradients become means over its replicas, whether Keras, TensorFlow's functions for
    losses or the script compute them.

    Inside the `with` block, a call that would change a typed strategy or precision raises ScriptRefused. A call that
    would change a typed seed sets that seed again, and a note says so.
    """
    typed = plan.of(ScriptOptions).typed
    with contextlib.ExitStack() as replaced:
        if runtime.strategy is not None:
            replaced.enter_context(train_like_one_replica())
            average_replica_losses(runtime.strategy.num_replicas_in_sync, replaced)
            replaced.enter_context(runtime.strategy.scope())
        replace_attribute(tf, "print", make_shown_print(tf.print), replaced)
        if "strategy" in typed:
            refuse_strategies(plan, program, replaced)
        if "precision" in typed:
            refuse_policies(plan, program, replaced)
        if "seed" in typed:
            keep_seed(plan, emit, replaced)
        yield


def make_shown_print(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `tf.print` with the standard output in place of the standard error, which goes to the log only."""

    @functools.wraps(original)
    def print_shown(*inputs: Any, **named: Any) -> Any:
        if named.get("output_stream", sys.stderr) is sys.stderr:
            named["output_stream"] = sys.stdout
        return original(*inputs, **named)

    shown: Callable[..., Any] = tf.autograph.experimental.do_not_convert(print_shown)
    return shown


def refuse_strategies(plan: Plan, program: Program, replaced: contextlib.ExitStack) -> None:
    """Refuses new strategies. The classes stay, because Keras asks whether a strategy is one of them."""
    reason = f"strategy={plan.strategy.name}"
    for name in (*STRATEGIES, *OTHER_STRATEGIES):
        kind = getattr(tf.distribute, name, None)
        if kind is not None:
            refuse = make_refusal(f"{reason}: the script creates its own tf.distribute.{name}", program, "strategy")
            replace_attribute(kind, "__init__", refuse, replaced)


def average_replica_losses(replicas: int, replaced: contextlib.ExitStack) -> None:
    """Makes TensorFlow's functions for losses return the mean of a replica.

    They divide the sum over the examples of a replica by the size of the global batch, because they expect that the
    replicas are added up. `train_like_one_replica` averages the replicas.
    """
    for name in ("compute_average_loss", "scale_regularization_loss"):
        replace_attribute(tf.nn, name, make_average(getattr(tf.nn, name), replicas), replaced)


def make_average(original: Callable[..., Any], replicas: int) -> Callable[..., Any]:
    def compute(*arguments: Any, **named: Any) -> Any:
        return original(*arguments, **named) * replicas

    return compute


def refuse_policies(plan: Plan, program: Program, replaced: contextlib.ExitStack) -> None:
    reason = f"precision={plan.precision.name}: the script sets its own dtype policy"
    refuse = make_refusal(reason, program, "precision")
    for module in (keras.config, keras.mixed_precision):
        for name in ("set_dtype_policy", "set_global_policy"):
            if hasattr(module, name):
                replace_attribute(module, name, refuse, replaced)


def make_refusal(reason: str, program: Program, key: str) -> Callable[..., Any]:
    """Returns a function that raises ScriptRefused, which names the line of the script that calls it."""

    def refuse(*arguments: Any, **named: Any) -> Any:
        line = find_line(program.code_file)
        place = f" in line {line}" if line else ""
        raise ScriptRefused(f"{reason}{place}; remove it from the script, or leave {key} out of the command")

    return refuse


def find_line(file: Path) -> int | None:
    """Returns the line of a script that is running now; None if only other files are."""
    name = str(file)
    for frame in reversed(traceback.extract_stack()):
        if frame.filename == name:
            return frame.lineno
    return None


def keep_seed(plan: Plan, emit: Emit, replaced: contextlib.ExitStack) -> None:
    import random

    import numpy

    @functools.cache  # one note for all calls
    def tell() -> None:
        emit(Note(f"seed={plan.seed} of the command replaces the seeds of the script"))

    functions: Sequence[tuple[Any, str]] = (
        (keras.utils, "set_random_seed"),
        (tf.random, "set_seed"),
        (numpy.random, "seed"),
        (random, "seed"),
    )
    for module, name in functions:
        replace_attribute(module, name, make_kept_seed(getattr(module, name), plan.seed, tell), replaced)


def make_kept_seed(original: Callable[..., Any], seed: int, tell: Callable[[], None]) -> Callable[..., Any]:
    """Returns a function that sets the command's seed in place of the one that it gets. It calls `tell` first."""

    def set_seed(*arguments: Any, **named: Any) -> Any:
        tell()
        return original(seed)

    return set_seed


def replace_attribute(module: Any, name: str, value: Any, replaced: contextlib.ExitStack) -> None:
    """Replaces an attribute of a module until a stack is closed."""
    before = getattr(module, name)
    setattr(module, name, value)
    replaced.callback(setattr, module, name, before)
