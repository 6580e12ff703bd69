"""What of a config may be followed that somebody else may have written: one that comes from a tracking server.

A config names code (`_target_`), files, addresses and interpolations. Of code only what is on a list is followed:
scaleflow's own datasets, models and steps, Keras's optimizers, a few of its callbacks, and what the user trusts by
name. Of the rest only what stays in this folder, and in the config.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import get_object

from scaleflow.config.parse import format_value
from scaleflow.errors import ConfigError

#: By the place of a `_target_`: what may be named there. Lists of names, not whole packages: a package has functions
#: that write files, fetch URLs or load code (keras.utils.get_file, tensorflow.io.write_file, keras.saving.load_model).
OPTIMIZERS = re.compile(r"keras\.optimizers\.[A-Z]\w*")
CALLBACKS = re.compile(
    r"keras\.callbacks\.(EarlyStopping|History|ProgbarLogger|ReduceLROnPlateau|SwapEMAWeights|TerminateOnNaN)"
)
STEPS = re.compile(r"scaleflow\.training\.examples\.[A-Za-z]\w*")

#: As an argument of another one. Layers only in so far as they neither load nor run what they are given.
PARTS = re.compile(
    r"keras\.(optimizers|optimizers\.schedules|initializers|regularizers|constraints)\.[A-Z]\w*"
    r"|keras\.layers\.(?!Lambda\b|TFSMLayer\b|JaxLayer\b|FlaxLayer\b|TorchModuleWrapper\b|StringLookup\b"
    r"|IntegerLookup\b|TextVectorization\b|Wrapper\b)[A-Z]\w*"
)

#: Keys by which Keras makes objects of mappings, and Hydra passes arguments by their place.
OF_OBJECTS = ("class_name", "registered_name", "_args_", "_recursive_", "_convert_")

#: An interpolation of another key, and nothing else.
OF_A_KEY = re.compile(r"\$\{[\w.\[\]]+\}")

ELSEWHERE = re.compile(r"[A-Za-z][\w+.-]*://|/.|~|.*\.\.(/|$)")

#: Their text is only ever shown.
ONLY_SHOWN = ("tracking.experiment", "tracking.run_name", "tracking.tags")


def check_targets(config: Mapping[str, Any], trusted: Sequence[str]) -> None:
    """Refuses a `_target_` that is neither on the lists nor trusted.

    Raises:
        ConfigError: with its name.
    """
    for key, path in targets_in(config):
        if not (isinstance(path, str) and (is_listed(key, path) or is_trusted(path, trusted))):
            where = str(path).rpartition(".")[0] or path
            raise ConfigError(
                f"{key}._target_={format_value(path)}: is not followed: it is none of the "
                f"{describe_allowed(key)}; if you know "
                f"its code, --trust {where} follows it (trusted_modules=[{where}])"
            )


def check_origins(config: Mapping[str, Any], trusted: Sequence[str]) -> None:
    """Refuses a `_target_` by whose name something else comes: what a trusted module has imported from another one.

    It imports the modules, so it is for the process that uses them.
    """
    for key, path in targets_in(config):
        if path in trusted or not is_trusted(path, trusted):
            continue
        try:
            origin = getattr(get_object(path), "__module__", None)
        except Exception:
            continue  # said in better words where it is loaded
        if not (isinstance(origin, str) and is_trusted(origin, trusted)):
            raise ConfigError(
                f"{key}._target_={path}: is not followed: it is not defined there but in {origin or 'no module'}; "
                f"--trust {path} follows it"
            )


def targets_in(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(the key of the mapping, its `_target_`) of all there are, those of arguments too."""
    if isinstance(config, Mapping):
        if "_target_" in config:
            yield key, config["_target_"]
        for name, value in config.items():
            yield from targets_in(value, f"{key}.{name}" if key else str(name))
    elif isinstance(config, list | tuple):
        for index, value in enumerate(config):
            yield from targets_in(value, f"{key}.{index}")


def is_listed(key: str, path: str) -> bool:
    own = path.removeprefix("tensorflow.") if path.startswith("tensorflow.keras.") else path
    if key in ("dataset", "model"):
        return own in list_factories(key)
    if key == "optimizer":
        return OPTIMIZERS.fullmatch(own) is not None
    if key == "training.step":
        return STEPS.fullmatch(own) is not None
    if re.fullmatch(r"training\.callbacks\.\d+", key):
        return CALLBACKS.fullmatch(own) is not None
    return PARTS.fullmatch(own) is not None


def describe_allowed(key: str) -> str:
    """In words."""
    if key in ("dataset", "model"):
        return f"{key}s that scaleflow brings"
    words = {"optimizer": "optimizers of Keras", "training.step": "steps that scaleflow brings"}
    if key.startswith("training.callbacks."):
        return "callbacks of Keras that keep to themselves"
    return words.get(key, "layers, schedules, initializers, regularizers and constraints of Keras")


def is_trusted(path: str, trusted: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in trusted)


@functools.cache
def list_factories(group: str) -> frozenset[str]:
    """What scaleflow's own options of a config group name."""
    conf = Path(__file__).parents[1] / "conf" / group
    found = (re.findall(r"^_target_: (\S+)", path.read_text(), re.M) for path in conf.glob("*.yaml"))
    return frozenset(target for targets in found for target in targets)


# ---------------------------------------------------------------------------------------------
# What a config names beside code
# ---------------------------------------------------------------------------------------------


def check_interpolation(key: str, value: str) -> None:
    """Refuses an interpolation that asks for more than another key: the environment, a file, a function."""
    if "${" in OF_A_KEY.sub("", value) or "\\${" in value:
        raise unresolvable_error(key, value)


def unresolvable_error(key: str, value: str) -> ConfigError:
    return ConfigError(
        f"{key}={format_value(value)}: is not resolved on this machine, since it comes from a tracked run; type "
        "its value"
    )


def check_values(config: Any, own: Collection[str], trusted: Sequence[str], key: str = "") -> None:
    """Refuses what leads out of this folder, by its key, unless it was typed.

    Args:
        config: resolved.
        own: the keys that this command or this machine's options have set.
        trusted: folders among them.
        key: where it is.
    """
    if is_own(key, own) or is_own(key, ONLY_SHOWN):
        return
    if isinstance(config, Mapping):
        for name, value in config.items():
            if name in OF_OBJECTS:
                raise ConfigError(
                    f"{key}.{name}={format_value(value)}: is not followed, since it comes from a tracked run"
                )
            check_values(value, own, trusted, f"{key}.{name}" if key else str(name))
    elif isinstance(config, list | tuple):
        for index, value in enumerate(config):
            check_values(value, own, trusted, f"{key}.{index}")
    elif isinstance(config, str):
        check_text(key, config, trusted)


def check_text(key: str, value: str, trusted: Sequence[str]) -> None:
    section, _, name = key.partition(".")
    if "${" in value:
        raise unresolvable_error(key, value)
    is_place = ELSEWHERE.match(value) is not None and not is_under(value, trusted)
    if is_place or key == "hardware.tpu" or (section == "cluster" and name != "name"):
        also = f", or --trust {value}" if is_place and value.startswith("/") else ""
        raise ConfigError(
            f"{key}={format_value(value)}: leads out of this folder, and comes from a tracked run; if it is "
            "what you want, "
            f"type {key}={format_value(value)}{also}"
        )


def is_under(value: str, trusted: Sequence[str]) -> bool:
    folders = [Path(each) for each in trusted if "/" in each]
    return "://" not in value and any(Path(value).resolve().is_relative_to(each.resolve()) for each in folders)


def is_own(key: str, own: Collection[str]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in own)
