"""What the GPUs of this machine make of it: mixed precision, utilisation, and several of them against one.

    python -m benchmarks.gpu                                   # ResNet-50 on synthetic images
    python -m benchmarks.gpu model=transformer --batch-size 64 --rounds 3
    python -m benchmarks.gpu --cpus 2 ...                      # logical CPUs: whether it works, not how fast

A table of ratios: examples per second in mixed precision to those in float32; of all GPUs, and of two where there are
more, to as many times one; and the share of the peak that the model's operations are (perf/mfu), where the GPU is in
scaleflow/hardware/peaks.py. Nothing is asked of any of them. Further words are overrides of every run.

Contestants take turns, each a process of its own; the first epoch of each does not count. The exit code is 1 where a
run did not do its work, and 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.__main__ import told
from benchmarks.measure import Benchmark, Results, Row, WrongResultError, metric, row, run_scaleflow, take_rounds
from scaleflow.cluster.gpus import visible_gpus

#: What a training run of it is about: large enough to keep a GPU busy, from a known source (docs/models.md).
WORK = ("model=resnet", "model.depth=50", "dataset.shape=[224,224,3]")

STEPS_PER_EPOCH = 40
#: The first one compiles and is not measured.
EPOCHS = 4


@dataclass
class Machine:
    """What is measured, and on what.

    Attributes:
        devices: how many there are.
        kind: gpu, or cpu where the program itself is tried out.
        batch_size: of a replica.
        work: overrides of every run.
        mfu: the utilisation that runs told of, by contestant.
    """

    devices: int
    kind: str
    batch_size: int
    work: Sequence[str]
    mfu: dict[str, list[float]] = field(default_factory=dict)

    def benchmark(self) -> Benchmark:
        contestants: dict[str, Callable[[Path], float]] = {
            name_of(precision, count): functools.partial(self.rate, precision, count)
            for precision in ("float32", "mixed")
            for count in self.counts
        }
        return Benchmark(contestants, self.rows)

    @property
    def counts(self) -> list[int]:
        """Of how many devices a run is: one, two, all."""
        return sorted({1, min(2, self.devices), self.devices})

    def rows(self, results: Results) -> list[Row]:
        ways = [(precision, count) for precision in ("float32", "mixed") for count in self.counts]
        found = [
            row(f"mixed, {self.named(count)}", "float32", results[name_of("mixed", count)], results[name], "/s")
            for count in self.counts
            for name in [name_of("float32", count)]
        ]
        for precision, count in ways:
            if count > 1:
                ideal = [count * rate for rate in results[name_of(precision, 1)]]
                theirs = f"{count} x one"
                found.append(
                    row(f"{precision}, {self.named(count)}", theirs, results[name_of(precision, count)], ideal, "/s")
                )
        for precision, count in ways:
            if shares := self.mfu.get(name_of(precision, count)):
                found.append(Row(f"{precision}, {self.named(count)}, mfu", "the GPUs' peak", shares, "", ""))
        return found

    def named(self, count: int) -> str:
        return f"{count} {self.kind.upper()}{'s' if count > 1 else ''}"

    def rate(self, precision: str, count: int, folder: Path) -> float:
        """Examples per second of the median epoch but the first."""
        words = [
            *("dataset=synthetic", "dataset.validation=null", "tracking=none", "checkpoint=none"),
            f"dataset.examples={STEPS_PER_EPOCH * self.batch_size * count * 5 // 4}",  # a fifth is for the test
            *(f"training.batch_size={self.batch_size}", f"training.epochs={EPOCHS}", f"precision={precision}"),
            *self.words_for(count),
            *self.work,
        ]
        events, _ = run_scaleflow(words, folder, is_recorded=False)
        losses = metric(events, "train/loss")
        if not (losses and all(map(math.isfinite, losses)) and losses[-1] < losses[0]):
            raise WrongResultError(f"{name_of(precision, count)}: the losses are {losses}")
        (replicas,) = {event["params"]["resolved.replicas"] for event in events if event["event"] == "ready"}
        if replicas != str(count):
            raise WrongResultError(f"{name_of(precision, count)}: trained on {replicas} replicas")
        if shares := metric(events, "perf/mfu")[1:]:
            self.mfu.setdefault(name_of(precision, count), []).append(statistics.median(shares))
        return statistics.median(metric(events, "perf/examples_per_second")[1:])

    def words_for(self, count: int) -> list[str]:
        strategy = "one_device" if count == 1 else "mirrored"
        if self.kind == "cpu":
            return [f"strategy={strategy}", "hardware=cpu", f"hardware.logical_devices={count}"]
        devices = ",".join(map(str, range(count)))
        return [f"strategy={strategy}", "hardware=gpu", f"hardware.devices=[{devices}]"]


def name_of(precision: str, count: int) -> str:
    return f"{precision} on {count}"


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    devices = options.cpus or len(visible_gpus())
    if not devices:
        print("benchmarks.gpu: there is no NVIDIA GPU here: nvidia-smi lists none that may be used", file=sys.stderr)
        return 2
    kind = "cpu" if options.cpus else "gpu"
    machine = Machine(devices, kind, options.batch_size, [*WORK, *options.overrides])
    return told(take_rounds({kind: machine.benchmark()}, options.rounds, math.inf))


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of every run")
    parser.add_argument("--rounds", type=int, default=5, help="how often each contestant is measured (default 5)")
    parser.add_argument("--batch-size", type=int, default=128, help="of a GPU (default 128)")
    parser.add_argument("--cpus", type=int, default=0, help="so many logical CPUs in the place of GPUs")
    options = parser.parse_intermixed_args(argv)
    if min(options.rounds, options.batch_size, options.cpus + 1) < 1:
        parser.error("--rounds and --batch-size: at least 1; --cpus: not below 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
