"""A Keras script with `scaleflow train.py` against the same with `python train.py`: the whole, and each step."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measure import BY_HAND, Benchmark, Results, Row, check_store, ratios, row, run

SCRIPT = BY_HAND / "script.py"

#: What a script of 30 s may take with scaleflow: a second more, and each step one percent more.
MAX_RATIO = 31 / 30
MAX_STEP_RATIO = 1.01

#: The measures of a step, by their names in what the script prints.
STEP_MEASURES: Mapping[str, str] = {
    "step_ms": "a step of it",
    "processor_ms": "a step of it, processor time",
}


class ScriptRuns:
    """Runs the script both ways, and keeps what it prints about its steps, by contestant."""

    def __init__(self) -> None:
        self._printed: dict[str, list[Mapping[str, float]]] = {"scaleflow": [], "python": []}

    def warm_up(self, folder: Path) -> None:
        """Makes the store and the byte code."""
        run(["-m", "scaleflow", SCRIPT, "hardware=cpu", f"hydra.run.dir={folder / 'run'}", "--", "2"], folder)
        run([SCRIPT, "2"], folder)

    def run_with_scaleflow(self, folder: Path) -> float:
        shutil.rmtree(folder / "run", ignore_errors=True)
        output, seconds = run(["-m", "scaleflow", SCRIPT, "hardware=cpu", f"hydra.run.dir={folder / 'run'}"], folder)
        check_store(folder)
        self._printed["scaleflow"].append(read_printed(output))
        return seconds

    def run_with_python(self, folder: Path) -> float:
        output, seconds = run([SCRIPT], folder)
        self._printed["python"].append(read_printed(output))
        return seconds

    def make_rows(self, results: Results) -> list[Row]:
        ours = results["scaleflow"]
        theirs = results["python"]
        longer = statistics.median(mine - other for mine, other in zip(ours, theirs, strict=True))
        whole = Row(
            "a Keras script, wall time",
            "python train.py",
            ratios(ours, theirs),
            f"{statistics.median(ours):.1f} s ({longer:+.1f} s)",
            f"{statistics.median(theirs):.1f} s",
            at_most=MAX_RATIO,
        )
        rows = [whole]
        for name, work in STEP_MEASURES.items():
            our_steps = self._list_steps("scaleflow", name)
            their_steps = self._list_steps("python", name)
            if our_steps:
                rows.append(row(work, "python train.py", our_steps, their_steps, "ms", at_most=MAX_STEP_RATIO))
        return rows

    def _list_steps(self, contestant: str, name: str) -> list[float]:
        return [printed[name] for printed in self._printed[contestant]]


def read_printed(output: str) -> Mapping[str, float]:
    """Returns the line of JSON that the script prints, which may stand between lines of scaleflow."""
    lines: Sequence[str] = [line for line in output.splitlines() if line.startswith('{"step_ms"')]
    printed: Mapping[str, float] = json.loads(lines[-1])
    return printed


def benchmark() -> Benchmark:
    """Three rows; both have run once before, so that there is a store and byte code."""
    runs = ScriptRuns()
    contestants = {"scaleflow": runs.run_with_scaleflow, "python": runs.run_with_python}
    return Benchmark(contestants, runs.make_rows, prepare=runs.warm_up)
