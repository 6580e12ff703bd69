"""`python -m tests.chains --cases 200 --seed 0`: draws chains of two commands, and prints a table of the outcomes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.campaign.bench import Bench
from tests.case_command import RandomCases, run_random_cases
from tests.chains.draw import SECONDS, draw_case
from tests.chains.trial import REFUSED, RIGHT, Result, Trial


class Chains(RandomCases[Result]):
    name = "chains"

    def make_trial(self, number: int, folder: Path) -> Trial:
        shutil.copy(self._store, folder)
        return Trial(draw_case(self._seed, number), Bench(folder))


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


if __name__ == "__main__":
    sys.exit(run_random_cases(Chains, __doc__, 200, table))
