"""Compares a Keras model's compile arguments with the run's own loss, metrics and optimizer.

If the compiled loss differs from the run's loss, the run is refused, because it would train a different model. A note
names the compiled optimizer and metrics, which have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Outputs, OutputStructure, Plan, Target

#: Keras losses that equal the default loss of a kind of target. The usual name comes first.
DEFAULT_LOSSES: Mapping[str, tuple[str, ...]] = {
    "classification": ("SparseCategoricalCrossentropy", "CategoricalCrossentropy"),
    "binary": ("BinaryCrossentropy",),
    "multi_label": ("BinaryCrossentropy",),
    "regression": ("MeanSquaredError",),
}

#: Metrics that every run reports, by the kind of target.
DEFAULT_METRICS: Mapping[str, frozenset[str]] = {
    "classification": frozenset({"accuracy", "sparsecategoricalaccuracy", "categoricalaccuracy"}),
    "binary": frozenset({"accuracy", "binaryaccuracy"}),
    "multi_label": frozenset({"accuracy", "binaryaccuracy"}),
    "regression": frozenset({"meanabsoluteerror", "rootmeansquarederror", "r2score"}),
}

#: Loss arguments that follow from the form of targets and outputs, or that do not change the value.
FORM_ARGUMENTS = ("name", "from_logits", "dtype", "axis", "fn", "ignore_class")

#: Options of a Keras optimizer that change nothing by themselves.
NAMES_OF_OPTIMIZERS = ("name", "ema_momentum", "is_legacy_optimizer")

#: Keras's short names, which users type most often.
SHORT_NAMES = {"MeanSquaredError": "mse", "MeanAbsoluteError": "mae", "BinaryCrossentropy": "binary_crossentropy"}


@dataclass(frozen=True)
class CompiledLoss:
    """A loss from a model's compile arguments."""

    name: str  # the name of Keras's class, or of the user's class or function
    is_of_keras: bool
    arguments: Mapping[str, Any] = field(default_factory=dict)  # only values that differ from the defaults

    def __str__(self) -> str:
        arguments = ", ".join(f"{key}={value}" for key, value in self.arguments.items())
        return f"{self.name}({arguments})" if arguments else self.name

    @property
    def word(self) -> str:
        """The value of `objective.loss` that selects this loss."""
        if not self.is_of_keras:
            return f"{{_target_: MODULE.{self.name}}}"
        if not self.arguments:
            return SHORT_NAMES.get(self.name, self.name)
        arguments = ", ".join(f"{key}: {value}" for key, value in self.arguments.items())
        return f"{{_target_: keras.losses.{self.name}, {arguments}}}"


def check_compiled(compiled: Mapping[str, Any], outputs: OutputStructure, plan: Plan) -> str | None:
    """Returns a note on the compile arguments that the run ignores; None if it ignores nothing.

    Args:
        compiled: Keras's compile config of the model.
        outputs: the outputs that the run trains.

    Raises ConfigError if the compiled loss differs from the run's loss and `objective.loss` is not typed, or if the
    compiled weights of losses differ.
    """
    named = outputs if isinstance(outputs, Mapping) else {"": outputs}
    losses = pick_by_output(compiled.get("loss"), list(named))
    unused = []
    for name, described in named.items():
        loss = read_loss(losses.get(name))
        if loss is None:
            continue
        key = f"objective.loss.{name}" if name else "objective.loss"
        configured = find_configured_loss(plan, name)
        if configured is None and plan.training.step is None and not is_default(loss, described, plan):
            default = DEFAULT_LOSSES[described.kind][0]
            raise ConfigError(
                f"model: it is compiled with the loss {loss}, and this run would train {describe_output(name)}with "
                f"{default}, the loss of {described.kind} targets; write {key}={loss.word} to train with the compiled "
                f"loss, or {key}={SHORT_NAMES.get(default, default)} to train with that of the targets"
            )
        if (configured is not None and not is_same_loss(loss, configured)) or plan.training.step is not None:
            unused.append(f"the loss {loss}{describe_output(name, ' of ')}")
    unused += check_loss_weights(compiled.get("loss_weights"), list(named), plan)
    unused += list_unused_optimizer(compiled, plan)
    unused += list_unused_metrics(compiled, named, plan)
    if not unused:
        return None
    return f"model: it is compiled with parts that this run does not use: {'; '.join(unused)}"


