"""What `tests.campaign`, `tests.chains` and `tests.random` share: which cases are tried, and what becomes of them."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from tests.campaign.bench import Bench, Hang, empty_store
from tests.processes import SESSION

T = TypeVar("T")
R = TypeVar("R", bound="Outcome")


@dataclass
class Outcome:
    """What came of a case.

    Attributes:
        outcome: a word, such as `refused`.
        refusal: its words.
        wrong: what should not be, each in a line.
        seconds: it took.
    """

    case: Any
    outcome: str = ""
    refusal: str = ""
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


class CaseTrial(ABC, Generic[R]):
    """One case in a folder of its own, which `try_out` tries. Its processes end with it."""

    def __init__(self, bench: Bench, result: R) -> None:
        self._bench = bench
        self.result = result

    @abstractmethod
    def try_out(self) -> None: ...

    def run(self) -> R:
        began = time.monotonic()
        try:
            self.try_out()
        except Hang as hang:
            self.result.wrong.append(f"hang: {hang}")
        self.result.wrong += self._bench.close()
        self.result.seconds = time.monotonic() - began
        return self.result


class RandomCases(ABC, Generic[R]):
    """Many cases, some at a time.

    Args:
        folder: for their folders.
        seed: all is drawn from it.
        keeps: whether a folder stays though nothing was wrong.
    """

    #: Of the command: `python -m tests.NAME`.
    name: str

    def __init__(self, folder: Path, seed: int, keeps: bool) -> None:
        self._folder = folder
        self._seed = seed
        self._keeps = keeps
        (folder / "empty").mkdir(parents=True)
        self._store = empty_store(folder / "empty")

    @abstractmethod
    def make_trial(self, number: int, folder: Path) -> CaseTrial[R]: ...

    def try_out(self, number: int) -> R:
        folder = self._folder / f"case-{number}"
        folder.mkdir()
        result = self.make_trial(number, folder).run()
        if not (result.wrong or self._keeps):
            shutil.rmtree(folder)
        said = [result.refusal] if result.refusal else []
        if result.wrong:
            said.append(f"again: {sys.executable} -m tests.{self.name} --seed {self._seed} --only {number}")
        verdict = "WRONG" if result.wrong else result.outcome
        tell(f"{verdict}: {result.case} ({result.seconds:.1f} s)", *result.wrong, *said)
        return result


def run_random_cases(
    cases: type[RandomCases[R]], about: str | None, count: int, table: Callable[[Sequence[R], int], str]
) -> int:
    """The command `python -m tests.NAME`; returns its exit code."""
    options = parse_options(cases.name, f"{about} The folders of --only stay.", count)
    if options.folder is None and options.only:
        options.folder = Path(tempfile.mkdtemp(prefix=f"{cases.name}-")) / "cases"
        tell(f"kept in {options.folder}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with SESSION:
        with folder_of(options, cases.name) as folder:
            made = cases(folder, options.seed, bool(options.only))
            results = list(try_all(made.try_out, numbers(options), options))
        print(table(results, options.seed))
    return int(any(result.wrong for result in results))


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
