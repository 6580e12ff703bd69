"""References to the outputs of stages, such as `${stages.fit.run_id}`, and the conditions of stages.

A reference becomes a call of an OmegaConf resolver. So it works wherever an interpolation does, including the user's
keys that a stage refers to.
"""

import ast
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scaleflow.config.compose import shorten_error
from scaleflow.config.unknown_keys import suggest
from scaleflow.errors import ConfigError
from scaleflow.features.pipelines.stage_commands import BEST_OUTPUTS
from scaleflow.interfaces.stages import StageCommand

RESOLVER = "scaleflow.stage"

#: A reference to an output, and any interpolation in a condition.
REFERENCE = re.compile(r"\$\{\s*stages\.([^{}]*?)\s*\}")
INTERPOLATION = re.compile(r"\$\{[^{}]*\}")

#: Takes a stage's name and the path of an output, and returns its value.
ReadOutput = Callable[[str, Sequence[str]], Any]

COMPARISONS: Mapping[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

#: Prefixes of metrics that messages and `stages.yaml` leave out.
RARE = ("perf/", "baseline/")

#: YAML constants that a condition may use.
CONSTANTS = {"true": True, "false": False, "null": None}


def rewrite_references(value: Any) -> Any:
    """Replaces references in the strings of a plain config by resolver calls."""
    if isinstance(value, Mapping):
        return {key: rewrite_references(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rewrite_references(item) for item in value]
    if isinstance(value, str):
        return REFERENCE.sub(lambda match: f"${{{RESOLVER}:'{match[1]}'}}", value)
    return value


def split_reference(
    path: str, commands: Mapping[str, StageCommand], groups: Mapping[str, Sequence[str]]
) -> tuple[str, list[str]]:
    """Returns the stage and the output path that a reference names. A metric's name is one part, even with dots.

    Args:
        path: such as `fit.metrics.test/accuracy`.
        commands: command of each stage, by its name.
        groups: members of each stage with `foreach`.

    Raises ConfigError if there is no such stage or output.
    """
    parts = re.sub(r"\[([^]]*)\]", r".\1", path).split(".")
    shown = f"${{stages.{path}}}"
    lengths = [n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in commands]
    if not lengths:
        members = groups.get(parts[0])
        if members:
            raise ConfigError(f"{shown}: {parts[0]} is made of {', '.join(members)}; name one of them")
        hint = suggest(parts[0], [*commands, *groups])
        raise ConfigError(f"{shown}: there is no stage {parts[0]}{hint} ({', '.join(commands)})")
    name = ".".join(parts[: lengths[0]])
    rest = parts[lengths[0] :]
    known = commands[name].outputs
    for depth, key in enumerate(rest[:2]):
        if key not in known:
            where = ".".join([name, *rest[:depth]])
            raise ConfigError(f"{shown}: {where} has no output {key}{suggest(key, known)} ({', '.join(known)})")
        if key in ("metrics", "result"):
            tail = rest[depth + 1 :]
            return name, [*rest[: depth + 1], *(tail if key == "result" else filter(None, [".".join(tail)]))]
        if key != "best":
            break
        known = BEST_OUTPUTS
    if not rest:
        raise ConfigError(f"{shown}: name one of its outputs ({', '.join(known)})")
    if len(rest) > 1 + (rest[0] == "best"):
        raise ConfigError(f"{shown}: {'.'.join([name, *rest[:-1]])} is a value, and has no parts")
    return name, rest


def select_output(outputs: Mapping[str, Any], stage: str, path: Sequence[str]) -> Any:
    """Returns an output of a finished stage. Raises ConfigError, with the names that exist, if there is none."""
    value: Any = outputs
    for depth, key in enumerate(path):
        if not isinstance(value, Mapping) or key not in value:
            names = [name for name in value if not str(name).startswith(RARE)] if isinstance(value, Mapping) else []
            have = f" ({', '.join(map(str, names))})" if names else ""
            hint = suggest(key, map(str, value)) if isinstance(value, Mapping) else ""
            raise ConfigError(f"{'.'.join([stage, *path[:depth]])} has no {key}{hint}{have}")
        value = value[key]
    if value is None:
        is_of_run = path[-1] in ("run_id", "model")
        why = "its run is not recorded in a store, or has exported no model" if is_of_run else "it is null"
        raise ConfigError(f"{stage} has no {'.'.join(path)}: {why}")
    return value


def resolve_values(
    values: Mapping[str, Any], root: Mapping[str, Any], split: Callable[[str], tuple[str, list[str]]], read: ReadOutput
) -> dict[str, Any]:
    """Resolves the interpolations of a stage's keys.

    Args:
        values: the keys, after `rewrite_references`.
        root: the user's keys of the file, and the variables of `foreach`; the keys may refer to both.
        split: `split_reference` for this pipeline.

    Raises ConfigError if one cannot be resolved.
    """
    refusals: list[ConfigError] = []

    def look_up(path: str) -> Any:
        try:
            return read(*split(path))
        except ConfigError as refusal:
            refusals.append(refusal)
            raise

    OmegaConf.register_new_resolver(RESOLVER, look_up, replace=True)
    try:
        config = OmegaConf.create({**root, "__stage__": dict(values)})
        resolved = OmegaConf.to_container(config["__stage__"], resolve=True)
    except OmegaConfBaseException as error:
        raise refusals[0] if refusals else ConfigError(shorten_error(error).removeprefix("__stage__.")) from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def flatten_list(value: Any) -> list[Any]:
    """Returns a list with nested lists flattened."""
    if not isinstance(value, list):
        return [value]
    flat: list[Any] = []
    for item in value:
        flat += flatten_list(item)
    return flat


class StageCondition:
    """The condition of a stage: comparisons joined with `and`, `or` and `not`.

    Args:
        text: such as `${stages.week.metrics.accuracy} > 0.9`, after `rewrite_references`.

    Attributes:
        interpolations: interpolations in the text, in order.

    Raises ConfigError if the text is anything else.
    """

    def __init__(self, text: str) -> None:
        self.interpolations: list[str] = []

        def replace(match: re.Match[str]) -> str:
            self.interpolations.append(match[0])
            return f" _{len(self.interpolations) - 1} "

        self._text = text
        try:
            tree = ast.parse(INTERPOLATION.sub(replace, text).strip(), mode="eval").body
        except SyntaxError:
            raise self._refuse("cannot be read") from None
        self._tree = tree
        known = {*CONSTANTS, *(f"_{n}" for n in range(len(self.interpolations)))}
        for node in self._walk(tree):
            if isinstance(node, ast.Name) and node.id.lower() not in known:
                raise self._refuse(f"{node.id} is no value; put a text in quotes: '{node.id}'")

    def _walk(self, node: ast.AST) -> Iterator[ast.AST]:
        match node:
            case ast.BoolOp(values=parts):
                pass
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=part):
                parts = [part]
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in COMPARISONS for op in ops):
                parts = [left, *others]
            case ast.Constant() | ast.Name():
                parts = []
            case _:
                raise self._refuse("cannot be read")
        yield node
        for part in parts:
            yield from self._walk(part)

    def _refuse(self, why: str) -> ConfigError:
        shown = re.sub(rf"\$\{{{re.escape(RESOLVER)}:'([^']*)'\}}", r"${stages.\1}", self._text)
        return ConfigError(
            f"when: {shown}: {why}; write comparisons (==, !=, <, <=, >, >=) of numbers, texts in quotes and "
            "references, with and, or, not"
        )

    def holds(self, values: Sequence[Any]) -> bool:
        """Returns whether the condition is true. `values` are those of its interpolations.

        Raises ConfigError if two values cannot be compared.
        """
        return bool(self._evaluate(self._tree, values))

    def _evaluate(self, node: ast.AST, values: Sequence[Any]) -> Any:
        match node:
            case ast.BoolOp(op=op, values=parts):
                return (all if isinstance(op, ast.And) else any)(self._evaluate(part, values) for part in parts)
            case ast.UnaryOp(op=op, operand=part):
                value = self._evaluate(part, values)
                return not value if isinstance(op, ast.Not) else -value
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [self._evaluate(side, values) for side in (left, *others)]
                try:
                    for comparison, pair in zip(ops, itertools.pairwise(sides), strict=True):
                        if not COMPARISONS[type(comparison)](*pair):
                            return False
                    return True
                except TypeError:
                    raise self._refuse(f"{sides[0]!r} and {sides[1]!r} do not compare") from None
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return CONSTANTS[name.lower()] if name.lower() in CONSTANTS else values[int(name[1:])]
        raise AssertionError(node)