def describe_output(name: str, before: str = "") -> str:
    return f"{before}{name} " if name else ""


def pick_by_output(value: Any, names: list[str]) -> dict[str, Any]:
    """Returns a compile argument by output. It is one value for all, a list in the order of the outputs, or a dict."""
    if isinstance(value, Mapping) and "class_name" not in value:
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(zip(names, value, strict=False))
    return dict.fromkeys(names, value)


def read_loss(value: Any) -> CompiledLoss | None:
    """Reads a loss from a compile config: a name, or a serialized class or function. None without a loss."""
    from scaleflow.objective import find_loss_class, read_loss_defaults

    if value is None:
        return None
    if isinstance(value, str):
        loss_class = find_loss_class(value)
        return CompiledLoss(loss_class or value, loss_class is not None)
    kind = str(value.get("class_name"))
    config = value.get("config")
    if kind == "__lambda__":
        return CompiledLoss("lambda", is_of_keras=False)
    name = config if kind == "function" and isinstance(config, str) else kind
    loss_class = find_loss_class(name)
    if loss_class is None or not isinstance(config, Mapping):
        return CompiledLoss(loss_class or name, loss_class is not None)
    defaults = read_loss_defaults(loss_class)
    arguments = {}
    for key, argument in config.items():
        if key not in FORM_ARGUMENTS and key in defaults and argument != defaults[key]:
            arguments[key] = argument
    return CompiledLoss(loss_class, True, arguments)


def find_configured_loss(plan: Plan, name: str) -> Target | str | None:
    """Returns the loss that the config sets for an output; None if the kind of target chooses it."""
    options = plan.objective
    if options.levels is not None:
        return "quantiles"
    if isinstance(options.loss, dict):
        return options.loss.get(name)
    return options.loss


def is_default(loss: CompiledLoss, described: Outputs, plan: Plan) -> bool:
    """Returns whether a compiled loss equals the default loss of the kind of target."""
    arguments = dict(loss.arguments)
    if arguments.get("label_smoothing") == plan.objective.label_smoothing:
        del arguments["label_smoothing"]
    return loss.name in DEFAULT_LOSSES[described.kind] and not arguments


def is_same_loss(loss: CompiledLoss, configured: Target | str) -> bool:
    """Returns whether a compiled loss equals the loss that the config sets."""
    from scaleflow.objective import find_loss_class

    if isinstance(configured, str):
        return find_loss_class(configured) == loss.name and not loss.arguments
    arguments = {key: value for key, value in configured.arguments.items() if key not in FORM_ARGUMENTS}
    return configured.path.rpartition(".")[2] == loss.name and arguments == dict(loss.arguments)


def check_loss_weights(weights: Any, names: list[str], plan: Plan) -> list[str]:
    """Returns the compiled loss weights if the run ignores them. Raises ConfigError if the user must type them."""
    compiled = {}
    for name, value in pick_by_output(weights, names).items():
        if value is not None:
            compiled[name] = float(value)
    if all(value == 1 for value in compiled.values()):
        return []
    if "" in compiled:
        return [f"loss_weights={compiled['']:g}"]
    configured = plan.objective.loss_weights
    if configured is None:
        text = ", ".join(f"{name}: {value:g}" for name, value in compiled.items())
        raise ConfigError(
            f"model: it is compiled with the loss weights {{{text}}}, and this run would weigh all outputs alike; "
            f"write 'objective.loss_weights={{{text}}}', or the weights that you want"
        )
    return [] if configured == compiled else ["the loss weights"]


