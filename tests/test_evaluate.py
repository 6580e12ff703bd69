"""Rules of `scaleflow.evaluate` that need no run: which data are new, and how evaluations are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scaleflow.evaluate import has_new_data, main
from scaleflow.tracking.tracked_runs import choose_evaluation_name

TABLE = {"_target_": "scaleflow.dataset.table.Table", "data_dir": "data/a.csv", "target": "y", "test": 0.2, "limit": 9}
OWN = {"_target_": "mine.Source", "rows": 5, "limit": 9}


@pytest.mark.parametrize(
    ("dataset", "changes", "expected"),
    [
        (TABLE, {}, False),
        (TABLE, {"target": "z", "test": 0.5, "limit": None}, False),
        (TABLE, {"data_dir": "./data/../data/a.csv"}, False),
        (TABLE, {"data_dir": "data/b.csv"}, True),
        (TABLE, {"data_dir": "s3://bucket/a.csv"}, True),
        (TABLE, {"_target_": "scaleflow.dataset.tfds.Tfds"}, True),
        (TABLE, {"name": "other"}, True),
        (OWN, {"limit": None}, False),
        (OWN, {"rows": 6}, True),
    ],
)
def test_data_are_new_if_they_come_from_elsewhere(dataset: Any, changes: Any, expected: bool) -> None:
    config = {"dataset": {**dataset, **changes}}
    assert has_new_data({"dataset": dataset}, config, {"dataset"}) is expected
    assert has_new_data({"dataset": dataset}, config, {f"dataset.{key}" for key in changes}) is expected
    assert not has_new_data({"dataset": dataset}, config, {"seed"}), "it was an interpolation"


def test_a_path_is_new_from_another_folder_only_if_it_is_another(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    absolute = {"dataset": {**TABLE, "data_dir": str(tmp_path / "data/a.csv")}}
    assert not has_new_data({"dataset": TABLE}, absolute, {"dataset.data_dir"})


def test_other_data_of_one_name_are_recorded_beside_the_first() -> None:
    digest, other = "0123456789abcdef", "fedcba9876543210"
    tags = {"scaleflow.evaluate.csv": f"9 examples of test, data {digest}; python -m scaleflow evaluate"}
    assert choose_evaluation_name("csv", digest, {}) == "csv"
    assert choose_evaluation_name("csv", digest, tags) == "csv"
    assert choose_evaluation_name("csv", other, tags) == "csv-fedcba98"
    assert choose_evaluation_name("csv.all", other, tags) == "csv.all"
    assert choose_evaluation_name("csv", digest, {"scaleflow.evaluate.csv": "of somebody else"}) == "csv-01234567"


@pytest.mark.parametrize(
    "word",
    ["evaluation.threshold=0.9", "evaluation.threshold.recall=0.9", "evaluation.interval=0.5", "evaluation.sets=0.5"],
)
def test_what_validation_rows_decided_is_not_typed_again(word: str, capfd: Any) -> None:
    assert main(["0" * 32, word]) == 2
    assert (
        f"{word.partition('=')[0]}: an evaluation uses what the run's validation rows decided" in capfd.readouterr().err
    )


def test_other_words_that_begin_like_these_are_taken(capfd: Any) -> None:
    assert main(["0" * 32, "evaluation.intervals=5"]) == 2  # there is no such run
    assert "validation rows decided" not in capfd.readouterr().err
    assert main(["0" * 32, "objective.levels=[0.1,0.5]"]) == 2
    assert "objective.levels: the quantiles that a model predicts are those of its run" in capfd.readouterr().err
