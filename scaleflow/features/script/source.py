"""Reads a script or a notebook, lists the constants at its top level, and replaces their values.

A constant is a name that the top level of the script assigns once, and whose value is written out: a number, a text,
a truth value, None, or a list, tuple, set or dict of these.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from scaleflow.errors import ConfigError, find_similar

#: A line of a notebook that IPython would run, such as `%matplotlib inline`, and one that a shell would run.
MAGIC = re.compile(r"\s*%")
SHELL = re.compile(r"\s*!")

#: Words of IPython before code that is run as it is.
TIMING = re.compile(r"^%%(time|timeit|capture)\b[^\n]*$|^\s*%(time|timeit) (?=\S)", re.MULTILINE)

#: Names of types in messages.
TYPE_NAMES: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}


@dataclass
class Constant:
    """A constant at the top level of a script."""

    node: ast.Assign | ast.AnnAssign  # the statement that assigns it
    value: Any


@dataclass
class Program:
    """A script that has been parsed.

    Attributes:
        path: its file.
        tree: its statements.
        constants: its constants by name.
        repeated: names that are assigned several times at its top level.
        magics: lines of a notebook that are left out, such as `%matplotlib inline`.
    """

    path: Path
    tree: ast.Module
    constants: dict[str, Constant]
    repeated: set[str]
    magics: Sequence[str] = ()
    code: str = ""  # the joined cells of a notebook; "" for a script
    cells_file: Path | None = None  # the file with these cells, if they were written to one

    @property
    def code_file(self) -> Path:
        """The file whose lines tracebacks, and TensorFlow's AutoGraph, show."""
        return self.cells_file or self.path.absolute()

    def write_cells(self, path: Path) -> None:
        """Writes the cells of a notebook to a Python file: its own lines are JSON. Does nothing for a script."""
        if self.code:
            path.write_text(self.code, encoding="utf-8")
            self.cells_file = path

    def replace_constant(self, name: str, value: Any) -> None:
        """Replaces the value of a constant. Raises ConfigError if the script has no constant that can have it."""
        if name in self.repeated:
            raise ConfigError(
                f"script.{name}: {self.path.name} assigns {name} several times at its top level; a command can set "
                "only a constant that is assigned once"
            )
        if name not in self.constants:
            raise ConfigError(f"script.{name}: {self.explain_missing(name)}")
        constant = self.constants[name]
        converted = convert_constant(name, value, constant.value)
        expression = ast.parse(write_literal(converted), mode="eval").body
        assert constant.node.value is not None
        for node in ast.walk(expression):  # errors name the line of the original value
            ast.copy_location(node, constant.node.value)
        constant.node.value = expression
        constant.value = converted

    def explain_missing(self, name: str) -> str:
        """Explains why a name is no constant, and names the constants that the script has."""
        if not self.constants:
            return f"{self.path.name} has no constants at its top level"
        similar = find_similar(name, list(self.constants))
        hint = f"; did you mean script.{similar}?" if similar else ""
        listed = ", ".join(self.constants)
        return f"{self.path.name} has no constant {name} at its top level{hint} (it has {listed})"

    def compile(self) -> CodeType:
        """Returns the code of the script."""
        return compile(self.tree, str(self.code_file), "exec", dont_inherit=True)


def parse_script(path: Path) -> Program:
    """Parses a script or a notebook. Raises ConfigError if it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    text: bytes | str = content
    magics: list[str] = []
    if path.suffix == ".ipynb":
        text, magics = join_cells(path, content)
    try:
        tree = ast.parse(text, str(path))
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: {error.msg}") from error
    except ValueError as error:  # a null byte
        raise ConfigError(f"{path}: it is no Python code: {error}") from error
    constants, repeated = find_constants(tree)
    return Program(path, tree, constants, repeated, magics, code=text if isinstance(text, str) else "")


def join_cells(path: Path, content: bytes) -> tuple[str, list[str]]:
    """Returns the code of a notebook's cells, in order, and the lines that were left out.

    Raises ConfigError if the file is no notebook, or if a cell runs a command of the shell.
    """
    try:
        cells = json.loads(content)["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: it is no notebook: {type(error).__name__}: {error}") from error
    lines: list[str] = []
    magics: list[str] = []
    for source in sources:
        source = drop_timing(source)
        for line in source.split("\n"):
            if line.startswith("%%"):
                raise ConfigError(
                    f"{path}: {line.strip()}: only IPython can run this cell; remove it from the notebook"
                )
            if SHELL.match(line):
                raise ConfigError(f"{path}: {line.strip()}: only a shell can run this line; remove it")
            if MAGIC.match(line):
                magics.append(line.strip())
                lines.append("")
            else:
                lines.append(line)
    return "\n".join(lines) + "\n", magics


def drop_timing(source: str) -> str:
    """Returns the code of a cell without IPython's words that only measure it: `%%time`, `%time`."""
    return TIMING.sub("", source)


def find_constants(tree: ast.Module) -> tuple[dict[str, Constant], set[str]]:
    """Returns the constants at the top level by name, and the names that are assigned several times there."""
    constants: dict[str, Constant] = {}
    seen: set[str] = set()
    repeated: set[str] = set()
    for statement in tree.body:
        for name in list_assigned_names(statement):
            if name in seen:
                repeated.add(name)
            seen.add(name)
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            add_constant(statement, constants)
    for name in repeated:
        constants.pop(name, None)
    return constants, repeated


def list_assigned_names(statement: ast.stmt) -> list[str]:
    """Returns the names that a statement at the top level assigns, including those in its blocks."""
    names: list[str] = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
    is_scope = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return [] if is_scope else names


def add_constant(statement: ast.Assign | ast.AnnAssign, constants: dict[str, Constant]) -> None:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    target = targets[0]
    if len(targets) != 1 or not isinstance(target, ast.Name) or statement.value is None:
        return
    if target.id.startswith("__"):
        return
    try:
        value = ast.literal_eval(statement.value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return  # it is computed
    constants[target.id] = Constant(statement, value)


def write_literal(value: Any) -> str:
    """Returns the code of a value. Numbers that are not finite have no literal in Python."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return repr(value)


def convert_constant(name: str, value: Any, before: Any) -> Any:
    """Returns a value in the type of the constant that it replaces. Raises ConfigError if it has another type."""
    if before is None or value is None:
        return value
    if isinstance(before, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(before, tuple) and isinstance(value, list):
        return tuple(value)
    if type(value) is type(before):
        return value
    if isinstance(before, int) and isinstance(value, float) and not isinstance(before, bool):
        raise ConfigError(f"script.{name}={value}: expected a whole number, as {before!r} in the script")
    expected = TYPE_NAMES.get(type(before), "a value of the same type")
    raise ConfigError(f"script.{name}={value}: expected {expected}, as {before!r} in the script")
