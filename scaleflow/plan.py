"""From a composed config to a `Plan`: typed, checked, every refusal with its reason.

Nothing here imports TensorFlow, Keras or MLflow, so that a mistake is answered in about a second.
What needs devices, a `_target_` or the store is checked later, by the worker and the tracker.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import socket
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin
from urllib.parse import urlsplit

from scaleflow.cluster import TF_CONFIG, parse, port_is_free
from scaleflow.errors import Refusal
from scaleflow.interfaces import (
    Batching,
    Cluster,
    Dataset,
    Debug,
    EarlyStopping,
    Hardware,
    Model,
    Optimizer,
    Place,
    Plan,
    Precision,
    Strategy,
    Target,
    Tracking,
    Training,
)
from scaleflow.masking import masked

#: Options that the documentation names as coming. They are refused in those words, not as unknown.
NOT_YET_OPTIONS: Mapping[str, Sequence[str]] = {
    "strategy": ("parameter_server", "tpu", "pipeline"),
    "hardware": ("tpu",),
    "dataset": ("mnist", "cifar10", "imdb_reviews", "tfds", "image_folder", "text_folder", "csv", "tfrecord", "npz"),
    "model": ("resnet", "text", "transformer", "linear"),
    "debug": ("overfit", "fast", "nan", "placement", "eager"),
    "checkpoint": (),
    "profiler": (),
    "cluster": ("slurm", "ray", "kubernetes"),
}

#: The same for keys; a group's name stands for every key in it.
NOT_YET_KEYS: Sequence[str] = (
    "resume",
    "checkpoint",
    "profiler",
    "cluster.servers",
    "cluster.max_restarts",
    "cluster.min_workers",
    "cluster.stall_seconds",
    "cluster.submit",
    "strategy.partitioner",
    "strategy.stages",
    "strategy.micro_batches",
    "hardware.xla",
    "hardware.tpu",
    "model.init_from",
    "training.callbacks",
    "training.step",
    "training.on_nan",
    "tracking.offline",
    "tracking.register_as",
    "tracking.system_metrics",
    "tracking.tensorboard",
)

#: Values of keys that are there already.
NOT_YET_VALUES: Mapping[tuple[str, object], str] = {
    ("training.engine", "fit"): "training.engine=loop",
}

PROBE_SECONDS = 3.0

T = TypeVar("T")


def make_plan(
    config: Mapping[str, Any], choices: Mapping[str, str], search: Sequence[str] = (), look_outside: bool = True
) -> Plan:
    """Checks a composed config as far as that needs no TensorFlow.

    Args:
        config: the config with interpolations resolved, as plain containers.
        choices: the option chosen in each config group.
        search: folders in which `_target_` modules are looked for.
        look_outside: look at the tracking store too; a worker leaves that to its launcher.

    Raises:
        Refusal: naming the key, the value and what would work.
    """
    sections = dict(config)
    plan = Plan(
        strategy=read(Strategy, sections.pop("strategy", {}), "strategy"),
        hardware=read(Hardware, sections.pop("hardware", {}), "hardware"),
        precision=read(Precision, sections.pop("precision", {}), "precision"),
        dataset=read_with_target(Dataset, sections.pop("dataset", {}), "dataset"),
        model=read_with_target(Model, sections.pop("model", {}), "model"),
        optimizer=read_with_target(Optimizer, sections.pop("optimizer", {}), "optimizer"),
        training=read(Training, sections.pop("training", {}), "training"),
        tracking=read(Tracking, sections.pop("tracking", {}), "tracking"),
        cluster=read(Cluster, sections.pop("cluster", {}), "cluster"),
        debug=read(Debug, sections.pop("debug", None) or {}, "debug"),
        seed=typed(sections.pop("seed", 0), int, "seed", {"at_least": 0, "at_most": 2**31 - 1}),
        choices=choices,
        config=config,
        search=search,
    )
    for key in sections:
        raise unknown_key(key, [f.name for f in dataclasses.fields(Plan)])
    plan = follow_tf_config(plan)
    check_combinations(plan)
    if not look_outside:
        return plan
    place = place_of(plan)
    if place and not port_is_free(place.peers[place.worker]):
        raise Refusal(f"TF_CONFIG: the port of {place.peers[place.worker]}, this worker's, is in use; name a free one")
    return dataclasses.replace(plan, tracking=resolve_tracking(plan.tracking))


# ---------------------------------------------------------------------------------------------
# Reading one section
# ---------------------------------------------------------------------------------------------


def read(cls: type[T], section: object, key: str) -> T:
    """Makes the dataclass `cls` from a mapping, checking names, types and ranges."""
    if not isinstance(section, Mapping):
        raise Refusal(f"{key}={show(section)}: expected keys under {key}, such as {key}.{fields_of(cls)[0].name}=...")
    known = {f.name: f for f in fields_of(cls)}
    hints = typing.get_type_hints(cls)
    for name in section:
        if name not in known:
            raise unknown_key(f"{key}.{name}", [f"{key}.{k}" for k in known])
    values = {name: typed(value, hints[name], f"{key}.{name}", known[name].metadata) for name, value in section.items()}
    return cls(**values)


def read_with_target(cls: type[T], section: object, key: str) -> T:
    """Like `read`, where the keys that scaleflow has no name for are the `_target_`'s arguments."""
    if not isinstance(section, Mapping):
        raise Refusal(f"{key}={show(section)}: expected keys under {key}, with {key}._target_ among them")
    own = {f.name for f in fields_of(cls)} - {"target"}
    path = section.get("_target_")
    if not isinstance(path, str) or not path.strip():
        raise Refusal(f"{key}._target_={show(path)}: expected the dotted name of a class or function")
    arguments = {k: v for k, v in section.items() if k not in own and k not in ("_target_", "_partial_")}
    known = {f.name: f for f in fields_of(cls)}
    hints = typing.get_type_hints(cls)
    values = {k: typed(section[k], hints[k], f"{key}.{k}", known[k].metadata) for k in section if k in own}
    return cls(**{"target": Target(key, path.strip(), arguments), **values})


