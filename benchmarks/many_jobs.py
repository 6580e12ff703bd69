"""Sweeps of many tiny jobs: time per job, memory of the sweep's process, the report, and recognising finished jobs.

    python -m benchmarks.many_jobs                        # 10 and 100 real jobs, and up to 1,000 that do not train
    python -m benchmarks.many_jobs --real 10 100 1000     # 1,000 real jobs take about half an hour
    python -m benchmarks.many_jobs --tracking mlflow      # recorded in an SQLite store

Jobs that do not train have the files of one that did: scaleflow's own functions write its events and its config into
the folder of each job. They show what the sweep's process does for a job, at numbers of jobs that would take long to
train. Each sweep runs in a process of its own. The machine's load decides about times, so compare the rows of one
table.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measure import environment, say, temporary_folder

TINY = ("dataset=synthetic", "dataset.shape=[16]", "dataset.examples=64", "training.max_steps=3", "hardware=cpu")

#: Sweeps of a driver: jobs that train, and jobs that get the files of one that did.
REAL, MADE = "real", "made"

HEAD = (
    *("jobs", "kind", "s per job", "CPU ms per job", "s to first job", "memory MB"),
    *("report s", "report KB", "sent again: s to first new job", "memory MB"),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.many_jobs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", type=int, nargs="*", default=[10, 100], help="numbers of jobs that train")
    parser.add_argument("--made", type=int, nargs="*", default=[10, 100, 1000], help="numbers of jobs that do not")
    parser.add_argument("--tracking", default="none", choices=["none", "mlflow"], help="of the jobs that train")
    parser.add_argument("--drive", nargs=4, metavar=("KIND", "JOBS", "TEMPLATE", "TRACKING"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.drive:
        kind, jobs, template, tracking = options.drive
        print(json.dumps(drive(kind, int(jobs), Path(template), tracking)))
        return 0
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    with temporary_folder() as folder:
        run_sweep(folder, REAL, 1, "none")
        asked = [(REAL, jobs, options.tracking) for jobs in options.real]
        for kind, jobs, tracking in [*asked, *((MADE, jobs, "none") for jobs in options.made)]:
            first = run_sweep(folder, kind, jobs, tracking)
            again = run_sweep(folder, MADE, jobs + 1, "none", name=f"{kind}-{jobs}")
            cells = [
                *(f"{jobs:,}", kind, f"{first['seconds'] / jobs:.3f}", f"{first['cpu'] / jobs * 1000:.0f}"),
                *(f"{first['to first']:.1f}", f"{first['memory']:.0f}", f"{first['report']:.2f}"),
                *(f"{first['size'] / 1024:.0f}", f"{again['to first']:.1f}", f"{again['memory']:.0f}"),
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
    return 0


def run_sweep(folder: Path, kind: str, jobs: int, tracking: str, name: str | None = None) -> dict[str, float]:
    """Runs a sweep in a process of its own, in `folder/name`, and returns what `drive` does."""
    name = name or f"{kind}-{jobs}"
    say(f"{jobs:,} {kind} jobs in {name}")
    words = ["-m", "benchmarks.many_jobs", "--drive", kind, str(jobs), str(folder / f"{REAL}-1" / "0"), tracking]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment(folder) | {"MANY_JOBS_FOLDER": name},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the sweep failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def drive(kind: str, jobs: int, template: Path, tracking: str) -> dict[str, float]:
    """Runs a sweep in this process.

    Returns:
        seconds: wall time.
        cpu: processor seconds of this process, without those of the jobs.
        to first: seconds to the first job that runs.
        memory: peak memory of this process, in MB.
        report: seconds for the last report with its plots.
        size: bytes of the report.
    """
    import os

    began = time.time()
    from scaleflow.cli import main as scaleflow
    from scaleflow.launcher.processes.handover import SERVER_ENV
    from scaleflow.sweep import runner

    figures: dict[str, float] = {"to first": 0.0, "report": 0.0}
    launch = make_launch(template) if kind == MADE else runner.launch_run

    def launch_first(*arguments: Any, **named: Any) -> Any:
        figures["to first"] = figures["to first"] or time.time() - began
        return launch(*arguments, **named)

    end_parent = runner.SweepRunner._end_parent

    def time_report(sweep: runner.SweepRunner) -> Any:
        since = time.time()
        report = end_parent(sweep)
        figures["report"] = time.time() - since
        return report

    runner.launch_run = launch_first
    runner.SweepRunner._end_parent = time_report  # type: ignore[method-assign]
    if kind == MADE:
        os.environ[SERVER_ENV] = "no job needs the fork server"
    folder = Path(os.environ["MANY_JOBS_FOLDER"])
    words = ["-m", *TINY, f"tracking={tracking}", f"hydra.sweep.dir={folder}", f"seed=range({jobs})"]
    code = scaleflow(words, began)
    if code:
        raise SystemExit(f"the sweep ended with exit code {code}")
    figures["seconds"] = time.time() - began
    figures["cpu"] = time.process_time()
    figures["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures["size"] = sum(path.stat().st_size for path in folder.glob("report.*"))
    return figures


def make_launch(template: Path) -> Callable[..., Any]:
    """Returns a function like `launch_run` that writes the files of the finished run in `template`."""
    from scaleflow.interfaces.events import RunReady
    from scaleflow.launcher.command_exit import Outcome
    from scaleflow.launcher.launch import write_configs
    from scaleflow.runs import EventReader, EventWriter, RunFolder

    events = list(EventReader(RunFolder(template).events).read())
    record: Mapping[str, Any] = RunFolder(template).read_record()

    def launch(run: Any, *, on_event: Callable[[Any], None], **others: object) -> Outcome:
        write_configs(run)
        files, seed = run.spec.files, str(run.spec.plan.seed)
        write = EventWriter(files.events)
        for event in events:
            if isinstance(event, RunReady):
                params = {**event.params, "seed": seed}
                event = replace(event, params=params, parent=run.spec.parent, resumed=None)
            write(event)
            on_event(event)
        write.close()
        files.write_record(record)
        return Outcome()

    return launch


if __name__ == "__main__":
    sys.exit(main())
