"""Checks a config that comes from a tracking server, where someone else may have written it.

A config names code (`_target_`), files, addresses and interpolations. Allowed code: scaleflow's own datasets, models
and steps, Keras's optimizers, losses and metrics, some of its callbacks, and code that the user trusts by name. Files
must be in the current folder, and interpolations must refer to the config itself.
"""

import functools
import glob
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from hydra.utils import get_object

from scaleflow.config.parse import format_value, is_under
from scaleflow.errors import ConfigError
from scaleflow.interfaces.features import list_option_files

#: The allowed paths of a `_target_`, by key. They list names instead of whole packages, because packages have functions
#: that write files, fetch URLs or load code (keras.utils.get_file, tensorflow.io.write_file, keras.saving.load_model).
ALLOWED = {
    r"optimizer": r"keras\.optimizers\.[A-Z]\w*",
    r"training\.step": r"scaleflow\.training\.examples\.[A-Za-z]\w*",
    r"training\.callbacks\.\d+": r"keras\.callbacks\."
    r"(EarlyStopping|History|ProgbarLogger|ReduceLROnPlateau|SwapEMAWeights|TerminateOnNaN)",
    r"objective\.loss(\.\w+)?": r"keras\.losses\.[A-Z]\w*",
    r"objective\.metrics(\.\w+)?\.\d+": r"keras\.metrics\.[A-Z]\w*",
}

#: Allowed as an argument of another `_target_`. Excludes layers that load files or run code from their arguments.
ALLOWED_ARGUMENTS = re.compile(
    r"keras\.(optimizers|optimizers\.schedules|initializers|regularizers|constraints)\.[A-Z]\w*"
    r"|keras\.layers\.(?!Lambda\b|TFSMLayer\b|JaxLayer\b|FlaxLayer\b|TorchModuleWrapper\b|StringLookup\b"
    r"|IntegerLookup\b|TextVectorization\b|Wrapper\b)[A-Z]\w*"
)

#: Keys that make Keras deserialize a mapping into an object, or Hydra change a call.
OBJECT_KEYS = ("class_name", "registered_name", "_args_", "_recursive_", "_convert_")

#: An interpolation that refers to another key, without a resolver or a nested interpolation.
KEY_INTERPOLATION = re.compile(r"\$\{[\w.\[\]]+\}")

#: The address of a file system, a server or a file. Model addresses in the run's own store (`runs:/`) are excluded.
ADDRESS = re.compile(r".*://|(?!(runs|models):/)[a-z][\w+.-]*:/|file:", re.IGNORECASE | re.DOTALL)

#: Keys whose text is only shown or parsed as data, so it may look like a path.
TEXT_KEYS = (
    "tracking.experiment",
    "tracking.run_name",
    "tracking.tags",
    "dataset.delimiter",
    "dataset.separator",
    "dataset.missing",
)


def check_trusted_targets(config: Mapping[str, Any], trusted: Sequence[str]) -> None:
    """Checks that each `_target_` is on the lists or has a `trusted` name or prefix. Imports nothing.

    Raises ConfigError, which names the first code that is not trusted.
    """
    for key, path in list_targets(config):
        is_trusted = isinstance(path, str) and (is_listed(key, path) or is_under(path, trusted))
        if not is_trusted:
            module = name_module(str(path))
            raise ConfigError(
                f"{key}._target_={format_value(path)}: this code is not trusted, since it is not one of the "
                f"{describe_allowed(key)}; if you know the code, add --trust {module} or trusted_modules=[{module}]"
            )


def check_origins(config: Mapping[str, Any], trusted: Sequence[str]) -> None:
    """Checks that each trusted `_target_` is defined in a trusted module, and not imported there from another module.

    It imports the modules, so only the process that uses them calls it. Raises ConfigError, which names the defining
    module.
    """
    for key, path in list_targets(config):
        if path in trusted or not is_under(path, trusted):
            continue
        try:
            origin = getattr(get_object(path), "__module__", None)
        except Exception:
            continue  # loading it later gives a better message
        if not (isinstance(origin, str) and is_under(origin, trusted)):
            raise ConfigError(
                f"{key}._target_={path}: this code is not trusted, since it is defined in {origin or 'no module'}; if "
                f"you know the code, add --trust {path}"
            )


