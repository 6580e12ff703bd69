"""How long a command takes to start. `python -m benchmarks.start` shows what each command imports."""

from __future__ import annotations

import functools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.measure import (
    Benchmark,
    Results,
    Row,
    WrongResultError,
    environment,
    metric,
    row,
    run_scaleflow,
    temporary_folder,
)
from scaleflow.launcher.processes.handover import WARM_ENV

FIRST_STEP = "perf/seconds_to_first_step"

#: How often each command is measured for the table of imports.
ROUNDS = 3


def benchmark() -> Benchmark:
    """One row; the store and the warm server are there already."""
    contestants: dict[str, Callable[[Path], float]] = {
        how: functools.partial(measure, how == "warm") for how in ("warm", "cold")
    }
    return Benchmark(contestants, rows, prepare=lambda folder: [measure(is_warm, folder) for is_warm in (False, True)])


def rows(results: Results) -> list[Row]:
    return [row("from Enter to the first step, warm", "cold", results["warm"], results["cold"], "s", at_most=0.15)]


def measure(is_warm: bool, folder: Path) -> float:
    """Returns the seconds from the start of a process with the default job until its first step is done."""
    began = time.time()
    events, _ = run_scaleflow([], folder, is_warm=is_warm)
    (ready,) = (event for event in events if event["event"] == "ready")
    return float(ready["began"] / 1000 + metric(events, FIRST_STEP)[0] - began)


# ---------------------------------------------------------------------------------------------
# What each command imports
# ---------------------------------------------------------------------------------------------

#: The words of each command, with its exit code. RUN is a tracked run, FOLDER is its folder.
COMMANDS: Mapping[str, int] = {
    "--version": 0,
    "--help": 0,
    "--cfg job": 0,
    "warm status": 0,
    "modle=cnn": 2,
    "training.epochs=0": 2,
    "evaluate nothing": 2,
    "predict nothing --input a --output b": 2,
    "doctor": 0,
    "sync FOLDER": 0,
    "resume=FOLDER": 0,
    "training.epochs=1 tracking=none": 0,
    "training.epochs=1": 0,
    "-m seed=1,2 training.epochs=1": 0,
    "find lr --steps 30": 0,
    "rerun RUN": 0,
    "evaluate RUN": 0,
    "predict RUN --input new.csv --output predictions.csv --overwrite": 0,
}

#: Packages of which a command should import none unless it needs it.
NAMED = ("numpy", "pyarrow", "matplotlib", "pandas", "mlflow", "tensorflow")


def main() -> None:
    """Prints a table of the commands: seconds, processor time, modules and packages that the command's process imports.

    Workers are other processes: their imports do not count, their processor time does.
    """
    with temporary_folder() as folder:
        words = [*("dataset=synthetic", "dataset.shape=[2]", "dataset.kind=regression"), "training.epochs=1"]
        run_scaleflow(words, folder)
        np.savetxt(folder / "new.csv", np.zeros((10, 2)), delimiter=",", header="0,1", comments="")
        record = json.loads((folder / "run" / "record.json").read_text())
        names = {"RUN": record["run_id"], "FOLDER": "run"}
        print("| command | seconds | processor | modules | of these |\n|---|---|---|---|---|")
        for text, code in COMMANDS.items():
            typed = [names.get(word, word).replace("=FOLDER", "=run") for word in text.split()]
            measured = [measure_command(typed, code, folder) for _ in range(ROUNDS)]
            seconds, processor = (statistics.median(each[i] for each in measured) for i in (0, 1))
            modules = list_modules(typed, code, folder)
            found = ", ".join(name for name in NAMED if name in modules)
            print(f"| `{text}` | {seconds:.2f} | {processor:.2f} | {len(modules)} | {found} |", flush=True)


def measure_command(words: Sequence[str], code: int, folder: Path) -> tuple[float, float]:
    """Returns the wall time and the processor time of a command with its processes, in seconds."""
    before, began = os.times(), time.perf_counter()
    start(["-m", "scaleflow", *words], code, folder)
    seconds, after = time.perf_counter() - began, os.times()
    return seconds, sum(after[2:4]) - sum(before[2:4])


def list_modules(words: Sequence[str], code: int, folder: Path) -> set[str]:
    """Returns the modules that the command's own process imports."""
    text = start(["-X", "importtime", "-m", "scaleflow", *words], code, folder)
    return set(re.findall(r"^import time:.*\| +(\S+)$", text, re.M))


def start(command: Sequence[str], code: int, folder: Path) -> str:
    """Runs an interpreter; returns its standard error."""
    variables = {**environment(folder), WARM_ENV: "0"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode != code:
        raise WrongResultError(f"{command} exited with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stderr


if __name__ == "__main__":
    main()
