"""`python -m tests.pipeline_campaign --cases 40 --seed 0`: kills pipelines of six stages, and prints what came of them.

A command is killed at a random moment, or its tracking server is. Then the same command is given until it ends well.
The results have to be those of a pipeline that nothing befell, nothing may be there twice, and no run may be RUNNING.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from tests.campaign.bench import SECONDS_TO_VANISH, Bench, Command, Hang, until
from tests.campaign.cases import WORDS
from tests.campaign.judge import twice, written
from tests.case_command import CaseTrial, Outcome, RandomCases, run_random_cases, tell
from tests.event_log import events_in
from tests.tracking.servers import Server

ROOT = Path(__file__).parent

KILL, TERM, STOP, GONE = "kill -9", "SIGTERM", "Ctrl-C", "server killed"
SIGNALS = {KILL: signal.SIGKILL, TERM: signal.SIGTERM, STOP: signal.SIGINT}

#: How often each kind of fault is drawn, and whom it befalls: the pipeline's process or that of the stage.
KINDS = {(KILL, "pipeline"): 6, (KILL, "stage"): 4, (TERM, "pipeline"): 3, (TERM, "stage"): 2, (STOP, "pipeline"): 3,
         (GONE, "server"): 4}  # fmt: skip

STAGES = """
  search: {command: sweep, overrides: ["model.units=8,16", "training.epochs=1"]}
  fit: {command: train, overrides: ["${stages.search.best.overrides}"]}
  adapt: {command: train, overrides: ["${stages.search.best.overrides}", "model.init_from=${stages.fit.model}"]}
  week: {command: evaluate, run: "${stages.adapt.run_id}", split: validation}
  go: {command: promote, run: "${stages.adapt.run_id}", model: "${model}", after: week}
  tell: {command: python, target: steps.tell, arguments: {accuracy: "${stages.week.metrics.accuracy}"}, after: go}
