"""A task in its process: the border between a refused and a failed run."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError, RunError
from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import Event, FaultReported, RunEnded, RunReady, RunRefused, ignore_event
from scaleflow.runs import RunSpec, Task, WorkerProcess
from scaleflow.worker.process import run_worker
from scaleflow.worker.tasks import TrainModel


@dataclass(frozen=True)
class Fail(Task):
    """A task from another package, which fails before `ready` or after it."""

    error: Exception | None
    is_ready: bool

    def run(self, process: WorkerProcess) -> None:
        process.lock_folder()
        process.explain = lambda error: RunError(f"explained: {error}")
        process.after_failure = lambda error: process.emit(RunEnded("FAILED", f"cleaned up after: {error}"))
        if self.is_ready:
            process.report_ready(RunReady("a-run"))
        if self.error is not None:
            raise self.error
        process.emit(RunEnded("FINISHED"))


def run(plan: Plan, folder: str, error: Exception | None, is_ready: bool) -> tuple[bool, list[Event]]:
    """Whether a task succeeded, and its events without `ready` and files."""
    events: list[Event] = []
    is_done = run_worker(RunSpec(plan, Path(folder), 0.0, Fail(error, is_ready)), events.append, bool)
    return is_done, [event for event in events if isinstance(event, RunEnded | RunRefused | FaultReported)]


@pytest.fixture
def outcome(plan: Callable[..., Plan], isolated: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    return lambda error, is_ready: isolated(run, plan("tracking=none"), str(tmp_path), error, is_ready)


def test_an_error_before_ready_refuses_the_run(outcome: Callable[..., Any], tmp_path: Path) -> None:
    is_done, (refused,) = outcome(ConfigError("model.units=0: use 1"), False)
    assert (is_done, refused.message, refused.keep) == (False, "model.units=0: use 1", False)
    is_done, (refused,) = outcome(KeyError("x"), False)
    assert not is_done
    assert refused.keep
    assert re.match(r"KeyError: 'x' \(.*test_process.py, line \d+, in run\); the traceback is in ", refused.message)
    assert not list(tmp_path.glob("traceback*"))


def test_an_error_after_ready_fails_the_run(outcome: Callable[..., Any], tmp_path: Path) -> None:
    """Also an error with which the run could have been refused."""
    is_done, (fault, end) = outcome(ConfigError("model.units=0: use 1"), True)
    assert (is_done, fault.error) == (False, "explained: model.units=0: use 1")
    assert end.error == "cleaned up after: model.units=0: use 1"
    assert "ConfigError" in (tmp_path / "traceback.txt").read_text()


def test_the_folder_is_free_when_the_task_has_ended(
    plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if something still refers to the process."""
    monkeypatch.setattr("scaleflow.runs.folder.SECONDS_TO_WAIT", 0.0)
    spec = RunSpec(plan("tracking=none"), tmp_path, 0.0, Fail(None, True))
    assert [run_worker(spec, ignore_event, bool) for _ in range(2)] == [True, True]


def test_a_task_may_need_no_run(outcome: Callable[..., Any]) -> None:
    is_done, (end,) = outcome(None, False)
    assert (is_done, end.status) == (True, "FINISHED")


def test_a_task_of_another_package_travels_to_its_process(plan: Callable[..., Plan], tmp_path: Path) -> None:
    spec = RunSpec(plan(), tmp_path, 0.0, Fail(None, True))
    assert RunSpec.from_line(spec.to_line()).task == spec.task
    assert (TrainModel().trains, spec.task.trains) == (True, False)
