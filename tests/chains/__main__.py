"""`python -m tests.chains --cases 200 --seed 0`: draws chains of two commands, and prints a table of the outcomes."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.campaign.bench import Bench, empty_store
from tests.case_command import folder_of, numbers, parse_options, tell, try_all
from tests.chains.draw import SECONDS, draw_case
from tests.chains.trial import REFUSED, RIGHT, Result, Trial
from tests.processes import SESSION


class Chains:
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

    def try_out(self, number: int) -> Result:
        folder = self._folder / f"case-{number}"
        folder.mkdir()
        shutil.copy(self._store, folder)
        result = Trial(draw_case(self._seed, number), Bench(folder)).run()
        if not (result.wrong or self._keeps):
            shutil.rmtree(folder)
        verdict = "WRONG" if result.wrong else result.outcome
        again = [f"again: {sys.executable} -m tests.chains --seed {self._seed} --only {number}"] if result.wrong else []
        said = [result.refusal] if result.refusal else []
        tell(f"{verdict}: {result.case} ({result.seconds:.1f} s)", *result.wrong, *said, *again)
        return result


def table(results: Sequence[Result], seed: int) -> str:
    """What came of the cases, as Markdown."""
    lines = ["| second command | drawn | the right number | refused in words | wrong |", "|---|---|---|---|---|"]
    for second in [*SECONDS, "all"]:
        of = [result for result in results if second in (result.case.second, "all")]
        counts = (
            len(of),
            sum(r.outcome == RIGHT and not r.wrong for r in of),
            sum(r.outcome == REFUSED and not r.wrong for r in of),
            sum(bool(r.wrong) for r in of),
        )
        lines.append(f"| {second} | {' | '.join(map(str, counts))} |")
    return "\n".join([*lines, "", f"Seed {seed}: {len(results)} chains."])


def main() -> int:
    options = parse_options("chains", f"{__doc__} The folders of --only stay.", 200)
    if options.folder is None and options.only:
        options.folder = Path(tempfile.mkdtemp(prefix="chains-")) / "cases"
        tell(f"kept in {options.folder}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with SESSION:
        with folder_of(options, "chains") as folder:
            chains = Chains(folder, options.seed, keeps=bool(options.only))
            results = list(try_all(chains.try_out, numbers(options), options))
        print(table(results, options.seed))
    return int(any(result.wrong for result in results))


if __name__ == "__main__":
    sys.exit(main())
