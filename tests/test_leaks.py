"""Targets of a coin, and targets of groups: a sample of what `make leaks` runs."""

from pathlib import Path

import pytest

from tests.conftest import make_once
from tests.leaks.cases import Case, find_leaks, write_datasets

SAMPLE = [
    Case("table", "tabular", "auto"),
    Case("table", "tabular", "out_of_fold", "embed"),
    Case("table", "tabular", "fold", "group", by_group=True),
    Case("table", "mlp", "fraction", "not cached"),
    Case("texts", "text", "auto", "stratum"),
    Case("pictures", "cnn", "fold"),
    Case("arrays", "mlp", "fraction", "group"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, _ = make_once(tmp_path_factory, "leaks", write_datasets)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_coin_stays_a_coin(case: Case, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    assert list(find_leaks(case, files)) == []


@pytest.mark.slow
def test_rows_of_a_group_on_both_sides_are_found(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    leak = Case("table", "tabular", "fraction", "random", by_group=True)
    assert any("val/accuracy" in found for found in find_leaks(leak, files)), "the test would find a leak"
