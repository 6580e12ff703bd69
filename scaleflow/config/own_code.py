"""Checks, without importing it, that a user's module has the function or class that a `_target_` names."""

import ast
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from scaleflow.config.trust import list_own_targets
from scaleflow.errors import ConfigError, find_similar

#: A module with one of these words may define more names, or find more modules, while it runs.
DYNAMIC_WORDS = ("globals(", "locals(", "vars(", "exec(", "setattr(", "__dict__", "__path__", "sys.modules")

#: A module with this word may make other modules importable.
IMPORT_PATH = "sys.path"


def check_own_names(config: Mapping[str, Any], search: Sequence[str]) -> None:
    """Raises ConfigError if a `_target_` names a missing module, or a name that its module does not define.

    Args:
        config: the config of a run as plain containers.
        search: folders to search for modules before the installed ones.

    Skips code that defines names while it runs, and modules that are already imported: the worker checks these.
    """
    targets = []
    modules: dict[str, ModuleFile | None] = {}
    for key, path in list_own_targets(config):
        if is_checked(path):
            targets.append((key, path))
            modules[path] = find_module_file(path.split("."), search)
    files = {module.file for module in modules.values() if module is not None}
    may_import_more = any(IMPORT_PATH in read_module(file) for file in files)
    for key, path in targets:
        module = modules[path]
        if module is not None:
            check_own_name(key, path, module)
            continue
        package = path.partition(".")[0]
        if not may_import_more and not is_importable(package, search):
            raise ConfigError(
                f"{key}._target_={path}: cannot be loaded (there is no module {package}); expected the dotted name of "
                "a class or function in an installed module, the current folder or the --config-dir folder"
            )


@dataclass(frozen=True)
class ModuleFile:
    """The file of the module in a dotted path."""

    file: Path
    parts: int  # how many parts of the path name the module


def is_checked(path: str) -> bool:
    return "." in path and path.partition(".")[0] not in sys.modules


def check_own_name(key: str, path: str, module: ModuleFile) -> None:
    """Raises ConfigError if the module of a dotted path does not define the part that follows the module's name."""
    parts = path.split(".")
    names = list_names(key, path, file=module.file)
    name = parts[module.parts] if module.parts < len(parts) else ""
    # Every module has __dict__ and similar names.
    if names is None or not name or name in names or name.startswith("__"):
        return
    module_name = ".".join(parts[: module.parts])
    public_names = [known for known in names if not known.startswith("_")]
    similar = find_similar(name, public_names)
    hint = f"; did you mean {module_name}.{similar}?" if similar else ""
    raise ConfigError(f"{key}._target_={path}: cannot be loaded ({module.file.name} has no {name}{hint})")


def find_module_file(parts: Sequence[str], search: Sequence[str]) -> ModuleFile | None:
    """Returns the file of the module in a dotted path; None without a file."""
    for folder in search:
        for count in range(len(parts) - 1, 0, -1):
            base = Path(folder, *parts[:count])
            package = base / "__init__.py"
            if package.is_file():  # Python prefers a package to a module with the same name
                # The name may also be a module of the package, which the package imports only while it runs.
                is_module = (base / parts[count]).is_dir() or any(base.glob(f"{parts[count]}.*"))
                return None if is_module else ModuleFile(package, count)
            if base.with_suffix(".py").is_file():
                return ModuleFile(base.with_suffix(".py"), count)
    return None


def is_importable(name: str, search: Sequence[str]) -> bool:
    """Returns whether a top-level module can be imported, without importing it."""
    try:
        spec = PathFinder.find_spec(name, [*search, *sys.path]) or importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return True  # the worker's import reports the error
    return spec is not None


def read_module(file: Path) -> str:
    """Returns the text of a module. Characters in another encoding are lost."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def list_names(key: str, path: str, file: Path) -> set[str] | None:
    """Returns the names that a module defines; None if it may define more while it runs.

    Raises ConfigError if the file is not valid Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the worker's import shows them
            tree = ast.parse(file.read_bytes())  # bytes, because the file may name its encoding
    except OSError:
        return None
    except SyntaxError as error:
        raise ConfigError(
            f"{key}._target_={path}: cannot be loaded ({file.name}, line {error.lineno}: {error.msg})"
        ) from error
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            names.update(node.names)
    for node in walk_module(tree):
        names |= list_bound_names(node)
    text = read_module(file)
    defines_more = {"*", "__getattr__"} & names or any(word in text for word in DYNAMIC_WORDS)
    return None if defines_more else names


def list_bound_names(node: ast.AST) -> set[str]:
    """Returns the names that a syntax node itself defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    if isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
        return {node.name}
    if isinstance(node, ast.MatchMapping) and node.rest:
        return {node.rest}
    return set()


def walk_module(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that run when a module is imported, without those inside functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from walk_module(child)
