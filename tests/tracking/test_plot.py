from __future__ import annotations

from pathlib import Path

import pytest

from scaleflow.pages.charts import find_size
from scaleflow.tracking.plot import draw_confusion, draw_trial


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


def test_a_learning_rate_is_shown_without_the_divergence(tmp_path: Path) -> None:
    path = tmp_path / "learning_rates.csv"
    rows = [(1e-4, 2.1, 2.0), (1e-3, 1.1, 1.0), (1e-2, 1.2, 1.1), (1e-1, 90.0, 40.0)]
    path.write_text("learning_rate,loss,smoothed_loss\n" + "\n".join(",".join(map(str, row)) for row in rows))
    content = draw_trial(path, "optimizer.learning_rate=0.001", 1e-3).read_text()
    line, rule = (part.partition('"')[0].split() for part in content.split(' points="')[1:])
    assert len(line) == 3
    assert {point.partition(",")[0] for point in rule} == {line[1].partition(",")[0]}
    assert ">optimizer.learning_rate=0.001</text>" in content


def test_a_batch_size_that_did_not_fit_has_no_point(tmp_path: Path) -> None:
    path = tmp_path / "batch_sizes.csv"
    path.write_text("batch_size,examples_per_second,host_mb\n32,100.0,5\n64,150.0,6\n128,,\n")
    content = draw_trial(path, "training.batch_size=64", 64).read_text()
    line = content.split(' points="')[1].partition('"')[0].split()
    assert len(line) == 2
    assert ">32</text>" in content
    assert ">128</text>" not in content
