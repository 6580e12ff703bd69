from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from scaleflow.tracking.plot import draw_confusion


def table(folder: Path, classes: int) -> Path:
    names = [f"class {n}" for n in range(classes)]
    rows = [["true", *names], *([name, *["3"] * classes] for name in names)]
    path = folder / "confusion_matrix.csv"
    path.write_text("\n".join(",".join(row) for row in rows) + "\n")
    return path


@pytest.mark.parametrize("classes", [2, 40])
def test_a_table_becomes_a_picture_that_grows_with_it(tmp_path: Path, classes: int) -> None:
    picture = draw_confusion(table(tmp_path, classes), "test")
    assert picture == tmp_path / "confusion_matrix.png"
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    assert min(width, height) >= (400 if classes == 2 else 700)


def test_of_many_classes_or_without_matplotlib_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert draw_confusion(table(tmp_path, 101), "test") is None
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # its import fails
    assert draw_confusion(table(tmp_path, 3), "test") is None
    assert list(tmp_path.glob("*.png")) == []
