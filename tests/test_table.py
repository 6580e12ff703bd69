"""Every cell of the table: planned or refused in words, and what is allowed trains.

`make test` trains a cover of the allowed cells in which each two values that can meet do; `make matrix` all of them.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from scaleflow.cluster.tasks import count_workers, process_names
from scaleflow.config.compose import ComposedConfig
from scaleflow.config.conditions import find_keys
from scaleflow.config.plan import check_rules, explain_rule, find_applicable, list_rules, set_values
from scaleflow.config.policies import LOOK
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan, Rule
from scaleflow.interfaces.events import to_fields
from scaleflow.launcher.prepare import make_plan
from tests.cluster.test_several_launchers import Hosts, ends
from tests.combinations import (
    AXES,
    Cell,
    assemble_config,
    list_cells,
    list_overrides,
    list_variables,
    make_cell_plan,
    render_page,
)
from tests.processes import ROOT
from tests.training.fake_engine import run_apart

CELLS = list(list_cells())

#: What no machine without an accelerator or a scheduler can try: planned only.
ELSEWHERE = {
    "hardware": {"gpu", "tpu"},
    "strategy": {"tpu"},
    "cluster": {"slurm", "kubernetes", "ray"},
}

STEPS = 3
BATCH_SIZE = 4  # a pipeline divides it into 4 micro-batches
SMALL = (
    "dataset.limit=64",
    "model.units=8",
    f"training.batch_size={BATCH_SIZE}",
    f"training.max_steps={STEPS}",
    "hardware.intra_op_threads=1",
    "tracking=none",
    "evaluation=none",
)


def name(cell: Cell) -> str:
    """The cell's values that are not an axis's first."""
    rest = zip(cell[1:], AXES[1:], strict=True)
    return "-".join([cell[0].name, *(f"{v.key.rpartition('.')[2]}={v.name}" for v, a in rest if v != a.values[0])])


# ---------------------------------------------------------------------------------------------
# Every cell is planned, in one process
# ---------------------------------------------------------------------------------------------


def outcome(cell: Cell) -> Plan | str:
    """The plan that the command would have, or what it says instead. Nothing but a ConfigError may come."""
    with mock.patch.dict(os.environ, list_variables(cell)):
        try:
            return make_plan(ComposedConfig(assemble_config(list_overrides(cell))), LOOK)
        except ConfigError as refusal:
            return str(refusal)


def refusing(cell: Cell) -> tuple[Plan, list[Rule]]:
    plan = make_cell_plan(cell)
    return plan, [rule for rule in find_applicable(plan) if rule.verdict == "refused"]


@pytest.mark.parametrize(
    "every", [pytest.param(11, id="eleventh cell"), pytest.param(1, id="cell", marks=pytest.mark.slow)]
)
def test_every_cell_is_a_plan_or_a_refusal_that_names_what_would_work(every: int) -> None:
    for cell in CELLS[::every]:
        found = outcome(cell)
        plan, rules = refusing(cell)
        if rules:
            assert found == explain_rule(rules[0], plan), name(cell)
            assert {value.word for value in cell} & set(found.partition(": ")[0].split(" with "))
        else:
            assert isinstance(found, Plan), found


def test_the_cells_are_what_hydra_would_compose(compose: Callable[..., dict[str, Any]]) -> None:
    for cell in CELLS[:: len(CELLS) // 5]:
        assert assemble_config(list_overrides(cell)) == compose(*list_overrides(cell)), name(cell)


def test_each_axis_is_made_of_values_that_are_read_as_such() -> None:
    for axis in AXES:
        assert len({value.name for value in axis.values}) == len(axis.values)
        for value in axis.values:
            section, _, leaf = value.key.partition(".")
            config = assemble_config([value.word])
            assert json.dumps(config[section][leaf or "name"]).strip('"') == value.name


@pytest.mark.parametrize("rule", list_rules(), ids=lambda rule: " with ".join(find_keys(rule)))
def test_a_rule_says_what_to_do_instead(rule: Rule) -> None:
    assert find_keys(rule)
    assert rule.reason
    assert rule.instead
    assert len(rule.reason + rule.instead) < 200
    assert [(find_keys(r), r.reason) for r in list_rules()].count((find_keys(rule), rule.reason)) == 1


def test_several_workers_on_cpus_say_that_logical_devices_make_no_replicas(plan: Callable[..., Plan]) -> None:
    (warning,) = check_rules(plan("strategy=multi_worker", "hardware=cpu", "hardware.logical_devices=2"))
    assert warning.startswith("hardware.logical_devices=2 with strategy=multi_worker: ")
    assert "cluster.workers=4" in warning


@pytest.mark.slow
def test_the_page_is_made_from_the_table() -> None:
    assert (ROOT / "docs" / "combinations.md").read_text() == render_page() + "\n", "out of date: make table"


# ---------------------------------------------------------------------------------------------
# What is allowed trains
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What a cell has come to on a machine with two logical CPUs to each process."""

    plan: Plan
    processes: int
    workers: int

    @property
    def resolved(self) -> Mapping[str, str]:
        replicas = {"mirrored": 2, "multi_worker": self.workers}.get(self.plan.strategy.name, 1)
        return {
            "strategy": self.plan.strategy.name,
            "precision": self.plan.precision.name,
            "hardware": self.plan.hardware.name,
            "workers": str(self.workers),
            "replicas": str(replicas),
            "global_batch_size": str(BATCH_SIZE * replicas * self.plan.training.accumulate),
        }


