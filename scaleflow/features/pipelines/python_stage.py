"""The stage `command: python`, which calls a function of the user's. It is not a command of `scaleflow`."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleflow.config.compose import list_own_folders
from scaleflow.config.unknown_keys import suggest
from scaleflow.errors import ConfigError
from scaleflow.interfaces.stages import UNKNOWN, StageCommand
from scaleflow.runs.code_digest import find_folders, find_source

#: The function's return value, in the stage's folder.
RESULT = "result.json"


class PythonStage(StageCommand):
    """Calls a function of the user's."""

    def check(self, values: Mapping[str, Any], config_dirs: Sequence[str]) -> None:
        check_function(str(values["target"]), values.get("arguments") or {}, config_dirs)

    def make_words(self, values: Mapping[str, Any], folder: Path, config_dirs: Sequence[str]) -> list[str]:
        arguments = json.dumps(values.get("arguments") or {})
        return [self.name, str(values["target"]), arguments, str(folder / RESULT), *config_dirs]

    def read_extra_outputs(self, answer: Mapping[str, Any], values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        return {"result": json.loads((folder / RESULT).read_text())}

    def list_files(self, values: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[str]:
        """Returns absolute paths of existing files and folders named in its `writes`, arguments or result."""
        writes = list_texts(values.get("writes"))
        for path in writes:
            if not Path(path).exists():
                raise ConfigError(f"writes: {path}: does not exist after the function has returned")
        texts = [*writes, *list_texts(values.get("arguments")), *list_texts(outputs.get("result"))]
        return sorted({str(Path(text).absolute()) for text in texts if is_existing_path(text)})

    def summarize(self, outputs: Mapping[str, Any]) -> str:
        return str(outputs.get("result"))[:60]


PYTHON = PythonStage(
    name="python",
    flags={"target": (), "arguments": (), "writes": ()},
    required=("target",),
    writes_data=True,
    files=(RESULT,),
    outputs=("result", "folder"),
)


def check_function(target: str, arguments: Any, config_dirs: Sequence[str] = ()) -> None:
    """Checks, without importing it, that a function exists and takes the arguments. Raises ConfigError if not."""
    if not isinstance(arguments, Mapping) and arguments != UNKNOWN:
        raise ConfigError(f"arguments: {arguments}: expected {{NAME: VALUE}}")
    module, _, name = target.rpartition(".")
    if not module:
        raise ConfigError(f"target: {target}: expected MODULE.FUNCTION")
    source = find_source(module, list_own_folders(config_dirs))
    if source is None:
        if not find_folders(module.partition(".")[0]):
            raise ConfigError(
                f"target: {target}: there is no module {module} in the current folder, in one of "
                "--config-dir, or installed"
            )
        return
    try:
        tree = ast.parse(source[0].read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"target: {target}: {source[0].name} cannot be read: {error}") from error
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if name not in functions:
        if re.search(rf"\b{re.escape(name)}\b", source[0].read_text()):  # imported or assigned there
            return
        raise ConfigError(f"target: {target}: {source[0].name} has no function {name}{suggest(name, functions)}")
    if isinstance(arguments, Mapping):
        check_parameters(target, functions[name].args, arguments)


def check_parameters(target: str, parameters: ast.arguments, arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError if a function lacks a parameter for an argument, or an argument for a parameter."""
    if parameters.kwarg is None:
        names = [parameter.arg for parameter in (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs)]
        for name in arguments:
            if name not in names:
                raise ConfigError(
                    f"arguments: {name}: {target} has no such parameter{suggest(name, names)} ({', '.join(names)})"
                )
    optional = len(parameters.defaults)
    needed = [parameter.arg for parameter in parameters.args[: len(parameters.args) - optional]]
    for parameter, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
        if default is None:
            needed.append(parameter.arg)
    missing = [name for name in needed if name not in arguments]
    if missing:
        raise ConfigError(f"arguments: {', '.join(missing)}: missing; {target} needs {', '.join(needed)}")


def is_existing_path(text: str) -> bool:
    try:
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):  # too long, or with a null character
        return False


def list_texts(value: Any) -> list[str]:
    """Returns all strings in a JSON value, including nested ones."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list):
        return []
    texts: list[str] = []
    for item in value:
        texts += list_texts(item)
    return texts
