"""Renders the docs page of option combinations from the rules in scaleflow/config/plan.py and of the cluster engines.

python -m tests.combinations > docs/combinations.md
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from scaleflow.cluster.tf_config import EXAMPLE, TF_CONFIG
from scaleflow.config.conditions import find_keys
from scaleflow.config.plan import explain_rule, find_applicable, list_rules, parse_plan
from scaleflow.interfaces import Hardware, Plan, Precision, Rule, Strategy, Training
from scaleflow.launcher.prepare import resolve_environment


@dataclass(frozen=True)
class Value:
    """One value of an axis.

    Attributes:
        key: the key of the axis.
        name: the value as it is typed after the key.
    """

    key: str
    name: str

    @property
    def word(self) -> str:
        """The override: `KEY=NAME`."""
        return f"{self.key}={self.name}"


@dataclass(frozen=True)
class Axis:
    """A key and its values. Of values that work with the same values of other keys, only one is listed."""

    key: str
    values: tuple[Value, ...]


#: (overrides, a further override that a combination with all of them needs to make sense): several devices on a CPU.
NEEDS: Sequence[tuple[frozenset[str], str]] = tuple(
    (frozenset({f"strategy={strategy}", f"hardware={hardware}"}), "hardware.logical_devices=2")
    for strategy in ("auto", "mirrored", "pipeline")
    for hardware in ("auto", "cpu")
)

EXAMPLE_WITH_SERVERS = (
    '{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222"], "ps": ["host2:2222"]}, '
    '"task": {"type": "chief", "index": 0}}'
)

#: (overrides, the environment variables that a combination with all of them needs). A later entry wins.
ENVIRONMENTS: Sequence[tuple[frozenset[str], Mapping[str, str]]] = (
    (frozenset({"cluster=tf_config"}), {TF_CONFIG: EXAMPLE}),
    (frozenset({"cluster=tf_config", "strategy=parameter_server"}), {TF_CONFIG: EXAMPLE_WITH_SERVERS}),
)


def make_axis(key: str, *names: str) -> Axis:
    return Axis(key, tuple(Value(key, name) for name in names))


def literal_values(cls: type[Any], name: str = "name") -> tuple[str, ...]:
    """Returns the values of the Literal of a field."""
    return get_args(get_type_hints(cls)[name])


AXES: Sequence[Axis] = (
    make_axis("strategy", *literal_values(Strategy)),
    make_axis("hardware", *literal_values(Hardware)),
    make_axis("precision", *literal_values(Precision)),
    make_axis("training.engine", *literal_values(Training, "engine")),
    make_axis("training.accumulate", "1", "4"),
    make_axis("training.clip_norm", "null", "1.0"),
    make_axis("hardware.xla", "false", "true"),
    make_axis("cluster", "local", "tf_config"),  # slurm and kubernetes work as tf_config
)

Cell = tuple[Value, ...]

TITLE = """\
# What works with what

<!-- Made by `make table` from scaleflow/config/plan.py. -->

Before a run starts, scaleflow checks its options against the rules on this page. A refused command takes about a second
and leaves no files. A combination with a warning runs, and the warning is shown as a note.

In each table, a row is a strategy and a column is a value of another key:

- **yes**: works.
- **no**: refused. The number links to the reason and to what works instead.
- **warns**: works. The note says what to know about it.
- **depends**, **may warn**: refused, or with a warning, only together with what the reason names.

`auto` is resolved when the run starts, from the devices on its machine. The result is then checked by the same rules.
`make matrix` trains every allowed combination that can run on a CPU. Combinations that need a GPU or a TPU are only
planned there.
"""


def list_cells() -> Iterator[Cell]:
    """Yields every combination of one value per axis."""
    return itertools.product(*(axis.values for axis in AXES))


def list_overrides(cell: Cell) -> list[str]:
    """Returns the overrides that a user types for a cell."""
    overrides = [value.word for value in cell]
    return overrides + [word for values, word in NEEDS if values <= set(overrides)]


def list_variables(cell: Cell) -> dict[str, str]:
    """Returns the environment variables that a cell needs."""
    overrides = {value.word for value in cell}
    return {name: text for values, variables in ENVIRONMENTS if values <= overrides for name, text in variables.items()}


# ---------------------------------------------------------------------------------------------
# A cell's config, without calling Hydra for every cell
# ---------------------------------------------------------------------------------------------


def assemble_config(typed: Sequence[str]) -> dict[str, Any]:
    """Returns the config that Hydra would compose from overrides `GROUP=OPTION` and `GROUP.KEY=VALUE`.

    Hydra composes each option only once; the result is cached.
    """
    config = {
        key: dict(section) if isinstance(section, dict) else section for key, section in compose_options().items()
    }
    for word in typed:
        key, _, value = word.partition("=")
        group, _, name = key.partition(".")
        if name:
            config[group][name] = read_value(value)
        else:
            config[group] = dict(compose_options(word)[group])
    return config


read_value = functools.cache(yaml.safe_load)


@functools.cache
def compose_options(*overrides: str) -> Mapping[str, Any]:
    with initialize_config_module("scaleflow.conf", version_base="1.3"):
        config = OmegaConf.to_container(compose("config", overrides=list(overrides)), resolve=True)
    assert isinstance(config, dict)
    return {str(key): section for key, section in config.items()}


@functools.cache
def make_cell_plan(cell: Cell) -> Plan:
    """Returns the plan of a cell, whether or not the rules refuse it."""
    plan = parse_plan(assemble_config(list_overrides(cell)), {value.key: value.name for value in cell})
    return resolve_environment(plan, list_variables(cell))


# ---------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedCell:
    """A cell's values, and the message of each rule that applies to it."""

    values: Cell
    messages: Mapping[Rule, str]


