"""`python -m tests.random --cases 300 --seed 0`: draws command lines, and prints what came of them as a table."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.campaign.bench import Bench, empty_store
from tests.case_command import folder_of, numbers, parse_options, tell, try_all
from tests.processes import SESSION, call
from tests.random.draw import STRATEGIES, drawn
from tests.random.files import make_files
from tests.random.trial import REFUSED, TRAINED, Result, Trial


class Cases:
    """Many cases, some at a time.

    Args:
        folder: for their folders.
        seed: all is drawn from it.
        keeps: whether a folder stays though nothing was wrong.
    """

    def __init__(self, folder: Path, seed: int, keeps: bool) -> None:
        self._folder = folder
        self._seed = seed
        self._keeps = keeps
        (folder / "empty").mkdir(parents=True)
        self._store = empty_store(folder / "empty")
        self._files = folder / "files"
        call(make_files, str(self._files))

    def try_out(self, number: int) -> Result:
        case = drawn(self._seed, number)
        folder = self._folder / f"case-{number}"
        folder.mkdir()
        if case.is_recorded:
            shutil.copy(self._store, folder)
        result = Trial(case, Bench(folder), self._files).run()
        if not (result.wrong or self._keeps):
            shutil.rmtree(folder)
        tell(*self._lines(result))
        return result

    def _lines(self, result: Result) -> list[str]:
        verdict = "WRONG" if result.wrong else result.outcome
        line = f"{verdict}: {result.case} ({result.seconds:.1f} s)"
        if not result.wrong:
            return [line, *([result.refusal] if result.refusal else [])]
        again = f"again: {sys.executable} -m tests.random --seed {self._seed} --only {result.case.number}"
        return [line, *result.wrong, again]


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


def main() -> int:
    options = parse_options("random", f"{__doc__} The folders of --only stay.", 300)
    if options.folder is None and options.only:
        options.folder = Path(tempfile.mkdtemp(prefix="random-")) / "cases"
        tell(f"kept in {options.folder}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with SESSION:
        with folder_of(options, "random") as folder:
            cases = Cases(folder, options.seed, keeps=bool(options.only))
            results = list(try_all(cases.try_out, numbers(options), options))
        print(table(results, options.seed))
    return int(any(result.wrong for result in results))


if __name__ == "__main__":
    sys.exit(main())
