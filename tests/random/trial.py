"""One case: its run, the same on one device, and the same interrupted and gone on with."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaign.bench import Bench, Command
from tests.campaign.judge import last_end, stored
from tests.case_command import CaseTrial, Outcome
from tests.random.draw import FILES, Case
from tests.random.judge import (
    SAME,
    TOLERANCE,
    differences,
    points,
    refusal_of,
    steps_of,
    wrong_end,
    wrong_record,
    wrong_refusal,
)

#: Which step a run stops itself at, and by which signal: `zoo.Stop` reads them.
STOP_AT, STOP_BY = "RANDOM_STOP_AT", "RANDOM_STOP_BY"

#: A command that has not ended by then hangs.
SECONDS = 300.0

#: The folder of the zoo's models, and of options that name them.
CONF = Path(__file__).parent / "conf"

TRAINED, REFUSED = "trained", "refused"


@dataclass
class Result(Outcome):
    """What came of a case.

    Attributes:
        compared: whether its losses were those of one device.
        resumed: whether it was interrupted, and gone on with.
    """

    compared: bool = False
    resumed: bool = False


class Trial(CaseTrial[Result]):
    """One case; its folder may have a store. Args: files: the folder of what datasets read."""

    def __init__(self, case: Case, bench: Bench, files: Path) -> None:
        super().__init__(bench, Result(case))
        self._case = case
        self._files = files

    def try_out(self) -> None:
        case = self._case
        command = self._train("run", case.words)
        code = command.end(SECONDS)
        self._look_at(command, code, "run")
        if self.result.outcome != TRAINED or self.result.wrong:
            return
        if case.is_recorded:
            self.result.wrong += wrong_record(self._folder("run"), stored(self._bench.folder / "mlflow.db"))
        if case.plain is not None:
            self._compare_with_one_device(case.plain)
        if case.stop:
            self._interrupt()

    def _train(self, folder: str, words: Sequence[str], **environment: str) -> Command:
        """A command; it has to have begun before the environment is as it was."""
        own = [word.replace(FILES, str(self._files)) for word in words]
        return self._command("--config-dir", str(CONF), *own, f"hydra.run.dir={folder}", **environment)

    def _command(self, *words: str, **environment: str) -> Command:
        self._bench.environment.update(environment)
        try:
            return self._bench.command(*words)
        finally:
            for key in environment:
                del self._bench.environment[key]

    def _folder(self, name: str) -> Path:
        return self._bench.folder / name

    def _look_at(self, command: Command, code: int, folder: str) -> None:
        """Judges the first command."""
        said = command.said()
        wrong = self.result.wrong
        if code == 0:
            self.result.outcome = TRAINED
            wrong += wrong_end(self._folder(folder), said)
            if self._case.wrong:
                wrong.append(f"{self._case.wrong}: trained with a word that nothing works with")
        elif code == 2:
            self.result.outcome, self.result.refusal = REFUSED, refusal_of(said)
            wrong += wrong_refusal(said)
            if self._case.is_recorded and (runs := stored(self._bench.folder / "mlflow.db")):
                wrong.append(f"{len(runs)} runs in the store of a command that was refused")
        else:
            wrong.append(f"ended with {code}: {last_end(self._folder(folder)).get('error') or said[-400:]}")
        wrong += [f"left: {' '.join(process.cmdline())}" for process in self._bench.workers()]

    def _compare_with_one_device(self, words: Sequence[str]) -> None:
        command = self._train("plain", words)
        if (code := command.end(SECONDS)) != 0:
            self.result.wrong.append(
                f"{command.name}: the same on one device ended with {code}: {command.said()[-400:]}"
            )
            return
        self.result.compared = True
        mine, theirs = points(self._folder("run")), points(self._folder("plain"))
        found = differences(mine, theirs, TOLERANCE[self._case.precision], only_losses=True)
        self.result.wrong += [f"not as on one device: {line}" for line in found]

    def _interrupt(self) -> None:
        """Stops a run in its middle, goes on with it, and compares it with the one that was not stopped."""
        case = self._case
        steps = steps_of(self._folder("run"))
        if steps < 2:
            return
        command = self._train("cut", case.words, **{STOP_AT: str(steps // 2), STOP_BY: str(case.stop)})
        code = command.end(SECONDS)
        if code == 0:  # its last call was under way
            return
        expected = 143 if case.stop == signal.SIGTERM else 1
        if code != expected or "Traceback" in command.said():
            self.result.wrong.append(f"{command.name}: interrupted, it ended with {code}: {command.said()[-400:]}")
            return
        self._go_on()

    def _go_on(self) -> None:
        case = self._case
        command = self._command("resume=cut")
        code = command.end(SECONDS)
        if code == 2 and "checkpoint=none" in case.words:
            self.result.wrong += wrong_refusal(command.said())
            return
        if code != 0:
            self.result.wrong.append(f"{command.name}: gone on with, it ended with {code}: {command.said()[-400:]}")
            return
        self.result.resumed = True
        self.result.wrong += wrong_end(self._folder("cut"), command.said())
        if case.is_recorded:
            statuses = [run.status for run in stored(self._bench.folder / "mlflow.db")]
            if set(statuses) != {"FINISHED"}:
                self.result.wrong.append(f"gone on with, the store says {statuses}")
        if case.strategy == "parameter_server":
            return
        tolerance = (0.0, 0.0) if case.is_exact else SAME
        found = differences(points(self._folder("cut")), points(self._folder("run")), tolerance, not case.is_exact)
        self.result.wrong += [f"gone on with: {line}" for line in found]
