"""Paths of a profile's files, in the layout that TensorBoard expects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SUFFIX = ".xplane.pb"
SUMMARY, MARKDOWN, PICTURE, TRACE = "summary.json", "summary.md", "profile.png", "trace.json.gz"


def window_name(steps: tuple[int, int]) -> str:
    return f"steps_{steps[0]}-{steps[1]}"


def xplane_path(folder: Path, steps: tuple[int, int], worker: str) -> Path:
    return folder / "plugins" / "profile" / window_name(steps) / f"{worker}{SUFFIX}"


def find_xplanes(folder: Path, steps: tuple[int, int]) -> Sequence[Path]:
    """Returns the traces of a window: the chief's, then the others in the order of their numbers."""
    traces = xplane_path(folder, steps, "x").parent.glob(f"*{SUFFIX}")

    def order(path: Path) -> tuple[bool, int, Path]:
        return worker_name(path) not in ("worker-0", "coordinator"), len(path.name), path  # worker-2 before worker-10

    return sorted(traces, key=order)


def worker_name(path: Path) -> str:
    return path.name.removesuffix(SUFFIX)
