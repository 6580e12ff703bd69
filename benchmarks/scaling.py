"""What to expect of many workers, on paper: the efficiency of multi_worker on given networks, and a check of it here.

    python -m benchmarks.scaling                                  # measures steps here, prints the table
    python -m benchmarks.scaling --model resnet50:25583592:120    # NAME:PARAMETERS:MILLISECONDS of a step elsewhere
    python -m benchmarks.scaling --check                          # two and three workers on loopback against the model

The model is that of a ring (Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002), which is how
TensorFlow sums gradients between workers, all variables' in one piece: 2 (n - 1) hops, in each of which a worker sends
1/n of the gradient. Nothing is sent while a worker computes, as in scaleflow's loop. The efficiency is the part of a
step that is spent on computing: n workers take so many times n the examples a second of one. The batch of each worker
stays what it is.

The check fits a link's bytes a second, and what a hop costs, to two workers on loopback with two models of different
size, and says what three workers, and another model, should then take. Each worker computes in one thread; what it
computes in is measured with others at work that it does not speak with. Where there are fewer cores than workers, each
has its share of them, and takes so much longer. On loopback it is the processor, too, that sends: the last two columns
have sending slowed by the same.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import WrongResultError, run_scaleflow, say, temporary_folder
from scaleflow.launcher.processes.handover import SERVER_ENV
from scaleflow.launcher.processes.server_start import start_fork_server

BYTES_PER_PARAMETER = 4  # gradients are float32 in any precision

GBITS = (1.0, 10.0, 25.0, 100.0, 400.0)
WORKERS = (8, 64, 512)
HOP_MICROSECONDS = 50.0

BATCH_SIZE = 128


# ---------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """What connects a worker with the next one.

    Attributes:
        bytes_per_second: that it carries each way.
        hop_seconds: that a hop takes however little is sent.
    """

    bytes_per_second: float
    hop_seconds: float


@dataclass(frozen=True)
class Work:
    """A model's step on one worker.

    Attributes:
        name: the model's.
        parameters: that are trained.
        seconds: of a step that sends nothing.
    """

    name: str
    parameters: int
    seconds: float

    @property
    def gradient_bytes(self) -> int:
        return BYTES_PER_PARAMETER * self.parameters


def ring_seconds(workers: int, size: float, link: Link) -> float:
    """How long a ring of workers takes to sum `size` bytes of each, so that all have the sum."""
    hops = 2 * (workers - 1)
    return hops * (size / workers / link.bytes_per_second + link.hop_seconds)


def efficiency(work: Work, workers: int, link: Link) -> float:
    """The part of a step, 0 to 1, that each worker computes in."""
    return work.seconds / (work.seconds + ring_seconds(workers, work.gradient_bytes, link))


def fitted(small: tuple[float, float], large: tuple[float, float], workers: int) -> Link:
    """The link by which a ring of so many workers takes what was measured.

    Args:
        small, large: (bytes, seconds) of two sums.
        workers: in the ring.

    Raises:
        WrongResultError: if the larger one did not take longer.
    """
    (few, short), (many, long) = small, large
    if not (few < many and short < long):
        raise WrongResultError(f"{many:.0f} bytes took {long * 1e3:.3g} ms, and {few:.0f} took {short * 1e3:.3g} ms")
    hops = 2 * (workers - 1)
    bytes_per_second = hops / workers * (many - few) / (long - short)
    return Link(bytes_per_second, max(0.0, short / hops - few / workers / bytes_per_second))


# ---------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------


def table(works: Sequence[Work], workers: Sequence[int], gbits: Sequence[float], hop_seconds: float) -> str:
    """Markdown: a row to each model and number of workers, a column to each network, the efficiency in percent."""
    rows = [["model", "parameters", "gradient", "step", "workers", *(f"{rate:g} Gbit/s" for rate in gbits)]]
    rows.append(["---"] * len(rows[0]))
    for work in works:
        size = f"{work.gradient_bytes / 1e6:.3g} MB"
        own = [work.name, f"{work.parameters:,}", size, shown(work.seconds)]
        for count in workers:
            links = [Link(rate * 1e9 / 8, hop_seconds) for rate in gbits]
            rows.append([*own, str(count), *(f"{100 * efficiency(work, count, link):.0f} %" for link in links)])
            own = [""] * len(own)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# ---------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is trained to be measured: a model of scaleflow's on data of its usual shape.

    Attributes:
        overrides: the model and the data.
        steps: of an epoch.
        epochs: how many.
    """

    overrides: Sequence[str]
    steps: int
    epochs: int

    def words(self, *more: str) -> list[str]:
        examples = self.steps * BATCH_SIZE * 5 // 4  # a fifth is for the test
        return [
            *("hardware=cpu", "dataset=synthetic", f"dataset.examples={examples}", "dataset.validation=null"),
            *("tracking=none", "checkpoint=none"),
            *(f"training.batch_size={BATCH_SIZE}", f"training.epochs={self.epochs}"),
            *self.overrides,
            *more,
        ]


