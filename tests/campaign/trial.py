"""One case from its first command to the judgement."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.campaign.bench import Bench, Command, Hang
from tests.campaign.cases import DAMAGE, DISK, GONE, KILL, LOCK, PAUSE, STALL, TERM, Case
from tests.campaign.faults import Missed, Watch, damage, made, signalled, wait_for_moment
from tests.campaign.judge import (
    CODES,
    Stored,
    Whole,
    differences,
    last_end,
    lost_points,
    stored,
    twice,
    was_ready,
    was_refused,
    whole,
    wrong_status,
)
from tests.campaign.remote import Remote

#: A command that goes on with a run may be befallen once itself, and may find that there is no run yet.
MAX_COMMANDS = 6

#: What a command says if it has left the store behind.
NOT_TAKEN = "the store has not received"


@dataclass
class Result:
    """What came of a case.

    Attributes:
        faults: how many were made; 0: the run was through before.
        wrong: what should not be, each in a line.
        seconds: it took.
    """

    case: Case
    faults: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Trial:
    """One case.

    Args:
        case: what to try.
        bench: an empty store in its folder.
        undisturbed: the run of this strategy that nothing befell.
        remote: the server, where the case takes one.
    """

    def __init__(self, case: Case, bench: Bench, undisturbed: Whole, remote: Remote | None = None) -> None:
        self._case = case
        self._bench = bench
        self._undisturbed = undisturbed
        self._remote = remote
        self._where = ("scaleflow", bench.folder / "mlflow.db")
        self._words = case.words
        if case.kind == GONE:
            assert remote is not None
            self._where = (f"case {case.number}", remote.store)
            self._words += [f"tracking.uri={remote.uri}", f"tracking.experiment='case {case.number}'"]
        self.result = Result(case)

    def run(self) -> Result:
        began = time.monotonic()
        try:
            self._try()
        except Missed as missed:
            self.result.wrong = self.result.wrong if self.result.faults else []
            self.result.wrong += [str(missed)] if self.result.faults else []
        except Hang as hang:
            self.result.wrong.append(f"hang: {hang}")
        except Exception as error:
            self.result.wrong.append(f"the judge failed: {type(error).__name__}: {error}")
        self.result.wrong += self._bench.close()
        self.result.seconds = time.monotonic() - began
        return self.result

    def _try(self) -> None:
        command = self._bench.command(*self._words)
        watch = Watch(self._bench, command)
        wait_for_moment(self._case, watch)
        with made(self._case, self._bench, watch, command, self._remote):
            self.result.faults += 1
            code = command.end()
        self._look_at(command, code, expected(self._case))
        if code == -signal.SIGKILL and self._case.number % 2 == 0 and was_ready(self._bench.run):
            self._repair()
        if self._case.kind == DAMAGE:
            damage(self._bench.run, self._case.how, self._case.place)
        self._go_on()
        self._judge_the_whole()

    def _repair(self) -> None:
        """Has the run of a launcher that was killed recorded as far as it came, with how it ended."""
        command = self._bench.command(str(self._bench.run), module="scaleflow sync")
        if (code := command.end()) != 0:
            self.result.wrong.append(f"{command.name}: scaleflow.sync ended with {code}")
        runs, status = self._runs(), last_end(self._bench.run).get("status", "none")
        wrong = [*wrong_status(CODES.get(status, -1), self._bench.run, runs, True), *lost_points(self._bench.run, runs)]
        self.result.wrong += [f"{command.name}: {line}" for line in wrong]

    def _go_on(self) -> None:
        """Until the run is finished, and the store knows."""
        again = self._case.again
        for _ in range(MAX_COMMANDS):
            if last_end(self._bench.run).get("status") == "FINISHED" and not list(self._unrecorded()):
                return
            command = self._next_command()
            if again:
                code = self._befallen(command, again)
                again = ""
                continue
            code = command.end()
            self._look_at(command, code, {"FINISHED"})
            if self.result.wrong:
                return
        self.result.wrong.append(f"not finished after {MAX_COMMANDS} commands")

    def _next_command(self) -> Command:
        """The one that a user would give now."""
        if not was_ready(self._bench.run):
            with contextlib.suppress(FileNotFoundError):
                self._bench.run.rename(self._bench.folder / f"never-ready-{len(self._bench.commands)}")
            return self._bench.command(*self._words)
        return self._bench.command(f"resume={self._bench.run}")

    def _befallen(self, command: Command, role: str) -> int:
        """Kills a process of a command that goes on, if that is not through before."""
        watch = Watch(self._bench, command)
        with contextlib.suppress(Missed):
            wait_for_moment(replace(self._case, stage="start", role=role), watch)
            signalled(watch, role, signal.SIGKILL)
            self.result.faults += 1
        code = command.end()
        self._look_at(command, code, expected(replace(self._case, kind=KILL, role=role)))
        return code

    def _look_at(self, command: Command, code: int, allowed: set[str]) -> None:
        """What can be said of a command that has ended."""
        wrong = [f"orphan: {' '.join(process.cmdline())} ({process.pid})" for process in self._bench.left()]
        if code >= 0:
            wrong += self._untrue(command, code, allowed)
        elif code not in (-signal.SIGKILL, -signal.SIGTERM):
            wrong.append(f"the launcher died of {signal.Signals(-code).name}")
        if "Traceback" in command.said():
            wrong.append("a traceback on the terminal")
        self.result.wrong += [f"{command.name}: {line}" for line in wrong]

    def _untrue(self, command: Command, code: int, allowed: set[str]) -> Iterator[str]:
        is_recorded = NOT_TAKEN not in command.said() and not self._is_without_disk(command)
        runs = self._runs()
        yield from wrong_status(code, self._bench.run, runs, is_recorded)
        end = last_end(self._bench.run)
        if (
            was_ready(self._bench.run)
            and not was_refused(self._bench.run)
            and end.get("status") not in {*allowed, "FINISHED"}
        ):
            yield f"{end.get('status')} ({end.get('error')}), where it should be {' or '.join(sorted(allowed))}"
        if is_recorded:
            yield from lost_points(self._bench.run, runs)

    def _is_without_disk(self, command: Command) -> bool:
        """Whether a launcher can't even say that it could not record everything."""
        return self._case.kind == DISK and self._case.role == "launcher" and command is self._bench.commands[0]

    def _runs(self) -> list[Stored]:
        experiment, store = self._where
        return stored(store, experiment)

    def _unrecorded(self) -> Iterator[str]:
        runs = self._runs()
        yield from lost_points(self._bench.run, runs)
        yield from (f"the store says {run.status}" for run in runs if run.status != "FINISHED")

    def _judge_the_whole(self) -> None:
        folder = self._bench.run
        if last_end(folder).get("status") != "FINISHED":
            return
        wrong = [*wrong_status(0, folder, self._runs(), True), *lost_points(folder, self._runs())]
        wrong += [*twice(folder), *differences(self._case, whole(folder), self._undisturbed)]
        self.result.wrong += [f"at the end: {line}" for line in wrong]


def expected(case: Case) -> set[str]:
    """How a run may end that is befallen; FINISHED besides, where it was through."""
    replaces = case.strategy == "parameter_server"
    if case.kind == KILL:
        return {"FINISHED"} if (replaces or case.restarts) and case.role != "forker" else {"FAILED"}
    if case.kind == TERM:
        return {"FINISHED"} if replaces and case.role in ("worker", "server") else {"KILLED"}
    return {PAUSE: {"FINISHED"}, STALL: {"FINISHED"}, LOCK: {"FINISHED"}, GONE: {"FINISHED"}, DAMAGE: {"KILLED"},
            DISK: {"FINISHED" if case.role == "launcher" else "FAILED"}}[case.kind]  # fmt: skip


def undisturbed(bench: Bench, strategy: str) -> Whole:
    """The run of a strategy that nothing befalls."""
    command = bench.command(*Case(0, strategy, KILL, "launcher").words)
    assert command.end() == 0, command.said()
    assert not list(lost_points(bench.run, stored(Path(bench.folder, "mlflow.db"))))
    return whole(bench.run)
