"""Digests of a user's code: of the modules that a config names, and of those that these import.

Nothing is imported for it. Installed packages, the standard library and scaleflow itself do not count. Modules that are
found only while the code runs (`importlib.import_module`) and compiled extensions are not seen."""

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

#: Folders of installed packages, wherever they are.
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}

#: Folders of the standard library; `sysconfig` knows them, too, and takes 30 ms to import.
LIBRARY_FOLDERS = (Path(os.__file__).parent,)

#: The package whose version says what its code is.
OWN_PACKAGE = __name__.partition(".")[0]


class CodeFile(NamedTuple):
    """A file with code of the user."""

    digest: str  # of its code, without comments and formatting: 32 hexadecimal digits of SHA-256
    path: Path
    folder: Path  # in which it was found
    imports: Sequence[str] = ()  # the dotted names that it imports


def find_code(config: Mapping[str, Any], search: Sequence[str]) -> dict[str, CodeFile]:
    """Returns each file with code of the user that a config names with `_target_`, directly or by imports.

    Args:
        config: the resolved config, as plain containers.
        search: the folders in which modules of `_target_` are looked for, before those of Python.

    Returns the files by their paths, relative to the folders in which they were found.
    """
    files: dict[str, CodeFile] = {}
    waiting = [path for _, path in list_targets(config) if isinstance(path, str)]
    known = set[str]()
    while waiting:
        parts = waiting.pop().split(".")
        modules = {".".join(parts[: length + 1]) for length in range(len(parts))} - known
        known |= modules
        for module in modules:
            if found := find_source(module, search):
                path, folder = found
                status = path.stat()
                digest, names = read_source(path, module, status.st_mtime_ns, size=status.st_size)
                files[path.relative_to(folder).as_posix()] = CodeFile(digest, path, folder, imports=names)
                waiting += names
    return dict(sorted(files.items()))


def find_source(module: str, search: Sequence[str]) -> tuple[Path, Path] | None:
    """Returns the file of a user's module and the folder in which it was found; None if the user has no such module."""
    top, *_ = parts = module.split(".")
    if top == OWN_PACKAGE:
        return None
    for folder in (*map(Path, search), *find_folders(top)):
        base = folder.joinpath(*parts)
        for path in (base / "__init__.py", base.with_name(f"{base.name}.py")):
            if path.is_file() and not is_installed(path):
                return path, folder
    return None


def find_folders(top: str) -> list[Path]:
    """Returns the folders in which Python finds a top-level module, also one that is installed for editing."""
    with contextlib.suppress(ImportError, ValueError, AttributeError):  # such as that of `__main__`
        if spec := find_spec(top):
            return [Path(path).parent for path in spec.submodule_search_locations or [spec.origin or ""]]
    return []


def is_installed(path: Path) -> bool:
    """Whether a file belongs to an installed package or to the standard library."""
    return not PACKAGE_FOLDERS.isdisjoint(path.parts) or any(map(path.is_relative_to, LIBRARY_FOLDERS))


@functools.lru_cache(4096)
def read_source(path: Path, module: str, modified: int, size: int) -> tuple[str, Sequence[str]]:
    """Returns a digest of the code in the file of a module, and the names that it imports.

    `modified` and `size` are those of the file, for the cache. A file that cannot be parsed counts as it is, one that
    cannot be read as empty: the worker says why.
    """
    content = b""
    names = list[str]()
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
        content = path.read_bytes()
        tree = ast.parse(content)
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = [*list_imports(tree, package)]
        content = ast.unparse(tree).encode()  # `ast.dump` varies with Python
    return hashlib.sha256(content).hexdigest()[:32], names


def list_imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Yields the dotted names that a module in a package imports, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError):  # a relative import beyond the top of the package
                base = resolve_name("." * node.level + (node.module or ""), package)
                yield from (f"{base}.{alias.name}" for alias in node.names)


#: Digests of other versions are not compared: another version of Python may write the same code in another way.
VERSION = f"1, Python {sys.version_info.major}.{sys.version_info.minor}"
