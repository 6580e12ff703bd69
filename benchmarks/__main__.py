"""Runs the benchmarks and prints one table.

    python -m benchmarks                     all of them
    python -m benchmarks steps_mlp --rounds 3

The exit code tells whether every run did its work, never how fast it was: on a shared machine a time
decides nothing, and the table is there to be read.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

from benchmarks import checkpoints, distributed, input, outages, pipeline, points, profile, steps, sweep, whole_job
from benchmarks.measure import Row, WrongResultError, table

BENCHMARKS: dict[str, Callable[[int], list[Row]]] = {
    "steps_mlp": functools.partial(steps.measure, steps.MLP),
    "steps_cnn": functools.partial(steps.measure, steps.CNN),
    "checkpoints": checkpoints.measure,
    "mirrored": functools.partial(distributed.against_by_hand, "mirrored"),
    "multi_worker": functools.partial(distributed.against_by_hand, "multi_worker"),
    "efficiency": distributed.efficiency,
    "input": input.measure,
    "pipeline": pipeline.measure,
    "profile": profile.measure,
    "sweep": sweep.measure,
    "whole_job": whole_job.measure,
    "outages": outages.measure,
    "points": points.measure,
}


def main() -> int:
    options = parsed()
    rows: list[Row] = []
    failed: list[str] = []
    for name in options.names or BENCHMARKS:
        print(f"{name}:", file=sys.stderr, flush=True)
        try:
            rows += BENCHMARKS[name](options.rounds)
        except WrongResultError as wrong:
            failed.append(name)
            print(f"{name}: {wrong}", file=sys.stderr, flush=True)
    if rows:
        print(table(rows))
    for name in failed:
        print(f"FAILED: {name} gave a wrong result, see above", file=sys.stderr)
    return 1 if failed else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Ratios against what is written by hand.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="how often each contestant is measured (default 5)")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"there is no {', '.join(unknown)}; there is {', '.join(BENCHMARKS)}")
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