def find_rules(cell: Cell) -> CheckedCell:
    plan = make_cell_plan(cell)
    return CheckedCell(cell, {rule: explain_rule(rule, plan) for rule in find_applicable(plan)})


def format_verdict(cells: Sequence[CheckedCell], axis: Axis) -> tuple[str, list[Rule]]:
    """Returns the table's entry for cells with the same strategy and value of an axis, and the rules that cause it.

    Cells that are refused because of other axes are left out, unless no others remain.
    """
    relevant = [
        cell
        for cell in cells
        if all(axis.key in find_keys(rule) for rule in cell.messages if rule.verdict == "refused")
    ] or cells
    for kind, always, sometimes in (("refused", "no", "depends"), ("warning", "warns", "may warn")):
        matches = [
            [rule for rule in cell.messages if rule.verdict == kind and axis.key in find_keys(rule)]
            for cell in relevant
        ]
        if any(matches):
            rules = [rule for rule in list_rules() if any(rule in match for match in matches)]
            return (always if all(matches) else sometimes), rules
    return "yes", []


def render_page() -> str:
    """Returns the page in Markdown."""
    cells = [find_rules(cell) for cell in list_cells()]
    reasons: dict[Rule, int] = {}
    strategies, *others = AXES
    tables = [render_table(cells, strategies, axis, reasons) for axis in others if len(axis.values) > 1]
    return "\n".join([TITLE, *tables, *render_notes(cells, reasons)])


def render_table(cells: Sequence[CheckedCell], strategies: Axis, axis: Axis, reasons: dict[Rule, int]) -> str:
    """Returns the table of one axis against the strategies. Adds new rules to `reasons`, with their numbers."""
    rows = [f"| strategy | {' | '.join(f'`{value.name}`' for value in axis.values)} |"]
    rows.append("|---" * (1 + len(axis.values)) + "|")
    for strategy in strategies.values:
        entries = []
        for value in axis.values:
            matching = [cell for cell in cells if strategy in cell.values and value in cell.values]
            word, rules = format_verdict(matching, axis)
            numbers = [reasons.setdefault(rule, len(reasons) + 1) for rule in rules]
            entries.append(" ".join([word, *(f"[{n}](#{n})" for n in numbers)]))
        rows.append(f"| `{strategy.name}` | {' | '.join(entries)} |")
    return "\n".join([f"## {axis.key}", "", *rows, ""])


def render_notes(cells: Sequence[CheckedCell], reasons: Mapping[Rule, int]) -> Iterator[str]:
    """Yields the numbered reasons, as a command would print them, then the rules that no table refers to."""
    yield "## Why, and what to do instead\n"
    for rule, number in reasons.items():
        message = next(cell.messages[rule] for cell in cells if rule in cell.messages)
        yield f'{number}. <a id="{number}"></a>{to_markdown_code(message)}'
    yield "\n## Other combinations that are refused or give a warning\n"
    for rule in list_rules():
        if rule not in reasons:
            keys = " with ".join(f"`{key}`" for key in find_keys(rule))
            yield f"- {rule.verdict}: {keys}: {rule.reason}; {rule.instead}"


def to_markdown_code(message: str) -> str:
    """Formats the keys and values of a message as code."""
    settings, _, reason = message.partition(": ")
    return f"{' with '.join(f'`{word}`' for word in settings.split(' with '))}: {reason}"


if __name__ == "__main__":
    print(render_page())
