"""Every ratio that is claimed, measured side by side: ours against what one would write by hand. Prints one table.

    python -m benchmarks                             all of them
    python -m benchmarks steps_mlp command --rounds 3

All benchmarks are run once, then all once more, and so on; within a round the contestants of a benchmark follow each
other at once, in reverse order every other round. A row has the median, the minimum and the maximum of the rounds'
ratios.

The exit code tells whether every run did its work, never how fast it was: on a shared machine a time decides nothing,
and the table is there to be read. A wrong result (a run that did not finish, a model that has not learned, points that
are missing) ends its benchmark, is named at the end, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks import (
    checkpoints,
    command,
    distributed,
    embeddings,
    engines,
    find,
    fleet,
    input,
    memory,
    network,
    outages,
    pipeline,
    points,
    profile,
    remat,
    script,
    start,
    steps,
    sweep,
    xla,
)
from benchmarks import whole_job as job
from benchmarks.measure import Benchmark, Measured, take_rounds
from benchmarks.measure import table as table_of

#: How each is made, and about how many seconds a round of it takes on two cores.
BENCHMARKS: Mapping[str, tuple[Callable[[], Benchmark], int]] = {
    "steps_mlp": (functools.partial(steps.against_one_device, steps.MLP), 110),
    "steps_cnn": (functools.partial(steps.against_one_device, steps.CNN), 80),
    "xla": (xla.benchmark, 60),
    "mirrored": (functools.partial(distributed.against_by_hand, "mirrored"), 150),
    "multi_worker": (functools.partial(distributed.against_by_hand, "multi_worker"), 110),
    "efficiency": (distributed.efficiency, 50),
    "engines": (engines.benchmark, 45),
    "find_mlp": (functools.partial(find.benchmark, "mlp"), 150),
    "find_cnn": (functools.partial(find.benchmark, "cnn"), 180),
    "embeddings": (embeddings.benchmark, 150),
    "network": (network.benchmark, 35),
    "whole_job": (job.benchmark, 30),
    "sweep": (sweep.benchmark, 110),
    "memory": (memory.benchmark, 90),
    "command": (command.benchmark, 5),
    "script": (script.benchmark, 70),
    "warm": (start.benchmark, 8),
    "profile": (profile.benchmark, 50),
    "checkpoints": (checkpoints.benchmark, 60),
    "input": (input.benchmark, 60),
    "image_files": (input.files, 90),
    "pipeline": (pipeline.benchmark, 100),
    "remat": (remat.benchmark, 90),
    "points": (points.benchmark, 60),
    "fleet": (fleet.benchmark, 80),
    "outages": (outages.benchmark, 140),
}

MINUTES = 110


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    chosen = {name: BENCHMARKS[name][0]() for name in options.names or BENCHMARKS}
    return told(take_rounds(chosen, options.rounds, options.minutes * 60))


def told(all_of_them: Sequence[Measured]) -> int:
    """Prints the table and the errors. Returns the exit code."""
    rows = [row for each in all_of_them for row in each.rows]
    if rows:
        print(table_of(rows))
    wrong = [each for each in all_of_them if each.wrong]
    for each in wrong:
        print(f"FAILED: {each.name} gave a wrong result: {each.wrong}", file=sys.stderr)
    return 1 if wrong else 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    seconds = sum(each for _, each in BENCHMARKS.values())
    listed = "\n".join(f"  {name:14} {each:4} s a round" for name, (_, each) in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"NAMEs, and how long they take on two cores:\n{listed}\n  all of them    {seconds:4} s a round",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="how often each contestant is measured (default 5)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="after the first round nothing begins that would end later than this; a row has fewer rounds then, and "
        f"says how many (default {MINUTES})",
    )
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"there is no {', '.join(unknown)}; there is {', '.join(BENCHMARKS)}")
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