def fields_of(cls: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def typed(value: object, hint: Any, key: str, limits: Mapping[str, Any]) -> Any:
    """`value` as the type `hint` and within `limits`, or a refusal that says what was expected."""
    if (key, value if isinstance(value, str) else None) in NOT_YET_VALUES:
        raise Refusal(f"{key}={value}: not available yet; use {NOT_YET_VALUES[key, value]}")
    found = convert(value, hint, key)
    if found is _NO or not within(found, limits):
        raise Refusal(f"{key}={show(value)}: expected {describe(hint, limits)}")
    return found


_NO = object()


def convert(value: object, hint: Any, key: str) -> Any:
    """`value` as `hint`, or `_NO`. Text is never read as a number: YAML has done that already."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        found = (convert(value, option, key) for option in get_args(hint))
        return next((f for f in found if f is not _NO), _NO)
    if origin is Literal:
        return value if isinstance(value, str) and value in get_args(hint) else _NO
    if origin is list:
        items = [convert(v, get_args(hint)[0], key) for v in value] if isinstance(value, list | tuple) else [_NO]
        return _NO if any(i is _NO for i in items) else items
    if origin is dict:
        return {str(k): str(v) for k, v in value.items()} if isinstance(value, Mapping) else _NO
    if dataclasses.is_dataclass(hint):
        return read(typing.cast(type[Any], hint), value, key) if isinstance(value, Mapping) else _NO
    return convert_plain(value, hint)


def convert_plain(value: object, hint: Any) -> Any:
    if hint is type(None):
        return None if value is None else _NO
    if isinstance(value, bool) or hint is bool:
        return value if isinstance(value, bool) and hint is bool else _NO
    if hint is float:
        finite = isinstance(value, int | float) and abs(value) < float("inf")
        return float(typing.cast(float, value)) if finite else _NO
    return value if isinstance(value, hint) else _NO


def within(value: object, limits: Mapping[str, Any]) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return all(
        (limits.get("at_least") is None or n >= limits["at_least"])
        and (limits.get("at_most") is None or n <= limits["at_most"])
        and (limits.get("above") is None or n > limits["above"])
        for n in numbers
        if isinstance(n, int | float)
    )


def describe(hint: Any, limits: Mapping[str, Any]) -> str:
    """A type and its limits in a user's words: `an integer, at least 1, or null`."""
    if get_origin(hint) in (Union, types.UnionType):
        options = [o for o in get_args(hint) if o is not type(None)]
        words = " or ".join(describe(o, limits if o in (int, float) else {}) for o in options)
        return words + (", or null" if type(None) in get_args(hint) else "")
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint)) if len(get_args(hint)) > 1 else str(get_args(hint)[0])
    if get_origin(hint) is list:
        return f"a list such as [{'0, 1' if get_args(hint)[0] is int else ''}]"
    if dataclasses.is_dataclass(hint):
        return "{" + ", ".join(f.name for f in dataclasses.fields(hint)) + "}"
    names: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    words = names.get(hint, "keys and values")
    bounds = [("at least", limits.get("at_least")), ("above", limits.get("above")), ("at most", limits.get("at_most"))]
    return words + "".join(f", {word} {bound}" for word, bound in bounds if bound is not None)


def show(value: object) -> str:
    """A value as a user would type it, secrets masked and cut where it is long."""
    value = masked(value)
    if isinstance(value, str) and re.fullmatch(r"null|true|false|[+-]?\d*\.?\d+", value):
        return f"'{value}'"  # text, where it looks like something else
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ---------------------------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------------------------


