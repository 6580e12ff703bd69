"""Everything that needs an NVIDIA GPU, in at most 30 minutes: correctness, memory, profile, speed, sweeps.

    python -m benchmarks.gpu --report build/gpu            # writes gpu.md and gpu.json there
    python -m benchmarks.gpu memory resnet50 --rounds 3    # groups and checks, by name
    python -m benchmarks.gpu --cpus 2                      # small runs on logical CPUs: whether the checks work

Each check runs `python -m scaleflow` commands in a folder of its own. One that fails does not stop the others. Without
a GPU all checks are skipped. Words KEY=VALUE are overrides of the ResNet-50 that is measured.

Exit code: 0 if all checks passed or were skipped; 1 if one failed, or was not run because time was over.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import correctness, memory, profile, speed, sweeps
from benchmarks.gpu.bench import Options
from benchmarks.gpu.checks import Check, Result, run_checks
from benchmarks.gpu.device import describe_machine, find_device, find_obstacle
from benchmarks.gpu.report import summarize, write_report

MINUTES = 30

GROUPS = (correctness, memory, profile, speed, sweeps)


def list_checks() -> list[Check]:
    return [check for group in GROUPS for check in group.list_checks()]


def main(argv: Sequence[str] | None = None, checks: Sequence[Check] | None = None) -> int:
    """Runs the checks that the arguments name; `checks` replaces the list to choose from."""
    known = list_checks() if checks is None else checks
    options, chosen = parse_arguments(argv, known)
    begin = time.monotonic()
    device = find_device(options.cpus)
    machine = describe_machine(device)
    obstacle = find_obstacle() if device and device.kind == "gpu" else None
    settings = Options(options.rounds, options.batch_size, [word for word in options.names if "=" in word])
    seconds = 60 * options.minutes - (time.monotonic() - begin)
    results: list[Result] = []
    write_report(options.report, machine, results, 0.0)
    for result in run_checks(chosen, device, seconds, settings, obstacle):
        results.append(result)
        print(f"{result.check.name:24} {result.status:8} {result.seconds:4.0f} s  {result.reason}", flush=True)
        write_report(options.report, machine, results, time.monotonic() - begin)
    print(f"{summarize(results)}; the report is {options.report / 'gpu.md'}")
    return int(any(result.status in ("failed", "not run") for result in results))


def parse_arguments(argv: Sequence[str] | None, known: Sequence[Check]) -> tuple[argparse.Namespace, list[Check]]:
    """Returns the options and the chosen checks. Ends the process with exit code 2 for a wrong argument."""
    names = [name for check in known for name in (check.group, check.name)]
    listed = "\n".join(f"  {check.group:12} {check.name:24} at most {check.seconds:g} s" for check in known)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        epilog=f"groups and checks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="groups or checks (default: all); or KEY=VALUE")
    parser.add_argument("--report", type=Path, default=Path("build/gpu"), help="folder (default build/gpu)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"time limit of all (default {MINUTES})")
    parser.add_argument("--rounds", type=int, default=1, help="how often precisions are compared (default 1)")
    parser.add_argument("--batch-size", type=int, default=128, help="ResNet-50's, of a GPU (default 128)")
    parser.add_argument("--cpus", type=int, default=0, help="use so many logical CPUs in place of GPUs")
    options = parser.parse_intermixed_args(argv)
    selected = [name for name in options.names if "=" not in name]
    if unknown := [name for name in selected if name not in names]:
        parser.error(f"there is no {', '.join(unknown)}; there is {', '.join(dict.fromkeys(names))}")
    if min(options.rounds, options.batch_size, options.cpus + 1) < 1 or not options.minutes > 0:
        parser.error("--rounds and --batch-size: at least 1; --minutes: above 0; --cpus: not below 0")
    return options, [check for check in known if not selected or {check.group, check.name} & set(selected)]


if __name__ == "__main__":
    sys.exit(main())
