"""The files of a profile, in the layout that TensorBoard looks for them in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SUFFIX = ".xplane.pb"
SUMMARY, WORDS, PICTURE, TRACE = "summary.json", "summary.md", "profile.png", "trace.json.gz"


def window_name(steps: tuple[int, int]) -> str:
    """The name of a window by its first and last traced step."""
    return f"steps_{steps[0]}-{steps[1]}"


def xplane_path(folder: Path, steps: tuple[int, int], worker: str) -> Path:
    """Where one worker's trace is, under a profile's folder."""
    return folder / "plugins" / "profile" / window_name(steps) / f"{worker}{SUFFIX}"


def find_xplanes(folder: Path, steps: tuple[int, int]) -> Sequence[Path]:
    """The traces of a window, the chief's first."""
    found = sorted(xplane_path(folder, steps, "x").parent.glob(f"*{SUFFIX}"), key=lambda path: (len(path.name), path))
    return sorted(found, key=lambda path: not is_chief(path))


def is_chief(path: Path) -> bool:
    return worker_name(path) in ("worker-0", "coordinator")


def worker_name(path: Path) -> str:
    return path.name.removesuffix(SUFFIX)
