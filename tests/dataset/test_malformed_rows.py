"""Rows with too many or too few fields are left out, and the rows after them keep their numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

WRONG = {"a.csv": {0, 7, 8, 150}, "b.csv": {199}}


def locate_all(folder: Path) -> dict[str, Any]:
    """The targets, which are the numbers of the rows, beside what is said of these, in large and small blocks."""
    import numpy as np

    from scaleflow.dataset.table import Table
    from scaleflow.dataset.tables import files

    (folder / "data").mkdir()
    for name, wrong in WRONG.items():
        rows = ["1,2,3,4" if n in wrong else f"{'x' if n == 180 else n},{n % 3},{n + 1}" for n in range(200)]
        (folder / "data" / name).write_text("\n".join(["x,word,y", *rows]))
    found: dict[str, Any] = {}
    for size in (files.TEXT_BLOCK, 300):
        files.TEXT_BLOCK = size
        data, cache = str(folder / "data"), str(folder / "cache")
        table = Table(data, "y", kind="regression", numeric=["x"], test=0.0, cache_dir=cache)
        rows = table.load("train")
        good = np.delete(np.arange(len(rows)), [*rows.find_unreadable()])
        paths, numbers = rows.locate(good)
        targets = rows.read(good)[1].ravel()
        found[str(size)] = (
            targets.astype(int).tolist() == numbers.tolist(),
            sorted({Path(str(path)).name for path in paths}),
            [message.partition(":")[0].rpartition("/")[2] for message in rows.malformed],
            [name.rpartition("/")[2] for _, name, _ in rows.find_unusable()],
        )
    return found


def test_rows_after_malformed_ones_keep_their_numbers(isolated: Callable[..., Any], tmp_path: Path) -> None:
    for is_right, names, malformed, unusable in isolated(locate_all, tmp_path).values():
        assert is_right
        assert names == [*WRONG]
        assert malformed == [f"{name}, row {n + 1}" for name, wrong in WRONG.items() for n in sorted(wrong)]
        assert unusable == ["a.csv, row 181", "b.csv, row 181"]