def list_targets(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (key of the mapping, its `_target_`) for every `_target_`, including those in arguments."""
    if isinstance(config, Mapping):
        if "_target_" in config:
            yield key, config["_target_"]
        for name, value in config.items():
            yield from list_targets(value, f"{key}.{name}" if key else str(name))
    elif isinstance(config, list | tuple):
        for index, value in enumerate(config):
            yield from list_targets(value, f"{key}.{index}")


def list_own_targets(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (key, path) of each `_target_` that is user code."""
    for key, path in list_targets(config):
        if isinstance(path, str) and not is_listed(key, path):
            yield key, path


def list_own_modules(config: Mapping[str, Any], trusted: Sequence[str] = ()) -> list[str]:
    """Returns the modules of user code that a config names, without trusted ones."""
    modules: list[str] = []
    for _, path in list_own_targets(config):
        module = name_module(path)
        if not is_under(path, trusted) and module not in modules:
            modules.append(module)
    return modules


def name_module(path: str) -> str:
    """Returns the module part of an object's path, or the path itself if it has no dot."""
    return path.rpartition(".")[0] or path


def is_listed(key: str, path: str) -> bool:
    """Whether the lists allow a `_target_` at a key."""
    name = path.removeprefix("tensorflow.") if path.startswith("tensorflow.keras.") else path
    if key in ("dataset", "model"):
        return name in list_factories(key)
    for keys, paths in ALLOWED.items():
        if re.fullmatch(keys, key):
            return re.fullmatch(paths, name) is not None
    return ALLOWED_ARGUMENTS.fullmatch(name) is not None


def describe_allowed(key: str) -> str:
    """Describes the allowed code for a key, for a message."""
    if key in ("dataset", "model"):
        return f"{key}s of scaleflow"
    if key.startswith(("objective.loss", "objective.metrics")):
        return "losses and metrics of Keras"
    if key.startswith("evaluation.metrics."):
        return "metrics of scikit-learn"
    words = {"optimizer": "optimizers of Keras", "training.step": "steps of scaleflow"}
    if key.startswith("training.callbacks."):
        return "callbacks of Keras that use no files and no network"
    return words.get(key, "layers, schedules, initializers, regularizers and constraints of Keras")


@functools.cache
def list_factories(group: str) -> frozenset[str]:
    """Lists the `_target_`s of scaleflow's own options in a config group."""
    targets: set[str] = set()
    for path in list_option_files(group):
        targets.update(re.findall(r"^_target_: (\S+)", path.read_text(), re.M))
    return frozenset(targets)


def unresolvable_error(key: str, value: str) -> ConfigError:
    return ConfigError(
        f"{key}={format_value(value)}: is not resolved, because it comes from a tracked run and refers to more than "
        "its keys; type the value"
    )


def check_values(config: Any, own: Collection[str], trusted: Sequence[str], key: str = "") -> None:
    """Checks that values stay inside the current folder, unless this machine has set them.

    Args:
        config: a resolved config, or the value of `key` in it.
        own: the keys that this command or this machine's options have set. They are not checked.
        trusted: trusted names; a name with a `/` is a folder that paths may be in.

    Raises ConfigError, which names the key.
    """
    if is_under(key, own) or is_under(key, TEXT_KEYS):
        return
    if isinstance(config, Mapping):
        for name, value in config.items():
            if name in OBJECT_KEYS:
                raise ConfigError(
                    f"{key}.{name}={format_value(value)}: is rejected, because it comes from a tracked run and "
                    f"can choose code to run; type {key}=... instead"
                )
            check_values(value, own, trusted, key=f"{key}.{name}" if key else str(name))
    elif isinstance(config, list | tuple):
        for index, value in enumerate(config):
            check_values(value, own, trusted, key=f"{key}.{index}")
    elif isinstance(config, str | bytes | PurePath):  # YAML has tags for all of these types
        check_trusted_text(key, os.fsdecode(config), trusted)


def check_trusted_text(key: str, value: str, trusted: Sequence[str]) -> None:
    section, _, name = key.partition(".")
    if "${" in value:
        raise unresolvable_error(key, value)
    is_outside = leads_out(value, trusted)
    if is_outside or is_under(key, ["hardware.tpu"]) or (section == "cluster" and name != "name"):
        alternative = f" or add --trust {value}" if is_outside and value.startswith("/") else ""
        raise ConfigError(
            f"{key}={format_value(value)}: comes from a tracked run and points outside the current folder; if you "
            f"want it, type {key}={format_value(value)}{alternative}"
        )


def leads_out(value: str, trusted: Sequence[str]) -> bool:
    """Whether a text, used as a path, a pattern or an address, leads out of the current folder and the trusted folders.

    It strips spaces, expands `~` to the home folder, and follows symbolic links.
    """
    text = os.path.expanduser(value.strip())  # noqa: PTH111  (Path.expanduser raises for an unknown user)
    if ADDRESS.match(text) or text.startswith("~") or ".." in text.split("/"):
        return True
    trusted_folders = [name for name in trusted if "/" in name]
    folders = [Path(os.path.realpath(name)) for name in (".", *trusted_folders)]
    try:
        for path in (value, *list_named_folders(text), text):
            place = Path(os.path.realpath(path))
            if not any(place.is_relative_to(folder) for folder in folders):
                return True
    except ValueError:  # a path cannot contain a null character
        return True
    return False


def list_named_folders(pattern: str) -> Iterator[str]:
    """Yields the folders that match the leading parts of a glob, from the top down, lazily."""
    parts = pattern.split("/")
    for count in range(1, len(parts)):
        upper = "/".join(parts[:count])
        if glob.has_magic(upper):
            yield from glob.iglob(upper)  # noqa: PTH207
