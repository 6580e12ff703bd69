"""Every strategy in every precision trains the default job to the accuracy that is promised.

Also where two replicas make the global batch 64. `make test` leaves out what another cell shows as well, `make matrix`
trains all.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import to_fields
from scaleflow.interfaces.features import list_option_files
from tests.conftest import Command

PROMISED = 0.95

SEVERAL_PROCESSES = ("multi_worker", "parameter_server")

#: Strategies that need hardware which is not everywhere: nothing here says that they train.
NEEDS_HARDWARE = {"tpu"}


def options(group: str) -> list[str]:
    """A new option joins the matrix by being in conf/."""
    return sorted(path.stem for path in list_option_files(group))


def run(plan: Plan, folder: Path) -> list[dict[str, Any]]:
    from scaleflow.runs import RunSpec
    from scaleflow.worker.process import run_worker
    from scaleflow.worker.tasks import TrainModel

    events: list[dict[str, Any]] = []
    run_worker(RunSpec(plan, folder, time.time(), TrainModel()), lambda event: events.append(to_fields(event)), bool)
    return events


def shown_elsewhere(strategy: str, precision: str) -> bool:
    """`mixed` is bfloat16 on a CPU, and what several processes do with that is what mirrored replicas do."""
    return (precision == "mixed" and strategy != "one_device") or (
        precision == "mixed_bfloat16" and strategy in SEVERAL_PROCESSES
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cells = [
        cell
        for cell in itertools.product(options("strategy"), options("precision"))
        if cell[0] not in {"auto", *NEEDS_HARDWARE}
        and (metafunc.config.getoption("--matrix") or not shown_elsewhere(*cell))
    ]
    metafunc.parametrize(("strategy", "precision"), cells)


def test_the_default_job_reaches_the_promised_accuracy(
    isolated: Callable[..., Any],
    plan: Callable[..., Plan],
    command: Command,
    tmp_path: Path,
    strategy: str,
    precision: str,
) -> None:
    words = (f"strategy={strategy}", f"precision={precision}", "hardware=cpu")
    if strategy in SEVERAL_PROCESSES:  # takes processes, which take a launcher
        ended = command(*words, "tracking=none", timeout=240)
        assert ended.returncode == 0, ended.stderr
        events = command.events()
    else:
        events = isolated(run, plan(*words, "hardware.logical_devices=2"), tmp_path)
    assert (events[-1]["event"], events[-1]["status"]) == ("end", "FINISHED")
    events = [event for event in events if event["event"] == "metrics"]
    last = {key: value for event in events for key, value in event["values"].items()}
    assert last["test/accuracy"] >= PROMISED
    assert ("train/loss_scale" in last) == (precision == "mixed_float16")
    assert last["train/gradient_norm"] > 0
    assert last["train/learning_rate"] == pytest.approx(0.001)