def list_unused_optimizer(compiled: Mapping[str, Any], plan: Plan) -> list[str]:
    """Returns the compiled optimizer and the overrides that select it, if the run uses another one."""
    read = read_optimizer(compiled.get("optimizer") or compiled.get("optimizer_config"))
    if read is None:
        return []
    name, config = read
    is_same = plan.optimizer.target.path == f"keras.optimizers.{name}"
    if is_same and not find_other_values(config, list_run_values(plan)):
        return []
    option = find_optimizer_option(name)
    if option is None:
        return [f"the optimizer {name}"]
    values = {str(key): value for key, value in OmegaConf.load(option).items()}
    others = find_other_values(config, values)
    rate = others.pop("learning_rate", config.get("learning_rate"))
    if isinstance(rate, Mapping):
        return [f"the optimizer {name} with the schedule {rate.get('class_name')} (optimizer.schedule sets one)"]
    words = [f"optimizer={option.stem}", f"optimizer.learning_rate={format_number(rate)}"]
    shown = f"the optimizer {name} with the learning rate {format_number(rate)}"
    for key, value in others.items():
        if key in values:
            words.append(f"optimizer.{key}={format_number(value)}")
        else:
            shown += f" and {key}={format_number(value)}"
    has_words = all(key in values for key in others)
    return [f"{shown} ({' '.join(words)} trains with it)" if has_words else shown]


def read_optimizer(value: Any) -> tuple[str, Mapping[str, Any]] | None:
    """Reads an optimizer from a compile config. Returns the name of its class, and its options; None without one."""
    if isinstance(value, str):
        from scaleflow.optimizer import read_optimizer_defaults

        return read_optimizer_defaults(value)
    if not isinstance(value, Mapping):
        return None
    return str(value.get("class_name")), value.get("config") or {}


def find_optimizer_option(name: str) -> Path | None:
    """Returns the YAML file of `optimizer` for a class of Keras; None if there is none."""
    for file in (Path(__file__).parents[1] / "conf" / "optimizer").glob("*.yaml"):
        if file.stem.replace("_", "") == name.lower():
            return file
    return None


def list_run_values(plan: Plan) -> dict[str, Any]:
    """Returns the options of the run's optimizer. A learning rate that changes is no number."""
    options = plan.optimizer
    is_constant = options.schedule == "constant" and not options.warmup_steps and options.scale == "none"
    return {**options.target.arguments, "learning_rate": options.learning_rate if is_constant else None}


def find_other_values(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a compiled optimizer that differ from `values`. Without a value, an option is not set."""
    others: dict[str, Any] = {}
    for key, value in config.items():
        expected = values.get(key)
        is_number = isinstance(value, int | float) and isinstance(expected, int | float)
        if key in NAMES_OF_OPTIMIZERS or value == expected or (not value and not expected):
            continue
        if is_number and math.isclose(float(value), float(expected or 0), rel_tol=1e-6):
            continue  # Keras keeps the learning rate in float32
        others[key] = value
    return others


def format_number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def list_unused_metrics(compiled: Mapping[str, Any], named: Mapping[str, Outputs], plan: Plan) -> list[str]:
    """Returns the compiled metrics that the run does not report."""
    from scaleflow.objective import find_metric_class, plain_name

    known = {plain_name(str(name)) for name in list_metric_words(plan.objective.metrics)}
    for described in named.values():
        known.update(DEFAULT_METRICS[described.kind])
    metrics: dict[str, None] = {}
    for part in ("metrics", "weighted_metrics"):
        for name in list_metric_words(compiled.get(part)):
            metric = find_metric_class(name) or name
            if metric == "acc":
                metric = "accuracy"
            if not {plain_name(metric), plain_name(name)} & known:
                metrics[name] = None
    return [f"the metrics {', '.join(metrics)} (objective.metrics adds metrics)"] if metrics else []


def list_metric_words(value: Any) -> Iterator[str]:
    """Yields the names of metrics in a compile config, or in `objective.metrics`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Target):
        yield value.path.rpartition(".")[2]
    elif isinstance(value, Mapping) and "class_name" in value:
        kind = str(value["class_name"])
        config = value.get("config")
        yield config if kind == "function" and isinstance(config, str) else kind
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from list_metric_words(item)
