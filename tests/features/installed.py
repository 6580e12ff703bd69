"""Installs a feature from another package, as pip would, and runs commands that find it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import clean_environment


def install_feature(folder: Path, name: str, files: dict[str, str]) -> None:
    """Writes the package `name` into a folder, with the entry point `name.feature:FEATURE` of its feature.

    Args:
        files: the text of each file of the package, by its path in the package. Folders get an `__init__.py`.
    """
    package = folder / name
    for path, text in files.items():
        place = package / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    for module in package.rglob("*.py"):
        (module.parent / "__init__.py").touch()
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[scaleflow.features]\n{name} = {name}.feature:FEATURE\n")


def run_installed(words: str, packages: Path, work: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Runs `python -m scaleflow WORDS` in the folder `work`, in an interpreter that also finds `packages`."""
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-m", "scaleflow", *words.split()],
        cwd=work,
        env={**clean_environment(), "PYTHONPATH": os.pathsep.join([str(root), str(packages)])},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )
