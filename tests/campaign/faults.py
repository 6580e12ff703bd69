"""The moment at which a fault comes, and the fault itself."""

from __future__ import annotations

import contextlib
import resource
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.campaign.bench import SECONDS_TO_END, Bench, Command, size_of, until
from tests.campaign.cases import DAMAGE, DISK, GONE, KILL, LOCK, PAUSE, STALL, STEPS, TERM, Case
from tests.campaign.remote import Remote
from tests.event_log import events_in

#: The events of a role's process, in the run's folder.
EVENTS_OF = {"chief": "events.jsonl", "worker": "events-worker-1.jsonl", "server": "events-server-0.jsonl"}


class Missed(Exception):
    """The run was through, or the process gone, before the fault came."""


class Watch:
    """Where a command stands in the run's life.

    Args:
        bench: the run's.
        command: the one that runs.
    """

    def __init__(self, bench: Bench, command: Command) -> None:
        self._bench = bench
        self._command = command
        self._began = {name: size_of(bench.run / name) for name in EVENTS_OF.values()}

    def events(self, name: str = "events.jsonl") -> list[dict[str, Any]]:
        """What was told since this watch began."""
        return events_in(self._bench.run / name, self._began[name])

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        found = until(lambda: not self._command.is_alive or condition(), SECONDS_TO_END, what)
        if found is True and not self._command.is_alive:
            raise Missed(f"the command was over before {what}")
        return found

    def process(self, role: str) -> psutil.Process | None:
        """The newest process in this role, once it has told of itself, as long as it lives."""
        if role == "launcher":
            return psutil.Process(self._command.pid)
        if role == "forker":
            return self._bench.forker
        names = [EVENTS_OF[role]] if role != "worker" else [EVENTS_OF[role], "events-worker-0.jsonl"]
        for name in names:
            for event in reversed(events_in(self._bench.run / name)):
                if event["event"] == "started":
                    with contextlib.suppress(psutil.NoSuchProcess):
                        return psutil.Process(event["pid"])
                    return None
        return None

    def has_begun(self, role: str) -> bool:
        if role in ("launcher", "forker", "store"):
            return True
        return any(event["event"] == "started" for event in self.events(EVENTS_OF[role]))

    def step(self) -> int:
        """The last one that was reported."""
        return max((event["step"] for event in self.events() if event["event"] == "metrics"), default=-1)


def wait_for_moment(case: Case, watch: Watch) -> None:
    if case.stage == "start":
        watch.until(lambda: watch.has_begun(case.role), f"{case.role} began")
    else:
        step = STEPS if case.stage == "end" else case.step
        watch.until(lambda: watch.step() >= step, f"step {step}")
    time.sleep(case.seconds)


def signalled(watch: Watch, role: str, number: int) -> psutil.Process:
    """Sends a signal to a role's process."""
    process = watch.process(role)
    if process is None or process.status() == psutil.STATUS_ZOMBIE:
        raise Missed(f"{role} was gone")
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess as error:
        raise Missed(f"{role} was gone") from error
    return process


@contextlib.contextmanager
def made(case: Case, bench: Bench, watch: Watch, command: Command, remote: Remote | None) -> Iterator[None]:
    """Makes the fault that a case is about, for as long as the block or the case says."""
    with contextlib.ExitStack() as until_it_is_over:
        if case.kind == KILL:
            signalled(watch, case.role, signal.SIGKILL)
        elif case.kind == TERM or (case.kind == DAMAGE and case.place < 0.5):
            signalled(watch, case.role, signal.SIGTERM)
        elif case.kind == DAMAGE:
            signalled(watch, case.role, signal.SIGKILL)
        elif case.kind in (PAUSE, STALL):
            process = signalled(watch, case.role, signal.SIGSTOP)
            until_it_is_over.callback(signal_if_there, process, signal.SIGCONT)
        elif case.kind == DISK:
            fill(watch.process(case.role), int(case.place * 20_000))
        elif case.kind == LOCK:
            until_it_is_over.enter_context(locked(bench.folder / "mlflow.db"))
        elif case.kind == GONE:
            assert remote is not None
            until_it_is_over.enter_context(remote.away(case.how))
        if case.lasts:
            time.sleep(case.lasts)
            until_it_is_over.close()
        yield


def signal_if_there(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def fill(process: psutil.Process | None, left: int) -> None:
    """From now on no file of a process may be larger than `left` bytes."""
    if process is None:
        raise Missed("the process was gone")
    try:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (left, resource.RLIM_INFINITY))
    except ProcessLookupError as error:
        raise Missed("the process was gone") from error


@contextlib.contextmanager
def locked(store: Path) -> Iterator[None]:
    """A store that somebody else holds."""
    database = sqlite3.connect(store, timeout=20, isolation_level=None)
    database.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        database.execute("ROLLBACK")
        database.close()


def damage(folder: Path, how: str, place: float) -> str | None:
    """Damages the newest checkpoint; gives its name, or None where there is none."""
    there: Sequence[Path] = sorted((folder / "checkpoints").glob("step-*/checkpoint.json"))
    if not there:
        return None
    manifest = there[-1]
    (data,) = manifest.parent.glob("tensors.data*")
    file = {"data": data, "index": manifest.parent / "tensors.index", "manifest": manifest}[how.rpartition(" ")[2]]
    content = bytearray(file.read_bytes())
    at = int(place * len(content))
    if how.startswith("bit"):
        content[at] ^= 1 << at % 8
        file.write_bytes(content)
    elif how.startswith("short"):
        file.write_bytes(content[:at])
    else:
        file.unlink()
    return manifest.parent.name
