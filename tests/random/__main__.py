"""`python -m tests.random --cases 300 --seed 0`: draws command lines, and prints what came of them as a table."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.campaign.bench import Bench
from tests.case_command import RandomCases, run_random_cases
from tests.processes import call
from tests.random.draw import STRATEGIES, drawn
from tests.random.files import make_files
from tests.random.trial import REFUSED, TRAINED, Result, Trial


class Cases(RandomCases[Result]):
    name = "random"

    def __init__(self, folder: Path, seed: int, keeps: bool) -> None:
        super().__init__(folder, seed, keeps)
        self._files = folder / "files"
        call(make_files, str(self._files))

    def make_trial(self, number: int, folder: Path) -> Trial:
        case = drawn(self._seed, number)
        if case.is_recorded:
            shutil.copy(self._store, folder)
        return Trial(case, Bench(folder), self._files)


def table(results: Sequence[Result], seed: int) -> str:
    """What came of the cases, as Markdown."""
    lines = [
        "| strategy | drawn | trained | of them as on one device | of them interrupted and resumed | refused | wrong |",
        "|---|---|---|---|---|---|---|",
    ]
    for strategy in [*STRATEGIES, "all"]:
        of = [result for result in results if strategy in (result.case.strategy, "all")]
        counts = (
            len(of),
            sum(r.outcome == TRAINED for r in of),
            sum(r.compared for r in of),
            sum(r.resumed for r in of),
            sum(r.outcome == REFUSED for r in of),
            sum(bool(r.wrong) for r in of),
        )
        lines.append(f"| {strategy} | {' | '.join(map(str, counts))} |")
    drawn_wrong = sum(bool(r.case.wrong) for r in results)
    lines += [
        "",
        f"Seed {seed}: {len(results)} cases, {drawn_wrong} of them with a word that nothing works with; "
        f"{cpu_seconds() / max(len(results), 1):.1f} s of processor time each.",
    ]
    return "\n".join(lines)


def cpu_seconds() -> float:
    """The processor time of all processes that have ended; they are children of what they were forked from."""
    times = [child.cpu_times() for child in psutil.Process().children()]
    return sum(each.children_user + each.children_system for each in times)


if __name__ == "__main__":
    sys.exit(run_random_cases(Cases, __doc__, 300, table))