def unknown_key(key: str, known: Iterable[str]) -> Refusal:
    """The refusal of a key that is not there, with the nearest one that is."""
    if any(key == k or key.startswith(k + ".") for k in NOT_YET_KEYS):
        return Refusal(f"{key}: not available yet")
    return Refusal(f"{key}: there is no such key" + did_you_mean(key, known, "; --cfg job lists them all"))


def unknown_option(group: str, option: str, available: Sequence[str]) -> Refusal:
    """The refusal of a group's option that is not there, with those that are."""
    there = ", ".join(available)
    if option in NOT_YET_OPTIONS.get(group, ()):
        return Refusal(f"{group}={option}: not available yet; there is {there}")
    return Refusal(f"{group}={option}: there is no such option" + did_you_mean(option, available, "") + f" ({there})")


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """The nearest of the known words; of dotted keys, first among those with the same parent."""
    words = list(known)
    parent, dot, leaf = word.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in words if k.rpartition(".")[0] == parent}
    near = [siblings[k] for k in difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6)]
    near += difflib.get_close_matches(word, words, n=1, cutoff=0.85) if dot else []
    return f"; did you mean {near[0]}?" if near else otherwise


# ---------------------------------------------------------------------------------------------
# What works with what
# ---------------------------------------------------------------------------------------------


def check_combinations(plan: Plan) -> None:
    """Refuses what cannot work together, as far as the config alone tells."""
    for applies, reason in COMBINATIONS:
        if applies(plan):
            raise Refusal(reason(plan))
    if plan.hardware.name == "cpu":
        local = 1 if plan.strategy.name == "one_device" else plan.hardware.logical_devices
        batching(plan.training, local * workers(plan))


def follow_tf_config(plan: Plan) -> Plan:
    """`strategy=auto` becomes multi_worker where TF_CONFIG names several workers.

    Raises:
        Refusal: if TF_CONFIG is asked for, and is missing or wrong.
    """
    text = os.environ.get(TF_CONFIG)
    if plan.cluster.name == "local" and (plan.strategy.name != "auto" or not text):
        return plan
    place = parse(text)
    if plan.strategy.name == "auto" and len(place.peers) > 1:
        there = Cluster(name="tf_config", start_seconds=plan.cluster.start_seconds)
        return dataclasses.replace(plan, strategy=Strategy(name="multi_worker"), cluster=there)
    return plan


def place_of(plan: Plan) -> Place | None:
    """This machine's place in a cluster of several machines, or None where all workers are on this one."""
    return parse(os.environ.get(TF_CONFIG)) if plan.cluster.name == "tf_config" else None


def workers(plan: Plan) -> int:
    """How many worker processes the plan has, on all machines."""
    if plan.strategy.name != "multi_worker":
        return 1
    place = place_of(plan)
    return len(place.peers) if place else plan.cluster.workers or 2


