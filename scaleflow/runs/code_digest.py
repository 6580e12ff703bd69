"""Computes digests of a user's code: the modules that a config names and the modules that these import.

It reads source files and imports nothing. Installed packages, the standard library and scaleflow itself do not count.
It misses compiled extensions, and modules that the code imports only while it runs (`importlib.import_module`)."""

import ast
import contextlib
import functools
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any, NamedTuple

from scaleflow.config.trust import list_targets
from scaleflow.interfaces.features import list_own_code

#: Names of the folders of installed packages.
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}

#: Folders of the standard library. `sysconfig` also knows them, but takes 30 ms to import.
LIBRARY_FOLDERS = (Path(os.__file__).parent,)

#: This package. Its version identifies its code, so its modules get no digests.
OWN_PACKAGE = __name__.partition(".")[0]


class CodeFile(NamedTuple):
    """A file with user code."""

    digest: str  # SHA-256 of the code without comments and formatting: 32 hexadecimal digits
    path: Path
    folder: Path  # the search folder that contains the module
    imports: Sequence[str] = ()  # the dotted names that the file imports


def find_code(config: Mapping[str, Any], search: Sequence[str]) -> dict[str, CodeFile]:
    """Returns each file with user code that a config names with `_target_` or that a feature finds in it, directly or
    through imports.

    Args:
        config: the resolved config, as plain containers.
        search: folders to search for the modules of `_target_`, before Python's own search path.

    The keys of the result are the paths of the files, relative to their search folders.
    """
    files: dict[str, CodeFile] = {}
    waiting = [path for _, path in list_targets(config) if isinstance(path, str)]
    for path in list_own_code(config):
        search = [str(path.absolute().parent), *search]
        waiting.append(path.stem)
    known: set[str] = set()
    while waiting:
        for module in list_parents(waiting.pop()):
            if module in known:
                continue
            known.add(module)
            source = find_source(module, search)
            if source:
                path, folder = source
                status = path.stat()
                digest, names = read_source(path, module, status.st_mtime_ns, size=status.st_size)
                files[path.relative_to(folder).as_posix()] = CodeFile(digest, path, folder, imports=names)
                waiting += names
    return dict(sorted(files.items()))


def list_parents(path: str) -> list[str]:
    """Returns a dotted path and all its parents, the shortest first: `a`, `a.b` and `a.b.c` for `a.b.c`."""
    parts = path.split(".")
    return [".".join(parts[: length + 1]) for length in range(len(parts))]


def find_source(module: str, search: Sequence[str]) -> tuple[Path, Path] | None:
    """Returns the file of a user's module and its search folder; None if the user has no such module."""
    parts = module.split(".")
    top = parts[0]
    if top == OWN_PACKAGE:
        return None
    for folder in (*map(Path, search), *find_folders(top)):
        base = folder.joinpath(*parts)
        for path in (base / "__init__.py", base.with_name(f"{base.name}.py")):
            if path.is_file() and not is_installed(path):
                return path, folder
    return None


def find_folders(top: str) -> list[Path]:
    """Returns the folders where Python finds a top-level module, including one installed for editing."""
    try:
        spec = find_spec(top)
        if spec is None:
            return []
        locations = spec.submodule_search_locations or [spec.origin or ""]
        return [Path(location).parent for location in locations]
    except (ImportError, ValueError, AttributeError):  # for instance for `__main__`
        return []


def is_installed(path: Path) -> bool:
    """Whether a file belongs to an installed package or to the standard library."""
    is_package = not PACKAGE_FOLDERS.isdisjoint(path.parts)
    return is_package or any(path.is_relative_to(folder) for folder in LIBRARY_FOLDERS)


@functools.lru_cache(4096)
def read_source(path: Path, module: str, modified: int, size: int) -> tuple[str, Sequence[str]]:
    """Returns a digest of the code in a module's file, and the names that it imports.

    `modified` and `size` belong to the file. They are arguments so that the cache notices a change. If the file cannot
    be parsed, the digest covers its bytes. An unreadable file counts as empty: the worker reports the error.
    """
    content = b""
    names: list[str] = []
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
        content = path.read_bytes()
        tree = ast.parse(content)
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = list(list_imports(tree, package))
        content = ast.unparse(tree).encode()  # `ast.dump` varies with Python
    return hashlib.sha256(content).hexdigest()[:32], names


def list_imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yields the dotted names that a module in a package imports, including imports inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            try:
                base = resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:  # a relative import beyond the top of the package
                continue
            for alias in node.names:
                yield f"{base}.{alias.name}"


#: Only digests of the same version are compared: another Python version may unparse the same code differently.
VERSION = f"1, Python {sys.version_info.major}.{sys.version_info.minor}"
