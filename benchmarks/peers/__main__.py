"""scaleflow against other tools on the same work, the same arrays and the same machine. Prints one table.

    make bench-peers                                 # installs the other tools in .venv-peers, runs all of them
    python -m benchmarks.peers mlp digits --rounds 3

Rounds, ratios and exit codes are those of `python -m benchmarks`. The exit code is 2 if the other tools are not
installed. scaleflow records to MLflow, and so does Lightning; the others record nothing.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import distributed, steps, whole_job
from benchmarks.__main__ import told
from benchmarks.measure import (
    ROOT,
    Benchmark,
    Results,
    Row,
    check_store,
    expect_accuracy,
    ratios,
    row,
    run_by_hand,
    run_scaleflow,
    take_rounds,
)
from benchmarks.peers.images import write_images

SCRIPTS = Path(__file__).parent / "scripts"
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
PYTHON = ROOT / ".venv-peers" / "bin" / "python"

OURS, WARM, LIGHTNING = "scaleflow", "scaleflow, warm", "Lightning + Hydra + MLflow"
DDP, DDP_BESIDE = "DDP over gloo, a thread each", "two loops in PyTorch, a thread each"
MINUTES = 60

#: What the normal environment has for the contestants that run there.
OUR_PACKAGES = ("tensorflow", "keras", "mlflow", "hydra-core", "numpy")


@dataclass(frozen=True)
class Shape:
    """One model on one kind of images.

    Attributes:
        size: the model, its number of examples and of epochs, scaleflow's overrides, and the least accuracy.
        images: height, width and channels.
        lightning: the overrides of `lightning_job.py`.
        opponents: the script and the least ratio of each, by name.
    """

    size: steps.Shape
    images: tuple[int, int, int]
    lightning: Sequence[str]
    opponents: Mapping[str, tuple[str, float | None]]


MLP = Shape(
    replace(steps.MLP, overrides=("model.units=128",)),
    (28, 28, 1),
    ("model.pixels=784", "model.units=[128]", "model.scale=255"),
    {
        "whole-loop XLA by hand": ("tensorflow_xla.py", 0.95),
        "JAX jit + lax.scan": ("jax_scan.py", 0.95),
        "Keras fit on JAX": ("keras_jax.py", None),
        "a PyTorch loop": ("torch_loop.py", None),
        LIGHTNING: ("lightning_job.py", None),
    },
)
#: Runs as short as a first try, and twice as long. Both are compiled by `hardware.xla=auto`.
SHORT = {
    epochs: replace(MLP, size=replace(MLP.size, epochs=epochs), opponents=dict([*MLP.opponents.items()][:1]))
    for epochs in (5, 10)
}
CNN = Shape(
    replace(steps.CNN, epochs=3, overrides=("model.padding=valid",), least_accuracy=0.9),
    (32, 32, 3),
    ("~model.pixels", "~model.units", "model._target_=torch_models.cnn", "model.scale=255"),
    {
        "JAX jit": ("jax_scan.py", None),
        "Keras fit on JAX": ("keras_jax.py", None),
        "a PyTorch loop": ("torch_loop.py", None),
        LIGHTNING: ("lightning_job.py", None),
    },
)


class MissingError(Exception):
    """The environment of the other tools is not there, or not complete."""


# ---------------------------------------------------------------------------------------------
# Benchmarks
# ---------------------------------------------------------------------------------------------


def compare_speed(shape: Shape, python: Path) -> Benchmark:
    """A row against each opponent: examples/s of the median epoch but the first."""
    contestants: dict[str, Callable[[Path], float]] = {OURS: functools.partial(measure_ours, shape)}
    for name, (script, _) in shape.opponents.items():
        contestants[name] = functools.partial(measure_opponent, shape, script, python)
    return Benchmark(contestants, functools.partial(make_rows, shape), functools.partial(prepare, shape))


def make_rows(shape: Shape, results: Results) -> list[Row]:
    work = f"{shape.size.model}, {shape.size.epochs} epochs, examples/s"
    return [
        row(work, name, results[OURS], results[name], "/s", at_least=least)
        for name, (_, least) in shape.opponents.items()
    ]


def prepare(shape: Shape, folder: Path) -> None:
    write_images(folder / "images.npz", shape.images, shape.size.examples)


def measure_ours(shape: Shape, folder: Path) -> float:
    words = [
        *("dataset=npz", f"dataset.data_dir={folder / 'images.npz'}", "dataset.test=0", "dataset.validation=null"),
        *(f"model={shape.size.model}", *shape.size.overrides, "strategy=one_device", "hardware=cpu"),
        *(f"training.batch_size={steps.BATCH_SIZE}", f"training.epochs={shape.size.epochs}", "checkpoint=none"),
    ]
    events, _ = run_scaleflow(words, folder)
    return steps.rate_of(shape.size, events)


def measure_opponent(shape: Shape, script: str, python: Path, folder: Path) -> float:
    images = folder / "images.npz"
    epochs = shape.size.epochs
    if script == "lightning_job.py":
        words = ["is_timed=true", f"data.file={images}", f"data.batch_size={steps.BATCH_SIZE}", *shape.lightning]
        found, _ = run_by_hand(SCRIPTS / script, [*words, f"trainer.max_epochs={epochs}"], folder, python)
        check_store(folder)
    else:
        words = [shape.size.model, "--file", str(images), "--epochs", str(epochs)]
        is_ours = script == "tensorflow_xla.py"
        found, _ = run_by_hand(
            SCRIPTS / script, [*words, "--batch-size", str(steps.BATCH_SIZE)], folder, None if is_ours else python
        )
    expect_accuracy(script, found["accuracy"], shape.size.least_accuracy)
    return float(found["examples_per_second"])


def compare_job(python: Path) -> Benchmark:
    """One row: the default job, from the start of the process to its end, with a store that exists already."""
    lightning = functools.partial(run_lightning_job, python)

    def warm_up(folder: Path) -> None:
        for is_warm in (False, True):
            whole_job.ours(folder, is_warm)
        lightning(folder)

    warm = functools.partial(whole_job.ours, is_warm=True)
    return Benchmark({OURS: whole_job.ours, WARM: warm, LIGHTNING: lightning}, make_job_rows, warm_up)


def make_job_rows(results: Results) -> list[Row]:
    return [
        row("the default job, wall time", LIGHTNING, results[OURS], results[LIGHTNING], "s", at_most=0.42),
        row("the same, warm", LIGHTNING, results[WARM], results[LIGHTNING], "s", at_most=0.15),
    ]


def run_lightning_job(python: Path, folder: Path) -> float:
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    found, seconds = run_by_hand(SCRIPTS / "lightning_job.py", [], folder, python)
    expect_accuracy(LIGHTNING, found["accuracy"], whole_job.LEAST_ACCURACY)
    check_store(folder)
    return seconds


def compare_workers(python: Path) -> Benchmark:
    """What two workers with a thread each lose to two unconnected runs, ours and PyTorch's over gloo."""
    own = distributed.efficiency()
    ddp = functools.partial(measure_ddp, python)
    theirs = {DDP: ddp, DDP_BESIDE: functools.partial(ddp, options=("--unconnected",))}
    return Benchmark({**own.contestants, **theirs}, make_worker_rows, functools.partial(prepare, CNN))