#: (does it apply, the refusal in words), in the order in which they are looked at.
COMBINATIONS: Sequence[tuple[Callable[[Plan], bool], Callable[[Plan], str]]] = (
    (
        lambda p: p.hardware.memory_limit_mb is not None and p.hardware.name == "cpu",
        lambda p: (
            f"hardware.memory_limit_mb={p.hardware.memory_limit_mb}: only a GPU takes a memory limit; "
            "use hardware=gpu, or leave it null"
        ),
    ),
    (
        lambda p: p.hardware.memory_growth and p.hardware.memory_limit_mb is not None,
        lambda p: (
            f"hardware.memory_growth=true with hardware.memory_limit_mb={p.hardware.memory_limit_mb}: "
            "a limited device can't grow; leave one of the two"
        ),
    ),
    (
        lambda p: p.hardware.name == "gpu" and p.hardware.logical_devices > 1 and p.hardware.memory_limit_mb is None,
        lambda p: (
            f"hardware.logical_devices={p.hardware.logical_devices} with hardware=gpu: dividing a GPU needs "
            "hardware.memory_limit_mb, the memory of each logical device"
        ),
    ),
    (
        lambda p: p.hardware.devices is not None and not p.hardware.devices,
        lambda p: "hardware.devices=[]: expected at least one index, or null for every device",
    ),
    (
        lambda p: (
            p.hardware.devices is not None
            and (min(p.hardware.devices) < 0 or len(set(p.hardware.devices)) < len(p.hardware.devices))
        ),
        lambda p: f"hardware.devices={p.hardware.devices}: expected different indices from 0",
    ),
    (
        lambda p: p.cluster.workers not in (None, 1) and p.strategy.name != "multi_worker",
        lambda p: (
            f"cluster.workers={p.cluster.workers} with strategy={p.strategy.name}: has one process; "
            "use strategy=multi_worker, or leave cluster.workers null"
        ),
    ),
    (
        lambda p: p.cluster.name == "tf_config" and p.strategy.name in ("one_device", "mirrored"),
        lambda p: (
            f"cluster=tf_config with strategy={p.strategy.name}: stays on one machine; use "
            "strategy=multi_worker, or cluster=local"
        ),
    ),
    (
        lambda p: p.cluster.name == "tf_config" and p.cluster.workers is not None,
        lambda p: (
            f"cluster.workers={p.cluster.workers} with cluster=tf_config: TF_CONFIG names the workers; leave it null"
        ),
    ),
    (
        lambda p: p.debug.inline and workers(p) > 1,
        lambda p: (
            f"debug=inline with {workers(p)} workers: they need a process each; use strategy=one_device or "
            "mirrored, or cluster.workers=1"
        ),
    ),
    (
        lambda p: p.strategy.communication == "nccl" and p.hardware.name == "cpu",
        lambda p: "strategy.communication=nccl with hardware=cpu: NCCL connects GPUs; use ring, or auto",
    ),
    (
        lambda p: p.optimizer.schedule == "step" and p.optimizer.step_every is None,
        lambda p: (
            "optimizer.schedule=step: give optimizer.step_every, the updates after which the rate is "
            "multiplied by optimizer.step_factor"
        ),
    ),
    (
        lambda p: isinstance(p.dataset.validation, float) and not 0 <= p.dataset.validation < 1,
        lambda p: (
            f"dataset.validation={p.dataset.validation}: expected a fraction from 0 to less than 1, "
            "the name of a split, or null"
        ),
    ),
    (
        lambda p: (
            p.training.early_stopping is not None
            and p.training.early_stopping.monitor.startswith("val/")
            and not p.dataset.validation
        ),
        lambda p: (
            f"training.early_stopping.monitor={typing.cast(EarlyStopping, p.training.early_stopping).monitor} "
            f"with dataset.validation={show(p.dataset.validation)}: there is nothing to validate on; "
            "set dataset.validation=0.1, or monitor train/loss"
        ),
    ),
)


def batching(training: Training, replicas: int) -> Batching:
    """How each global batch is divided.

    Raises:
        Refusal: if `global_batch_size` does not divide among the replicas and micro-batches.
    """
    if training.global_batch_size is None:
        return Batching(training.batch_size, training.accumulate, replicas)
    parts = replicas * training.accumulate
    size, rest = divmod(training.global_batch_size, parts)
    if rest or not size:
        near = sorted({max(1, size) * parts, (size + 1) * parts})
        raise Refusal(
            f"training.global_batch_size={training.global_batch_size}: does not divide by {replicas} replica(s) x "
            f"training.accumulate={training.accumulate}; use {' or '.join(map(str, near))}"
        )
    return Batching(size, training.accumulate, replicas)


# ---------------------------------------------------------------------------------------------
# The store, as far as it shows without MLflow
# ---------------------------------------------------------------------------------------------


def resolve_tracking(tracking: Tracking) -> Tracking:
    """The tracking options with an absolute URI, its store looked at from outside."""
    if tracking.name == "none":
        return tracking
    origin = "tracking.uri" if tracking.uri is not None else "MLFLOW_TRACKING_URI"
    uri = tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    scheme = uri.partition(":")[0].lower() if ":" in uri else ""
    if uri in ("sqlite://", "sqlite:///:memory:"):
        raise Refusal(f"{origin}={uri}: would be gone with the run; use sqlite:///mlflow.db")
    if uri.startswith("sqlite:///"):
        uri = absolute_sqlite(uri, origin)
    elif scheme in ("http", "https"):
        probe(uri, origin)
    elif scheme in ("", "file"):
        raise Refusal(
            f"{origin}={masked(uri)}: MLflow 3 keeps no runs in plain folders; use sqlite:///mlflow.db or http://HOST:PORT"
        )
    return dataclasses.replace(tracking, uri=uri)


def absolute_sqlite(uri: str, origin: str) -> str:
    path = Path(uri.removeprefix("sqlite:///")).expanduser().absolute()
    if path.is_dir():
        raise Refusal(f"{origin}={uri}: {path} is a folder; name a file in it, such as {path}/mlflow.db")
    if not path.parent.is_dir():
        raise Refusal(f"{origin}={uri}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise Refusal(f"{origin}={uri}: {path} cannot be written; choose a file in a folder of yours")
    return f"sqlite:///{path}"


def probe(uri: str, origin: str) -> None:
    """Opens a TCP connection to the server, so that an unreachable one costs seconds, not minutes."""
    try:
        parts = urlsplit(uri)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=PROBE_SECONDS).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Refusal(
            f"{origin}={masked(uri)}: no tracking server answers there ({reason}); start one with "
            "`mlflow server`, or use tracking.uri=sqlite:///mlflow.db"
        ) from None
