"""The command line of `tests.campaign` and `tests.random`: which cases to try, and what to do with their results."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def parse_options(name: str, about: str | None, cases: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m tests.{name}", description=about)
    parser.add_argument("--cases", type=int, default=cases)
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--only", type=int, nargs="+", help="these numbers instead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--results", type=Path, help="a file to which each result is added, as JSON")
    parser.add_argument(
        "--folder", type=Path, help="where the cases' folders are made; where something was wrong they stay"
    )
    return parser.parse_args()


def numbers(options: argparse.Namespace) -> Sequence[int]:
    return options.only or range(options.first, options.first + options.cases)


@contextmanager
def folder_of(options: argparse.Namespace, name: str) -> Iterator[Path]:
    """The folder that was asked for, or one that goes when the block ends."""
    if options.folder is not None:
        yield options.folder
        return
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        yield Path(folder) / "cases"


def try_all(try_out: Callable[[int], T], ahead: Sequence[int], options: argparse.Namespace) -> Iterator[T]:
    """Tries the cases, some at a time, and adds their results to the file."""
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            for result in pool.map(try_out, ahead):
                yield result
                if options.results is not None:
                    with options.results.open("a") as file:
                        file.write(json.dumps(asdict(result)) + "\n")  # type: ignore[call-overload]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # a case that has begun cleans up after itself


def tell(*lines: Any) -> None:
    print("\n    ".join(map(str, lines)), file=sys.stderr, flush=True)
