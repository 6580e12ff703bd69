"""The files of a profile, in the layout that TensorBoard looks for them in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

SUFFIX = ".xplane.pb"
SUMMARY, WORDS, PICTURE, TRACE = "summary.json", "summary.md", "profile.png", "trace.json.gz"


def place_of(steps: tuple[int, int]) -> str:
    """The name of a window by its first and last traced step."""
    return f"steps_{steps[0]}-{steps[1]}"


def xplane_of(folder: Path, steps: tuple[int, int], worker: str) -> Path:
    """Where one worker's trace is, under a profile's folder."""
    return folder / "plugins" / "profile" / place_of(steps) / f"{worker}{SUFFIX}"


def xplanes(folder: Path, steps: tuple[int, int]) -> Sequence[Path]:
    """The traces of a window, the chief's first."""
    found = sorted(xplane_of(folder, steps, "x").parent.glob(f"*{SUFFIX}"), key=lambda path: (len(path.name), path))
    return sorted(found, key=lambda path: not is_chief(path))


def is_chief(path: Path) -> bool:
    return name_of(path) in ("worker-0", "coordinator")


def name_of(path: Path) -> str:
    return path.name.removesuffix(SUFFIX)
