"""Wall time of one job of two workers on this machine as each engine starts it, against the launcher itself.

What an engine costs is the start. Under `cluster=local` both workers are forked from one process that has imported
TensorFlow; under the others each worker has a launcher, and an import, of its own, as it would on two machines, which
here share the cores.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.measure import Benchmark, Results, Row, WrongResultError, check_store, environment, row, say
from scaleflow.cluster.tasks import make_tf_config_environments
from scaleflow.interfaces.events import RunEnded
from scaleflow.runs.event_log import read_last_event
from tests.cluster import engine
from tests.cluster.machines import machines

LOCAL = "local"

JOB = ("strategy=multi_worker", "hardware=cpu", "training.epochs=2")
WORKERS = 2


def benchmark() -> Benchmark:
    """A row to each engine that is installed: the wall time of the job, to that under `cluster=local`."""
    contestants: dict[str, Callable[[Path], float]] = {LOCAL: local}
    for name, (lacking, way) in ENGINES.items():
        if reason := lacking():
            say(f"engines: cluster={name} is left out: {reason}")
        else:
            contestants[name] = way
    return Benchmark(contestants, rows, prepare=local)


def rows(results: Results) -> list[Row]:
    return [
        row(f"a job of two workers, cluster={name}, wall time", f"cluster={LOCAL}", seconds, results[LOCAL], "s")
        for name, seconds in results.items()
        if name != LOCAL
    ]


def local(folder: Path) -> float:
    return took([arguments(LOCAL, folder, f"cluster.workers={WORKERS}")], [{}], folder, LOCAL)


def by_tf_config(folder: Path) -> float:
    """Two launchers on loopback, started at once."""
    words = arguments("tf_config", folder)
    return took([words] * WORKERS, make_tf_config_environments({"worker": WORKERS}), folder, "tf_config")


def by_slurm(folder: Path) -> float:
    """A step of two tasks; Slurm itself runs before."""
    with engine.cluster() as told:
        return took([["srun", f"-n{WORKERS}", *arguments("slurm", folder)]], [told], folder, "slurm")


def by_ray(folder: Path) -> float:
    """An actor on each of two nodes; Ray itself runs before."""
    with tempfile.TemporaryDirectory(dir=folder) as of_ray, machines(Path(of_ray), environment(folder)) as nodes:
        nodes.join(cores=1, host="127.0.0.3")
        words = (f"cluster.workers={WORKERS}", f"cluster.address={nodes.address}")
        return took([arguments("ray", folder, *words)], [nodes.token], folder, "ray")


#: By name: what says why one can't be had here, and the job under it.
ENGINES: Mapping[str, tuple[Callable[[], str], Callable[[Path], float]]] = {
    "tf_config": (str, by_tf_config),
    "slurm": (engine.lacking, by_slurm),
    "ray": (str, by_ray),
}


def arguments(name: str, folder: Path, *words: str) -> list[str]:
    """The command under an engine; its run's folder is that of all launchers."""
    job = [*JOB, f"cluster={name}", f"hydra.run.dir={folder / name}", *words]
    return [sys.executable, "-m", "scaleflow", *job]


def took(commands: Sequence[Sequence[str]], more: Sequence[Mapping[str, str]], folder: Path, name: str) -> float:
    """Seconds from the start of some commands to the end of the last.

    Args:
        commands: that are one run.
        more: what is added to each one's environment.
        folder: where they run.
        name: of the run's folder.

    Raises:
        WrongResultError: if one exits with anything but 0, or the run is not finished in the store.
    """
    shutil.rmtree(folder / name, ignore_errors=True)
    with ExitStack() as outputs:
        files = [outputs.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        begin = time.perf_counter()
        started = [
            subprocess.Popen(
                words,
                cwd=folder,
                env={**environment(folder), **added},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for words, added, file in zip(commands, more, files, strict=True)
        ]
        codes = [process.wait() for process in started]
        seconds = time.perf_counter() - begin
        for code, file in zip(codes, files, strict=True):
            file.seek(0)
            if code:
                raise WrongResultError(f"cluster={name} exited with {code}:\n{file.read()}")
    last = read_last_event(folder / name / "events.jsonl")
    if not isinstance(last, RunEnded) or last.status != "FINISHED":
        raise WrongResultError(f"cluster={name}: the run did not finish: {last}")
    check_store(folder)
    return seconds
