"""`python -m tests.campaign --cases 200 --seed 0`: makes faults, and prints what came of them as a table."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.campaign.bench import Bench, empty_store
from tests.campaign.cases import KILL, KINDS, STRATEGIES, Case, drawn
from tests.campaign.judge import Whole
from tests.campaign.remote import Remote
from tests.campaign.trial import Result, Trial, undisturbed
from tests.case_command import folder_of, numbers, parse_options, tell, try_all
from tests.processes import SESSION


class Campaign:
    """Many cases, some at a time.

    Args:
        folder: for their folders, each of which goes when nothing was wrong with its case.
        seed: all is drawn from it.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._seed = seed
        self._lock = threading.Lock()
        self._whole: dict[str, Whole] = {}
        self._remote: Remote | None = None
        (folder / "empty").mkdir(parents=True)
        self._store = empty_store(folder / "empty")

    def begin(self, strategies: Sequence[str]) -> None:
        """Trains what the others are compared with."""
        for strategy in strategies:
            bench = self._bench(f"undisturbed-{strategy}")
            began = time.monotonic()
            try:
                self._whole[strategy] = undisturbed(bench, strategy)
            finally:
                bench.close()
            tell(f"undisturbed: {strategy} ({time.monotonic() - began:.1f} s)")

    def try_out(self, number: int) -> Result:
        case = drawn(self._seed, number)
        bench = self._bench(f"case-{number}")
        if case.kind == "server gone":
            remote = self._server()
            with remote.turn:
                result = Trial(case, bench, self._whole[case.strategy], remote).run()
        else:
            result = Trial(case, bench, self._whole[case.strategy]).run()
        if not result.wrong:
            shutil.rmtree(bench.folder)
        verdict = "WRONG" if result.wrong else "well" if result.faults else "missed"
        tell(f"{verdict}: {case} ({result.seconds:.1f} s)", *result.wrong)
        return result

    def _bench(self, name: str) -> Bench:
        folder = self._folder / name
        folder.mkdir()
        shutil.copy(self._store, folder)
        return Bench(folder)

    def _server(self) -> Remote:
        with self._lock:
            self._remote = self._remote or Remote(self._folder / "server")
            return self._remote

    def close(self) -> None:
        if self._remote is not None:
            self._remote.close()


def from_json(line: str) -> Result:
    told = json.loads(line)
    return Result(**{**told, "case": Case(**told["case"])})


def table(results: Sequence[Result], seed: int) -> str:
    """What came of the cases, as Markdown: how many of each kind, and with how many something was wrong."""
    made = [result for result in results if result.faults]
    lines = [f"| | {' | '.join(STRATEGIES)} | all |", "|---|" + "---|" * (len(STRATEGIES) + 1)]
    for kind in [*KINDS, "all"]:
        of_kind = [r for r in made if kind in (r.case.kind, "all")]
        cells = [cell([r for r in of_kind if r.case.strategy == strategy]) for strategy in STRATEGIES]
        lines.append(f"| {kind} | {' | '.join(cells)} | {cell(of_kind)} |")
    kills = Counter(r.case.role for r in made if r.case.kind == KILL)
    lines += [
        "",
        f"{len(made)} cases with {sum(r.faults for r in made)} faults, seed {seed}: {sum(bool(r.wrong) for r in made)} "
        f"with something wrong. kill -9: {', '.join(f'{n} of {role}' for role, n in kills.most_common())}; and "
        f"{sum(r.faults - 1 for r in made)} in the command that went on.",
    ]
    return "\n".join(lines)


def cell(results: Sequence[Result]) -> str:
    wrong = sum(bool(result.wrong) for result in results)
    return f"{len(results)}, {wrong} wrong" if wrong else str(len(results) or "")


def known(path: Path | None) -> Mapping[int, Result]:
    """Cases that were tried before."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    return {result.case.number: result for result in map(from_json, lines)}


def run(options: argparse.Namespace, folder: Path) -> list[Result]:
    before = known(options.results)
    ahead = [number for number in numbers(options) if number not in before]
    results = [before[number] for number in numbers(options) if number in before]
    if not ahead:
        return results
    campaign = Campaign(folder, options.seed)
    try:
        campaign.begin(sorted({drawn(options.seed, number).strategy for number in ahead}))
        return [*results, *try_all(campaign.try_out, ahead, options)]
    finally:
        campaign.close()


def main() -> int:
    options = parse_options("campaign", f"{__doc__} The cases in the file of --results are not tried again.", 200)
    with SESSION, folder_of(options, "campaign") as folder:
        results = run(options, folder)
    print(table(results, options.seed))
    return int(any(result.wrong for result in results))


if __name__ == "__main__":
    sys.exit(main())