def make_worker_rows(results: Results) -> list[Row]:
    ours, theirs = (ratios(results[a], results[b]) for a, b in (("two", "unconnected"), (DDP, DDP_BESIDE)))
    return [
        *distributed.efficiency_rows(results),
        row(DDP, "2 unconnected runs", results[DDP], results[DDP_BESIDE], "/s"),
        row("part of two unconnected runs", DDP, ours, theirs, "", at_least=1.0),
    ]


def measure_ddp(python: Path, folder: Path, options: Sequence[str] = ()) -> float:
    words = ["cnn", "--file", str(folder / "images.npz"), "--epochs", str(CNN.size.epochs), *options]
    found, _ = run_by_hand(SCRIPTS / "torch_ddp.py", [*words, "--batch-size", str(steps.BATCH_SIZE)], folder, python)
    expect_accuracy(DDP, found["accuracy"], CNN.size.least_accuracy)
    return float(found["examples_per_second"])


BENCHMARKS: Mapping[str, Callable[[Path], Benchmark]] = {
    "mlp": functools.partial(compare_speed, MLP),
    **{f"mlp_{epochs}": functools.partial(compare_speed, shape) for epochs, shape in SHORT.items()},
    "cnn": functools.partial(compare_speed, CNN),
    "digits": compare_job,
    "workers": compare_workers,
}

# ---------------------------------------------------------------------------------------------
# Versions
# ---------------------------------------------------------------------------------------------


def list_packages(requirements: str) -> list[str]:
    """Returns the names in a requirements file."""
    lines = (line.split("#")[0].strip() for line in requirements.splitlines())
    return [re.split(r"[^\w.-]", line)[0] for line in lines if line]


def find_versions(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """Returns the versions of Python and of packages in another environment.

    Raises:
        MissingError: if there is no such interpreter, or it lacks packages.
    """
    if not python.is_file():
        raise MissingError(f"there is no {python}, the environment of the other tools; run: make bench-peers")
    program = (
        "import importlib.metadata as metadata, json, platform\n"
        "found = {each.metadata['Name'].lower(): each.version for each in metadata.distributions()}\n"
        "print(json.dumps({'Python': platform.python_version(), **found}))"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    if missing := [name for name in packages if name not in found]:
        raise MissingError(f"{python} lacks {', '.join(missing)}; run: make bench-peers")
    return {name: found[name] for name in ("Python", *packages)}


def describe(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    try:
        theirs = find_versions(options.python, list_packages(REQUIREMENTS.read_text()))
    except MissingError as error:
        print(f"benchmarks.peers: {error}", file=sys.stderr)
        return 2
    chosen = {name: BENCHMARKS[name](options.python) for name in options.names or BENCHMARKS}
    code = told(take_rounds(chosen, options.rounds, options.minutes * 60))
    ours = {name: importlib.metadata.version(name) for name in OUR_PACKAGES}
    print(f"\nscaleflow and TensorFlow: Python {platform.python_version()}, {describe(ours)}")
    print(f"the others: {describe(theirs)}")
    print(f"machine: {len(os.sched_getaffinity(0))} cores, {platform.machine()}, {platform.system()}")
    return code


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="how often each contestant is measured (default 3)")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"as for python -m benchmarks (default {MINUTES})"
    )
    parser.add_argument("--python", type=Path, default=PYTHON, help="the interpreter that has the other tools")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"there is no {', '.join(unknown)}; there is {', '.join(BENCHMARKS)}")
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
