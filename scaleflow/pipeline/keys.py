"""What makes a stage the same as before: its settings, its code, the content of its data, and packages.

Modification times, comments and formatting do not count; neither do options that decide only how it is recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from scaleflow.config.compose import list_own_folders
from scaleflow.pipeline.composition import Composition
from scaleflow.pipeline.definition import Stage
from scaleflow.pipeline.state import Key
from scaleflow.runs.code_digest import find_code, read_source
from scaleflow.runs.data_digest import digest_files, find_data_files, group_by_folder, list_data_files
from scaleflow.runs.provenance.machine import list_packages

#: The packages whose versions count for every stage but those of Python, besides what the user's code imports.
PACKAGES = ("scaleflow", "tensorflow", "keras", "numpy", "pyarrow")

#: Options of stages that are files or folders of data.
DATA_FLAGS = ("input",)

#: The parts of a key, in the order in which they are compared.
CATEGORIES = ("settings", "data", "code", "packages")


def make_key(
    stage: Stage, values: Mapping[str, Any], composition: Composition | None, config_dirs: Sequence[str]
) -> Key:
    """Returns what a stage is made of now.

    Args:
        stage: the stage.
        values: its keys, resolved; the outputs of other stages are in them.
        composition: of its configs; None of a function.
        config_dirs: the folders with the user's options, in which modules are looked for, too.
    """
    search = list_own_folders(config_dirs)
    own = {key: repr(value) for key, value in values.items() if key != "overrides"}
    configs: Any = composition.configs if composition else [{"targets": [{"_target_": values["target"]}]}]
    code: dict[str, str] = {}
    names: set[str] = set()
    data: list[str] = []
    for config in configs:
        for name, file in find_code(config, search).items():
            code[name] = file.digest
            status = file.path.stat()
            module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            names |= {
                each.partition(".")[0] for each in read_source(file.path, module, status.st_mtime_ns, status.st_size)[1]
            }
        data += find_data_files(config.get("dataset") or {})
        if isinstance(weights := config.get("weights"), str) and Path(weights).is_file():
            data.append(weights)
    for flag in DATA_FLAGS:
        if flag in values:
            data += list_data_files(str(values[flag]))
    settings = {"command": stage.command.name, **own, **(composition.settings if composition else {})}
    own_modules = {name.partition("/")[0].removesuffix(".py") for name in code}
    wanted = {*(PACKAGES if composition else ()), *find_packages(names - own_modules)}
    packages = {name: each.identity for name, each in read_packages().items() if name.lower() in wanted}
    parts = (settings, group_by_folder(digest_files(data)), code, packages)
    return dict(zip(CATEGORIES, parts, strict=True))


@cache
def read_packages() -> Mapping[str, Any]:
    return list_packages()


def find_packages(modules: Iterable[str]) -> set[str]:
    """Returns the names of the installed packages that have these top-level modules, in lower case."""
    others = {each for each in modules if each not in sys.stdlib_module_names and each != "scaleflow"}
    known = {name.lower() for name in read_packages()}
    found = {each.lower() for each in others if each.lower() in known}
    if unknown := {each for each in others if each.lower() not in known}:
        found |= {name.lower() for each in unknown for name in list_distributions().get(each, ())}
    return found


@cache
def list_distributions() -> Mapping[str, Any]:
    return packages_distributions()


def explain_change(before: Key, now: Key) -> str:
    """Says what differs first between two keys; empty if nothing does."""
    for category in CATEGORIES:
        old, new = before.get(category, {}), now.get(category, {})
        for name in [*new, *(each for each in old if each not in new)]:
            if old.get(name) == new.get(name):
                continue
            if category in ("data", "code"):
                how = "is new" if name not in old else "is gone" if name not in new else "changed"
                return f"{name} {how}"
            shown = [cut_value(each.get(name, "none")) for each in (old, new)]
            return f"{name} {shown[0]} -> {shown[1]}"
    return ""


def cut_value(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
