"""Checks without importing anything that a user's module has the function or the class that a `_target_` names."""

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleflow.config.trust import list_own_targets
from scaleflow.errors import ConfigError, find_similar


def check_own_names(config: Mapping[str, Any], search: Sequence[str]) -> None:
    """Raises ConfigError if a `_target_` names a module that does not exist, or a name that its module lacks.

    Args:
        config: the config of a run as plain containers.
        search: the folders in which modules are looked for before the installed ones.

    Code that defines names while it runs, and modules that are already imported, are left to the worker.
    """
    for key, path in list_own_targets(config):
        if path.count(".") and path.split(".")[0] not in sys.modules:
            check_own_name(key, path, search=search)


def check_own_name(key: str, path: str, search: Sequence[str]) -> None:
    parts = path.split(".")
    found = find_module_file(parts, search)
    if found is None:
        if not has_folder(parts[0], search) and not is_installed(parts[0]):
            raise ConfigError(
                f"{key}._target_={path}: cannot be loaded (there is no module {parts[0]}); expected the dotted name of "
                "a class or function in an installed module, the current folder or the --config-dir folder"
            )
        return
    file, count = found
    names = list_names(key, path, file=file)
    name = parts[count] if count < len(parts) else ""
    if names is None or not name or name in names:
        return
    module = ".".join(parts[:count])
    similar = find_similar(name, [each for each in names if not each.startswith("_")])
    hint = f"; did you mean {module}.{similar}?" if similar else ""
    raise ConfigError(f"{key}._target_={path}: cannot be loaded ({file.name} has no {name}{hint})")


def find_module_file(parts: Sequence[str], search: Sequence[str]) -> tuple[Path, int] | None:
    """Returns the file of the module in a dotted path, and how many parts name the module; None without a file."""
    for folder in search:
        for count in range(len(parts) - 1, 0, -1):
            base = Path(folder, *parts[:count])
            if base.with_suffix(".py").is_file():
                return base.with_suffix(".py"), count
            package = base / "__init__.py"
            # A name of a package may also be a module that it imports only while it runs.
            if package.is_file() and not (base / f"{parts[count]}.py").exists() and not (base / parts[count]).is_dir():
                return package, count
    return None


def has_folder(name: str, search: Sequence[str]) -> bool:
    return any(Path(folder, name).is_dir() for folder in search)


def is_installed(name: str) -> bool:
    """Returns whether a top-level module can be imported. It is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return True  # the worker's import says what is wrong


def list_names(key: str, path: str, file: Path) -> set[str] | None:
    """Returns the names that a module defines; None if it may define further ones while it runs.

    Raises ConfigError if the file is no valid Python.
    """
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, UnicodeDecodeError):
        return None
    except SyntaxError as error:
        raise ConfigError(
            f"{key}._target_={path}: cannot be loaded ({file.name}, line {error.lineno}: {error.msg})"
        ) from error
    names: set[str] = set()
    for node in walk_module(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                names.add((alias.asname or alias.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    defines_more = {"*", "__getattr__"} & names or "globals()" in text or "setattr(" in text
    return None if defines_more else names


def walk_module(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that run when a module is imported: not those inside of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from walk_module(child)