@functools.cache
def expected(cell: Cell) -> Expected:
    plan = make_cell_plan(cell)
    strategy = "mirrored" if plan.strategy.name == "auto" else plan.strategy.name
    precision = "mixed_bfloat16" if plan.precision.name == "mixed" else plan.precision.name
    known = {"strategy.name": strategy, "hardware.name": "cpu", "precision.name": precision}
    return Expected(set_values(plan, known), len(process_names(plan)), count_workers(plan))


def is_refused(cell: Cell) -> bool:
    """Refused by the launcher, or by the worker that knows more."""
    rules = (*find_applicable(make_cell_plan(cell)), *find_applicable(expected(cell).plan))
    return any(rule.verdict == "refused" for rule in rules)


def can_be_tried(cell: Cell) -> bool:
    return not any(v.name in ELSEWHERE.get(v.key, ()) for v in cell) and not is_refused(cell)


def pairs(cell: Cell) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    return set(itertools.combinations([(value.key, value.name) for value in cell], 2))


def cover(chosen: Sequence[Cell]) -> Iterator[Cell]:
    """Few of the cells in which all pairs are that are in any.

    Again and again the one with most pairs that are left, where each process counts as what it costs.
    """
    bits: dict[tuple[tuple[str, str], tuple[str, str]], int] = {}
    of = {cell: sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs(cell)) for cell in chosen}
    costs = {cell: expected(cell).processes for cell in chosen}
    left = (1 << len(bits)) - 1
    while left:
        best = max(of, key=lambda cell: (of[cell] & left).bit_count() / costs[cell])
        left &= ~of[best]
        yield best


#: The cells are divided into so many tests, since finding them out takes seconds: each finds its own.
SHARES = 4

#: Several cells of one process each follow one another in the same one.
AT_ONCE = 8


@functools.cache
def chosen(every: bool) -> Sequence[Cell]:
    tried = [cell for cell in CELLS if can_be_tried(cell)]
    return tried if every else list(cover(tried))


def work_here(runs: Mapping[str, tuple[Plan, Path]]) -> list[list[dict[str, Any]]]:
    """In a child: the events of each of several runs of one process, by their cells' names."""
    return run_apart(events_here, [(cell, plan, folder) for cell, (plan, folder) in runs.items()])


def events_here(cell: str, plan: Plan, folder: Path) -> list[dict[str, Any]]:
    from scaleflow.runs import RunSpec
    from scaleflow.worker.process import run_worker
    from scaleflow.worker.tasks import TrainModel

    print(cell, flush=True)  # the last one is where it failed
    events: list[dict[str, Any]] = []
    run_worker(RunSpec(plan, folder, time.time(), TrainModel()), lambda event: events.append(to_fields(event)), bool)
    return events


def batches(cells: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
    """Divides cells of one process into those that can share one: with equal devices, and Keras's fit alone."""
    alike: dict[str, list[Cell]] = {}
    for cell in cells:
        words = list_overrides(cell)
        key = name(cell) if "training.engine=fit" in words else str("hardware.logical_devices=2" in words)
        alike.setdefault(key, []).append(cell)
    for group in alike.values():
        yield from (group[first : first + AT_ONCE] for first in range(0, len(group), AT_ONCE))


def plan_of(cell: Cell) -> Plan:
    return make_plan(ComposedConfig(assemble_config([*list_overrides(cell), *SMALL])), LOOK)


def events_of(cell: Cell, folder: Path) -> list[dict[str, Any]]:
    """Trains a cell of several processes: by the command, or by a command on each machine."""
    typed = [*list_overrides(cell), *SMALL]
    served = expected(cell).plan.strategy.name == "parameter_server"
    hosts = Hosts(folder, *((3, "chief", "worker", "ps") if served else (2,)))
    if "cluster=tf_config" in {value.word for value in cell}:
        typed.append(f"checkpoint.folder={folder / 'kept'}")
        started = [command.start(*typed, TF_CONFIG=hosts.tf_config(i)) for i, command in enumerate(hosts.commands)]
    else:
        started = [hosts.commands[0].start(*typed)]
    for code, _, stderr in ends(started):
        assert code == 0, stderr
    return hosts.commands[0].events()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("share", range(SHARES))
def test_allowed_cells_train(
    isolated: Callable[..., Any], tmp_path: Path, pytestconfig: pytest.Config, share: int
) -> None:
    cells = chosen(pytestconfig.getoption("--matrix"))[share::SHARES]
    folders = {cell: tmp_path / str(number) for number, cell in enumerate(cells)}
    for folder in folders.values():
        folder.mkdir()
    for batch in batches([cell for cell in cells if expected(cell).processes == 1]):
        runs = {name(cell): (plan_of(cell), folders[cell]) for cell in batch}
        for cell, events in zip(batch, isolated(work_here, runs), strict=True):
            print("checking", name(cell))
            is_trained(cell, events)
    for cell in cells:
        if expected(cell).processes > 1:
            print(name(cell))  # the last one is where it failed
            is_trained(cell, events_of(cell, folders[cell]))


def is_trained(allowed: Cell, events: list[dict[str, Any]]) -> None:
    assert events[-1].get("status") == "FINISHED", events[-1]
    (ready,) = [event for event in events if event["event"] == "ready"]
    assert ready["steps"] == STEPS
    wanted = expected(allowed)
    assert {key: ready["params"][f"resolved.{key}"] for key in wanted.resolved} == wanted.resolved
    assert {value.key: ready["params"][value.key] for value in allowed if "." in value.key} == {
        value.key: value.name for value in allowed if "." in value.key
    }
    metrics = [event for event in events if event["event"] == "metrics"]
    losses = [event["values"]["train/loss"] for event in metrics if "train/loss" in event["values"]]
    assert losses
    assert all(math.isfinite(loss) for loss in losses)
    assert max(event["step"] for event in metrics) == STEPS
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert [note for note in check_rules(wanted.plan) if note not in notes] == []
