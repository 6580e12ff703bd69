"""`python -m tests.leaks`: runs all cases whose targets are drawn by a coin, and prints a table of what leaks."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path

from tests.leaks.cases import find_leaks, list_cases, write_datasets


def main() -> int:
    cases, leaks = list_cases(), []
    with tempfile.TemporaryDirectory(prefix="scaleflow-") as name:
        folder = Path(name)
        write_datasets(folder)
        os.chdir(folder)
        for case in cases:
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    leaks += [(case, found) for found in find_leaks(case, folder)]
            except Exception as error:  # a case that cannot run is no proof
                leaks.append((case, f"{type(error).__name__}: {error}"))
            print(".", end="", file=sys.stderr, flush=True)
    print(f"\n{len(cases)} cases, {len(leaks)} figures not at chance")
    for case, found in leaks:
        print(f"{case}: {found}")
    return 1 if leaks else 0


if __name__ == "__main__":
    sys.exit(main())
