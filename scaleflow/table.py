"""The table of what works with what: every cell of it, and its page in the docs.

python -m scaleflow.table > docs/combinations.md
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from scaleflow.config.plan import read_plan
from scaleflow.config.rules import AXES, ENVIRONMENTS, NEEDS, RULES, Axis, Rule, Value, find_applicable
from scaleflow.interfaces import Plan

Cell = tuple[Value, ...]

TITLE = """\
# What works with what

<!-- Made by `make table` from scaleflow/config/rules.py. -->

Before there is a run, each combination is looked up in the table that this page is made from. What is refused costs a
second and leaves nothing behind; what comes with a warning begins with it as a note. In each table a row is a strategy,
a column a value of another key:

- **yes**: works;
- **no**: refused; the number leads to the reason, and to what works instead;
- **warns**: works, and the note says what to know of it;
- **depends**, **may warn**: only together with what the reason names.

`auto` is decided where the run starts, by the devices found there; what it has come to is then looked up in the
same way. `make matrix` trains what this page allows on CPUs; what needs a GPU or a TPU is planned there, not run.
"""


def list_cells() -> Iterator[Cell]:
    """One value of each axis, in every combination."""
    return itertools.product(*(axis.values for axis in AXES))


def list_overrides(cell: Cell) -> list[str]:
    """What one types for a cell."""
    typed = [value.word for value in cell]
    return typed + [word for values, word in NEEDS if values <= set(typed)]


@contextlib.contextmanager
def set_environment(cell: Cell) -> Iterator[None]:
    """The environment that a cell's values need, and nothing in it that the other values would read."""
    typed = {value.word for value in cell}
    known = {name for _, variables in ENVIRONMENTS for name in variables}
    needed = {name: text for values, variables in ENVIRONMENTS if values <= typed for name, text in variables.items()}
    with mock.patch.dict(os.environ, needed):
        for name in known - needed.keys():
            os.environ.pop(name, None)
        yield


# ---------------------------------------------------------------------------------------------
# A cell's config, without a call of Hydra for each
# ---------------------------------------------------------------------------------------------


def assemble_config(typed: Sequence[str]) -> dict[str, Any]:
    """What Hydra would compose, from options composed once each; a word for a key sets its value."""
    config = {
        key: dict(section) if isinstance(section, dict) else section for key, section in compose_options().items()
    }
    for word in typed:
        key, _, value = word.partition("=")
        group, _, leaf = key.partition(".")
        if leaf:
            config[group][leaf] = read_value(value)
        else:
            config[group] = dict(compose_options(word)[group])
    return config


read_value = functools.cache(yaml.safe_load)


@functools.cache
def compose_options(*overrides: str) -> Mapping[str, Any]:
    with initialize_config_module("scaleflow.conf", version_base="1.3"):
        plain = OmegaConf.to_container(compose("config", overrides=list(overrides)), resolve=True)
    assert isinstance(plain, dict)
    return {str(key): section for key, section in plain.items()}


@functools.cache
def make_cell_plan(cell: Cell) -> Plan:
    """The cell as a plan, refused or not."""
    with set_environment(cell):
        return read_plan(assemble_config(list_overrides(cell)), {value.key: value.name for value in cell})


# ---------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedCell:
    """A cell, and each rule that applies to it with its message."""

    cell: Cell
    messages: Mapping[Rule, str]


def find_rules(cell: Cell) -> CheckedCell:
    plan = make_cell_plan(cell)
    with set_environment(cell):
        return CheckedCell(cell, {rule: rule.message(plan) for rule in find_applicable(plan)})


def is_about(rule: Rule, axis: Axis) -> bool:
    """Whether a rule has to do with an axis."""
    return axis.key in rule.keys


def format_verdict(found: Sequence[CheckedCell], axis: Axis) -> tuple[str, list[Rule]]:
    """What to say of cells that have a strategy and a value of an axis in common, and the rules behind it.

    Cells that are refused for a reason that lies on other axes say nothing about this one.
    """
    open_ones = [
        f for f in found if all(is_about(rule, axis) for rule in f.messages if rule.verdict == "refused")
    ] or found
    for kind, always, sometimes in (("refused", "no", "depends"), ("warning", "warns", "may warn")):
        hits = [[rule for rule in f.messages if rule.verdict == kind and is_about(rule, axis)] for f in open_ones]
        if any(hits):
            rules = [rule for rule in RULES if any(rule in hit for hit in hits)]
            return (always if all(hits) else sometimes), rules
    return "yes", []


def render_page() -> str:
    """The table in Markdown."""
    found = [find_rules(cell) for cell in list_cells()]
    reasons: dict[Rule, int] = {}
    strategies, *others = AXES
    tables = [render_table(found, strategies, axis, reasons) for axis in others if len(axis.values) > 1]
    return "\n".join([TITLE, *tables, *render_notes(found, reasons)])


def render_table(found: Sequence[CheckedCell], strategies: Axis, axis: Axis, reasons: dict[Rule, int]) -> str:
    """One axis against the strategies; numbers the reasons that are new."""
    rows = [f"| strategy | {' | '.join(f'`{value.name}`' for value in axis.values)} |"]
    rows.append("|---" * (1 + len(axis.values)) + "|")
    for strategy in strategies.values:
        entries = []
        for value in axis.values:
            word, rules = format_verdict([f for f in found if strategy in f.cell and value in f.cell], axis)
            numbers = [reasons.setdefault(rule, len(reasons) + 1) for rule in rules]
            entries.append(" ".join([word, *(f"[{n}](#{n})" for n in numbers)]))
        rows.append(f"| `{strategy.name}` | {' | '.join(entries)} |")
    return "\n".join([f"## {axis.key}", "", *rows, ""])


def render_notes(found: Sequence[CheckedCell], reasons: Mapping[Rule, int]) -> Iterator[str]:
    """The reasons by their numbers, as a command would give them, then what is on no axis."""
    yield "## Why, and what to do instead\n"
    for rule, number in reasons.items():
        message = next(f.messages[rule] for f in found if rule in f.messages)
        yield f'{number}. <a id="{number}"></a>{to_markdown_code(message)}'
    yield "\n## What else is refused, or comes with a warning\n"
    for rule in RULES:
        if rule not in reasons:
            yield f"- {rule.verdict}: {' with '.join(f'`{key}`' for key in rule.keys)}: {rule.reason}; {rule.instead}"


def to_markdown_code(message: str) -> str:
    """A message, its keys and values as code."""
    found, _, why = message.partition(": ")
    return f"{' with '.join(f'`{word}`' for word in found.split(' with '))}: {why}"


if __name__ == "__main__":
    print(render_page())