#: What is measured for the table.
MODELS: Mapping[str, Task] = {
    "mlp": Task(("model=mlp", "model.units=128", "dataset.shape=[28,28,1]"), 64, 60),
    "cnn": Task(("model=cnn", "dataset.shape=[32,32,3]"), 8, 25),
    "resnet": Task(("model=resnet", "dataset.shape=[32,32,3]"), 2, 15),
}

#: What the check is fitted to, and what it is tried on besides.
FITTED = ("mlp", "mlp_wide")
CHECKED: Mapping[str, Task] = {
    "mlp": Task(MODELS["mlp"].overrides, 64, 40),
    "mlp_wide": Task(("model=mlp", "model.units=[1024,1024]", "dataset.shape=[28,28,1]"), 6, 40),
    "cnn": Task(MODELS["cnn"].overrides, 3, 40),
}

#: Of how many workers.
COUNTS = (2, 3)

ONE_THREAD = ("hardware.intra_op_threads=1", "hardware.inter_op_threads=1")

TRAINED = re.compile(r"Trainable params: ([\d,]+)")


def steps_of(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """(when, in seconds since the epoch; seconds of a step) of each of a run's epochs but the first, which compiles."""
    key = "perf/step_ms_p50"
    found = [(e["time"] / 1e3, e["values"][key] / 1e3) for e in events if key in e.get("values", {})]
    if len(found) < 3:
        raise WrongResultError(f"a run told of {len(found)} epochs")
    return found[1:]


def trained_parameters(run: Path) -> int:
    """How many a run has, as its model's summary says."""
    found = TRAINED.search((run / "model_summary.txt").read_text())
    if found is None:
        raise WrongResultError(f"{run}: the model's summary says nothing of trainable parameters")
    return int(found[1].replace(",", ""))


def alone(task: Task, count: int, folder: Path, *more: str) -> Work:
    """A step of one of several workers that have nothing to do with each other, while all of them train."""
    typed = task.words("strategy=one_device", *more)

    def one(number: int) -> list[tuple[float, float]]:
        return steps_of(run_scaleflow(typed, folder, f"alone-{number}", is_recorded=False)[0])

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        found = list(pool.map(one, range(count)))
    seconds = statistics.mean(undisturbed(run) for run in while_all(found))
    return Work("", trained_parameters(folder / "alone-0"), seconds)


def while_all(found: Sequence[Sequence[tuple[float, float]]]) -> list[list[float]]:
    """Of each of several runs, (when, seconds) of its steps, the seconds that were told of while all told of some."""
    begin, end = max(run[0][0] for run in found), min(run[-1][0] for run in found)
    seconds = [[each for when, each in run if begin <= when <= end] for run in found]
    if not all(seconds):
        raise WrongResultError("the runs were not at work at the same time")
    return seconds


def undisturbed(seconds: Sequence[float]) -> float:
    """What a tenth of the epochs took less than: those in which nobody else had the processor, on a shared machine."""
    return statistics.quantiles(seconds, n=10, method="inclusive")[0] if len(seconds) > 1 else seconds[0]


def together(task: Task, count: int, folder: Path) -> float:
    """Seconds of a step of workers that sum their gradients."""
    typed = task.words("strategy=multi_worker", f"cluster.workers={count}", *ONE_THREAD)
    events, _ = run_scaleflow(typed, folder, "together", is_recorded=False)
    return undisturbed([seconds for _, seconds in steps_of(events)])


@contextlib.contextmanager
def served() -> Iterator[None]:
    """TensorFlow is imported once for all runs."""
    with start_fork_server() as address:
        os.environ[SERVER_ENV] = address
        try:
            yield
        finally:
            del os.environ[SERVER_ENV]


def measured_here(rounds: int) -> list[Work]:
    """A step of each model on this machine, one worker with all of its cores; the least of some rounds."""
    found: dict[str, list[Work]] = {}
    with served(), temporary_folder() as folder:
        for _ in range(rounds):
            for name, task in MODELS.items():
                work = alone(task, 1, folder)
                say(f"{name}: {work.parameters:,} parameters, {shown(work.seconds)}")
                found.setdefault(name, []).append(Work(name, work.parameters, work.seconds))
    return [min(works, key=lambda work: work.seconds) for works in found.values()]


# ---------------------------------------------------------------------------------------------
# The check
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What was measured of one model, by the number of workers.

    Attributes:
        name: the model's.
        size: bytes of its gradient.
        computing: seconds of a step of so many that do not speak with each other.
        together: the same of so many that sum their gradients.
    """

    name: str
    size: float
    computing: Mapping[int, float]
    together: Mapping[int, float]

    def communication(self, workers: int) -> float:
        return self.together[workers] - self.computing[workers]

    def slowed(self, workers: int) -> float:
        """How many times as long a worker computes as one of two."""
        return self.computing[workers] / self.computing[2]


def check(seen: Sequence[Seen]) -> str:
    """What was measured beside what the model says that was fitted to two workers of `FITTED`."""
    by_name = {each.name: each for each in seen}
    small, large = (by_name[name] for name in FITTED)
    link = fitted((small.size, small.communication(2)), (large.size, large.communication(2)), 2)
    said = f"loopback, from 2 workers: {link.bytes_per_second / 1e6:.0f} MB/s, {link.hop_seconds * 1e3:.2f} ms a hop"
    head = ["model", "gradient", "workers", "computing", "step measured"]
    rows = [[*head, "by the model", "ratio", "sending slowed, too", "ratio"]]
    rows.append(["---"] * len(rows[0]))
    for each in seen:
        for count in sorted(each.together):
            taken, sending = each.together[count], ring_seconds(count, each.size, link)
            is_fitted = count == 2 and each.name in FITTED
            row = [each.name, f"{each.size / 1e6:.3g} MB", str(count), shown(each.computing[count]), shown(taken)]
            for slowed in (1.0, each.slowed(count)):
                expected = each.computing[count] + sending * slowed
                row += [shown(expected), "(fitted)" if is_fitted else f"{expected / taken:.2f}"]
            rows.append(row)
    return "\n".join([said, "", *(f"| {' | '.join(row)} |" for row in rows)])


def shown(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def seen_here(rounds: int) -> list[Seen]:
    """Each model alone and together; of some rounds that in which it took least, and nobody else had the processor."""
    cores = len(os.sched_getaffinity(0))
    apart: dict[tuple[str, int], list[float]] = {}
    summing: dict[tuple[str, int], list[float]] = {}
    sizes: dict[str, int] = {}
    with served(), temporary_folder() as folder:
        for _ in range(rounds):
            for name, task in CHECKED.items():
                for count in sorted({min(count, cores) for count in COUNTS}):
                    work = alone(task, count, folder, *ONE_THREAD)
                    sizes[name] = work.gradient_bytes
                    apart.setdefault((name, count), []).append(work.seconds)
                    say(f"{name}, {count} workers alone: {shown(work.seconds)}")
                for count in COUNTS:
                    summing.setdefault((name, count), []).append(together(task, count, folder))
                    say(f"{name}, {count} workers together: {shown(summing[name, count][-1])}")
    return [
        Seen(
            name,
            sizes[name],
            {count: computing(min(apart[name, min(count, cores)]), count, cores) for count in COUNTS},
            {count: min(summing[name, count]) for count in COUNTS},
        )
        for name in CHECKED
    ]


def computing(seconds: float, workers: int, cores: int) -> float:
    """What a step takes of workers with a thread each, of which one takes `seconds` where all have a core."""
    return seconds * max(1.0, workers / cores)


# ---------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    try:
        if options.check:
            print(check(seen_here(options.rounds)))
        else:
            works = options.model or measured_here(options.rounds)
            print(table(works, options.workers, options.gbits, options.hop_microseconds / 1e6))
    except WrongResultError as wrong:
        print(f"benchmarks.scaling: {wrong}", file=sys.stderr)
        return 1
    return 0


def work_of(text: str) -> Work:
    """`NAME:PARAMETERS:MILLISECONDS`."""
    name, parameters, milliseconds = text.split(":")
    work = Work(name, int(float(parameters)), float(milliseconds) / 1e3)
    if work.parameters < 1 or not 0 < work.seconds < float("inf"):
        raise ValueError(text)
    return work


work_of.__name__ = "NAME:PARAMETERS:MILLISECONDS"  # argparse says it of what is none


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        type=work_of,
        action="append",
        metavar="NAME:PARAMETERS:MILLISECONDS",
        help="a step that was measured elsewhere, instead of here; several times for several models",
    )
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, help="default: 8 64 512")
    parser.add_argument("--gbits", type=float, nargs="+", default=GBITS, help="of networks; default: 1 10 25 100 400")
    parser.add_argument("--hop-microseconds", type=float, default=HOP_MICROSECONDS, help="default: 50")
    parser.add_argument("--check", action="store_true", help="the model against two and three workers on loopback")
    parser.add_argument("--rounds", type=int, default=3, help="of what is measured; the least counts (default 3)")
    options = parser.parse_args(argv)
    if min(options.workers) < 1 or min(options.gbits) <= 0 or options.hop_microseconds < 0 or options.rounds < 1:
        parser.error("--workers and --rounds: at least 1; --gbits: above 0; --hop-microseconds: not below 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
