from __future__ import annotations

from pathlib import Path

import pytest

from scaleflow.pages.charts import find_size
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
    assert picture == tmp_path / "confusion_matrix.svg"
    content = picture.read_text()
    width, height = find_size(content)
    assert min(width, height) >= (100 if classes == 2 else 700)
    assert content.count("<title>class") == classes**2
    assert f">test: {3 * classes:,} of {3 * classes**2:,} correct</text>" in content


def test_of_many_classes_there_is_no_picture(tmp_path: Path) -> None:
    assert draw_confusion(table(tmp_path, 101), "test") is None
    assert list(tmp_path.glob("*.svg")) == []
