"""Runs the tests that matter with each supported set of versions, and has each pair of sets read what the other wrote.

    python -m tests.versions [--names oldest,between,newest] [--processes N]

The exit code is 0 if nothing failed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.processes import ROOT
from tests.versions.environments import NAMES, install_environment
from tests.versions.exchange import check_exchange

#: What differs between versions of TensorFlow, Keras and MLflow: strategies, the record, models, resume, the commands.
TESTS = (
    "tests/compat",
    "tests/versions",
    "tests/test_matrix.py",
    "tests/tracking/test_adopting.py",
    "tests/tracking/test_finished_run.py",
    "tests/tracking/test_initial_weights.py",
    "tests/tracking/test_keys.py::test_no_param_tag_or_metric_is_lost_in_the_store",
    "tests/tracking/test_lock.py",
    "tests/tracking/test_server.py",
    "tests/launcher/test_prepare.py",
    "tests/model/test_export.py",
    "tests/model/test_fine_tuning.py",
    "tests/model/test_tabular.py",
    "tests/checkpoint",
    "tests/precision",
    "tests/optimizer",
    "tests/features/report/test_page.py",
    "tests/features/predict/test_command.py",
    "tests/features/promotion/test_command.py",
    "tests/sweep/test_real.py",
    "tests/features/warm",
)

#: Shown with each set.
PACKAGES = ("tensorflow", "keras", "mlflow", "hydra-core", "numpy", "pyarrow")

TEST_SECONDS = 2400.0


def show_versions(python: Path) -> str:
    code = "import sys; from importlib.metadata import version; print(*(f'{n} {version(n)}' for n in sys.argv[1:]))"
    done = subprocess.run([python, "-c", code, *PACKAGES], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def run_tests(python: Path, processes: int) -> bool:
    """Returns whether the tests pass. They are the quick ones: `make test-all` runs the others with one set."""
    hidden = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "SCALEFLOW_WARM")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    words = ["-m", "pytest", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    words += ["--numprocesses", str(processes), "--dist", "worksteal", *TESTS]
    return subprocess.run([python, *words], cwd=ROOT, env=variables, timeout=TEST_SECONDS).returncode == 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--names", default=",".join(NAMES), help=f"a part of {','.join(NAMES)}")
    parser.add_argument("--processes", type=int, default=3, help="of the tests")
    options = parser.parse_args(arguments)
    names = [name for name in NAMES if name in options.names.split(",")]
    pythons, failed = {}, []
    for name in names:
        began = time.monotonic()
        pythons[name] = install_environment(name)
        print(f"== {name}: {show_versions(pythons[name])} (installed in {time.monotonic() - began:.0f} s)", flush=True)
        if not run_tests(pythons[name], options.processes):
            failed.append(name)
    for older, newer in itertools.pairwise(names):
        failed += check_exchange(older, pythons[older], newer, pythons[newer])
    if len(names) > 2:
        failed += check_exchange(names[0], pythons[names[0]], names[-1], pythons[names[-1]])
    print(f"failed: {', '.join(failed)}" if failed else f"passed: {', '.join(names)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