"""
NAMES = ("search", "fit", "adapt", "week", "go", "tell")

#: The runs in the store at the end: the pipeline, the sweep with two jobs, and one for each other stage.
RUNS = 9

#: Python's own words on a Ctrl-C that came in the callback of a weak reference, where no exception can be raised.
IGNORED = re.compile(r"Exception ignored in: .*\n(\[\w+\] )?Traceback")

#: Of the commands that go on, before it counts as one that never ends.
MAX_COMMANDS = 6


@dataclass(frozen=True)
class Case:
    """What befalls a pipeline, and when.

    Attributes:
        number: of the case; with the seed it says all the rest.
        kind: of the fault.
        role: whom it befalls.
        stage: during which it comes.
        part: how much of the stage's time has passed by then; more than 1: shortly after it.
        lasts: how long a server is away, in seconds; 0: until the command has ended.
        again: a second fault, in the command that goes on; None: there is none.
    """

    number: int
    kind: str
    role: str
    stage: str
    part: float
    lasts: float = 0.0
    again: Case | None = None

    def __str__(self) -> str:
        lasts = f", for {self.lasts:.1f} s" if self.lasts else ""
        then = f"; then {str(self.again).partition(': ')[2]}" if self.again else ""
        return f"{self.number}: {self.kind} of the {self.role} at {self.part:.2f} of {self.stage}{lasts}{then}"


def draw_case(seed: int, number: int) -> Case:
    draw = random.Random(f"{seed}/{number}")

    def fault() -> Case:
        kind, role = draw.choices([*KINDS], [*KINDS.values()])[0]
        lasts = draw.uniform(1.0, 12.0) if kind == GONE and draw.random() < 0.6 else 0.0
        return Case(number, kind, role, draw.choice(NAMES), draw.uniform(0, 1.1), lasts)

    first, second = fault(), fault()
    return replace(first, again=second) if draw.random() < 0.3 and GONE not in (first.kind, second.kind) else first


@dataclass
class PipelineOutcome(Outcome):
    """What came of a case; `faults` of them were made."""

    faults: int = 0
    commands: int = 0


@dataclass
class Whole:
    """A finished pipeline: by stage its seconds and its results, by folder of a training its points."""

    seconds: dict[str, float]
    results: dict[str, Any]
    points: dict[str, dict[str, list[tuple[int, float]]]] = field(default_factory=dict)


class PipelineTrial(CaseTrial[PipelineOutcome]):
    """One case. Without `undisturbed` nothing befalls it."""

    def __init__(self, case: Case, bench: Bench, undisturbed: Whole | None, server: Server | None) -> None:
        super().__init__(bench, PipelineOutcome(case))
        self._case, self._undisturbed, self._server = case, undisturbed, server
        self._bench = bench
        self._store = bench.folder / ("mlflow.db" if server is None else "server.db")
        write_pipeline(bench.folder, case.number, server)

    def try_out(self) -> None:
        command = self._start()
        fault: Case | None = self._case
        while fault is not None:
            self._befall(command, fault)
            fault = fault.again
            if fault is not None:
                command = self._start()
        while self.result.commands < MAX_COMMANDS:
            command = self._start()
            code = self._end(command)
            self._look_at(command, code, {0, 1} if self._case.kind == GONE else {0})
            if code == 0 or self.result.wrong:
                break
        else:
            self.result.wrong.append(f"not finished after {MAX_COMMANDS} commands")
        self._judge_the_whole()
        self.result.outcome = "well" if self.result.faults else "missed"

    def run(self) -> PipelineOutcome:
        try:
            return super().run()
        finally:
            if self._server is not None:
                self._server.stop()

    def _start(self) -> Command:
        self.result.commands += 1
        return self._bench.command("pipeline", "six", "--config-dir", "conf", "--folder", "run")

    def _end(self, command: Command) -> int:
        try:
            return command.end()
        finally:
            if command.is_alive:
                command.kill()

    def _records(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self._bench.run / "pipeline.json").read_text())["stages"]
            return found
        return {}

    def _befall(self, command: Command, case: Case) -> None:
        """Waits for the moment, makes the fault, and waits for the end of the command."""
        assert self._undisturbed is not None
        before = self._records().get(case.stage, {}).get("began")

        def has_begun() -> bool:
            return not command.is_alive or self._records().get(case.stage, {}).get("began") != before

        until(has_begun, 120, f"{case.stage} did not begin")
        time.sleep(case.part * self._undisturbed.seconds[case.stage])
        allowed = {0}
        if case.kind == GONE:
            allowed = {0, 1, 2}
            self._take_server_away(command, case)
        elif (process := self._find(command, case.role)) is not None:
            with contextlib.suppress(psutil.Error):
                process.send_signal(SIGNALS[case.kind])
                self.result.faults += 1
                allowed = {0, 1} if case.role == "stage" else {0, -signal.SIGKILL, 143, 130}
        self._look_at(command, self._end(command), allowed)

    def _take_server_away(self, command: Command, case: Case) -> None:
        assert self._server is not None
        self._server.stop()
        self.result.faults += 1
        if case.lasts:
            time.sleep(case.lasts)
        else:
            with contextlib.suppress(Hang):
                until(lambda: not command.is_alive, 170, "")
        self._server.start()

    def _find(self, command: Command, role: str) -> psutil.Process | None:
        with contextlib.suppress(psutil.Error):
            if role == "pipeline":
                return psutil.Process(command.pid) if command.is_alive else None
            for each in self._records().values():
                if each["process"] and each["status"] == "RUNNING":
                    return psutil.Process(each["process"][0])
        return None

    def _look_at(self, command: Command, code: int, allowed: set[int]) -> None:
        said, wrong = command.said(), self.result.wrong
        if code not in allowed:
            wrong.append(f"{command.name}: exit code {code}, where it should be {sorted(allowed)}: {said[-400:]}")
        if "Traceback" in IGNORED.sub("", said):
            wrong.append(f"{command.name}: a traceback on the terminal")
        is_recorded = "recorded" not in said and self._case.kind != GONE
        if code >= 0 and is_recorded and (left := [name for name, status in self._statuses() if status == "RUNNING"]):
            wrong.append(f"{command.name}: RUNNING after it has ended with {code}: {', '.join(left)}")

    def _rows(self, query: str) -> list[Any]:
        with contextlib.closing(sqlite3.connect(self._store, timeout=20)) as database:
            return database.execute(query, (experiment_of(self._case.number),)).fetchall()

    def _statuses(self) -> list[tuple[str, str]]:
        return self._rows(
            "SELECT runs.name, status FROM runs JOIN experiments USING (experiment_id) WHERE experiments.name = ?"
        )

    def _judge_the_whole(self) -> None:
        wrong = self.result.wrong
        with contextlib.suppress(Hang):
            until(lambda: not self._left(), SECONDS_TO_VANISH, "")
        wrong += [f"orphan: {' '.join(process.cmdline())}" for process in self._left()]
        statuses = self._statuses()
        if len(statuses) != RUNS or {status for _, status in statuses} != {"FINISHED"}:
            wrong.append(f"{len(statuses)} runs in the store, where {RUNS} should be FINISHED: {statuses}")
        doubles = self._rows(
            "SELECT runs.name, key, step, COUNT(*) FROM metrics JOIN runs USING (run_uuid) JOIN experiments USING "
            "(experiment_id) WHERE experiments.name = ? AND key NOT LIKE 'system/%' GROUP BY run_uuid, key, step "
            "HAVING COUNT(*) > 1"
        )
        wrong += [f"in the store twice: {doubles[:3]}"] if doubles else []
        whole = read_whole(self._bench.run)
        wrong += [f"{name}: {line}" for name in whole.points for line in twice(self._bench.run / name)]
        if self._undisturbed is not None:
            wrong += compare(whole, self._undisturbed)
        path = self._bench.folder / "calls"
        calls = path.read_text().splitlines() if path.exists() else []
        if len({*calls}) != 1 or len(calls) > 1 + self.result.faults:
            wrong.append(f"the function was called with {calls}")

    def _left(self) -> list[psutil.Process]:
        """Processes of commands that are over."""
        forker, mine = self._bench.forker, []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TMPDIR") == self._bench.environment["TMPDIR"] and process != forker:
                    mine.append(process)
        return [process for process in mine if process.status() != psutil.STATUS_ZOMBIE]


def experiment_of(number: int) -> str:
    return f"case {number}"


def write_pipeline(folder: Path, number: int, server: Server | None) -> None:
    """Writes the file of the pipeline, and the code that it uses."""
    (folder / "conf" / "pipeline").mkdir(parents=True)
    words = [word.replace("tests.pace", "pace") for word in WORDS if not word.startswith("hydra.")]
    words += [f"tracking.experiment={experiment_of(number)}", "tracking.flush_seconds=6", "evaluation=none"]
    words += [f"tracking.uri={server.uri}"] if server else []
    text = f"overrides: {json.dumps(words)}\nmodel: m{number}\nstages:{STAGES}"
    (folder / "conf" / "pipeline" / "six.yaml").write_text(text)
    shutil.copy(ROOT / "pace.py", folder)
    (folder / "steps.py").write_text(
        "def tell(accuracy):\n    with open('calls', 'a') as file:\n        file.write(f'{accuracy}\\n')\n"
    )


def read_whole(folder: Path) -> Whole:
    """Reads what a pipeline has done, but for its ids, speeds and times."""
    content = json.loads((folder / "pipeline.json").read_text())["stages"]
    seconds = {name: each["ended"] - each["began"] for name, each in content.items() if each["ended"]}
    results = {}
    for name, each in content.items():
        metrics = {k: v for k, v in (each["outputs"].get("metrics") or {}).items() if not k.startswith("perf/")}
        best = (each["outputs"].get("best") or {}).get("overrides")
        results[name] = {"status": each["status"], "attempt": each["attempt"], "metrics": metrics, "best": best}
    points: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for path in sorted(folder.glob("*/1/**/events.jsonl")):
        if not any(event["event"] == "model" for event in events_in(path)):
            continue
        history = points.setdefault(str(path.parent.relative_to(folder)), {})
        for key, step, value, _ in written(path.parent):
            if not key.startswith("perf/"):
                history.setdefault(key, []).append((step, value))
    return Whole(seconds, results, {name: {k: sorted(v) for k, v in each.items()} for name, each in points.items()})


def compare(found: Whole, undisturbed: Whole) -> Iterator[str]:
    """In what a pipeline is not what the undisturbed one was."""
    for name, result in undisturbed.results.items():
        mine = found.results.get(name, {})
        for key, value in result.items():
            if mine.get(key) != value:
                yield f"{name}: {key} is {str(mine.get(key))[:300]}, and of the undisturbed {str(value)[:300]}"
    if found.points.keys() != undisturbed.points.keys():
        yield f"trained in {[*found.points]}, and the undisturbed in {[*undisturbed.points]}"
    for folder, history in undisturbed.points.items():
        mine = found.points.get(folder, {})
        for key in {*history, *mine}:
            if mine.get(key) != history.get(key):
                yield f"{folder}: {key} has {str(mine.get(key))[:200]}, and of the undisturbed {history.get(key)}"[:400]
                break


class PipelineCases(RandomCases[PipelineOutcome]):
    """Many cases, some at a time; those that need the server take turns."""

    name = "pipeline_campaign"

    def __init__(self, folder: Path, seed: int, keeps: bool) -> None:
        super().__init__(folder, seed, keeps)
        self._turn = threading.Lock()
        bench = self._make_bench(folder / "undisturbed")
        trial = PipelineTrial(Case(-1, "", "", "", 0.0), bench, None, None)
        command = trial._start()
        assert trial._end(command) == 0, command.said()
        trial._judge_the_whole()
        assert not trial.result.wrong, trial.result.wrong
        self._undisturbed = read_whole(bench.run)
        bench.close()
        tell(f"undisturbed: {', '.join(f'{name} {each:.1f} s' for name, each in self._undisturbed.seconds.items())}")

    def _make_bench(self, folder: Path) -> Bench:
        folder.mkdir(exist_ok=True)
        shutil.copy(self._store, folder)
        return Bench(folder)

    def make_trial(self, number: int, folder: Path) -> PipelineTrial:
        case = draw_case(self._seed, number)
        server = None
        if case.kind == GONE:
            server = Server(folder, self._store)
            server.start()
        return PipelineTrial(case, self._make_bench(folder), self._undisturbed, server)

    def try_out(self, number: int) -> PipelineOutcome:
        if draw_case(self._seed, number).kind != GONE:
            return super().try_out(number)
        with self._turn:  # each has a server of its own, and starting one takes a core
            return super().try_out(number)


def make_table(results: Sequence[PipelineOutcome], seed: int) -> str:
    """What came of the cases, as Markdown."""
    lines = ["| fault | of | cases | made | wrong |", "|---|---|---|---|---|"]
    for kind, role in KINDS:
        mine = [each for each in results if (each.case.kind, each.case.role) == (kind, role)]
        made, wrong = (sum(bool(getattr(each, name)) for each in mine) for name in ("faults", "wrong"))
        lines.append(f"| {kind} | {role} | {len(mine)} | {made} | {wrong} |")
    faults, wrong = sum(each.faults for each in results), sum(bool(each.wrong) for each in results)
    return "\n".join(
        [*lines, "", f"{len(results)} cases with {faults} faults, seed {seed}: {wrong} with something wrong"]
    )


if __name__ == "__main__":
    sys.exit(run_random_cases(PipelineCases, __doc__, 40, make_table))
