"""The picture of a trial's figures."""

from __future__ import annotations

from pathlib import Path

from scaleflow.features.search.picture import draw_trial


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
