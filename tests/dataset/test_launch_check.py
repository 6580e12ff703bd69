"""What the launcher checks of a dataset's files, and that it imports no TensorFlow for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.dataset.launch_check import CHECKS, check_source_files
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Target
from tests.dataset.files import write

CONF = Path(__file__).parents[2] / "conf/dataset"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(tmp_path / "house.csv", "town;area;price\nUlm;3;4\n")
    write(tmp_path / "parts/year=2024/a.csv", "area,price\n3,4\n")
    write(tmp_path / "broken.csv", b"\xff\xfe")
    for name in ("train/cat/1.png", "train/dog/1.png", "test/cat/1.png"):
        write(tmp_path / "photos" / name, "")
    np.savez(tmp_path / "all.npz", x_train=np.zeros(3), y_train=np.zeros(3), w_train=np.zeros(3))
    write(tmp_path / "records/a.tfrecord-00000-of-00001", "")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(option: str, data_dir: str, **arguments: Any) -> str:
    """The refusal for an option of the group dataset; "" if there is none."""
    path = re.findall(r"(?m)^_target_: (\S+)", (CONF / f"{option}.yaml").read_text())[0]
    try:
        check_source_files(Target("dataset", path, {"data_dir": data_dir, **arguments}))
    except ConfigError as refusal:
        return str(refusal)
    return ""


SEMICOLON = {"delimiter": ";"}

#: Option, data_dir, arguments, and the refusal.
CASES: list[tuple[str, str, dict[str, Any], str]] = [
    ("table", "house.csv", {"target": "price", **SEMICOLON}, ""),
    ("table", "parts", {"target": "price", "categorical": ["year"]}, ""),
    ("table", "s3://bucket/house.csv", {"target": "price"}, ""),
    ("table", "hous.csv", {"target": "price"}, "there is no such file or folder; did you mean house.csv?"),
    ("table", "House", {"target": "price"}, "did you mean house.csv?"),
    ("table", "quite/another", {"target": "price"}, "dataset.data_dir=quite/another: there is no such file or folder"),
    ("table", "*.parquet", {"target": "price"}, "no file matches it"),
    (
        "table",
        "house.csv",
        {"target": "pric", **SEMICOLON},
        "dataset.target=pric: there is no such column; did",
    ),
    ("table", "house.csv", {"target": "PRICE", **SEMICOLON}, "did you mean price? The columns are town, area, price"),
    ("table", "house.csv", {"target": "price", "drop": ["aera"], **SEMICOLON}, "did you mean area?"),
    (
        "table",
        "house.csv",
        {"target": "price", "numeric": ["arae"], **SEMICOLON},
        "dataset.numeric=arae: is not an input",
    ),
    ("table", "house.csv", {"target": "price", "header": ["a", "b"]}, "dataset.target=price: there is no such column"),
    ("table", "house.csv", {"target": "price", "delimiter": "::"}, "dataset.delimiter=::: expected a single character"),
    ("table", "broken.csv", {"target": "price"}, "broken.csv cannot be read"),
    ("image_folder", "photos", {}, ""),
    ("image_folder", "photo", {}, "dataset.data_dir=photo: there is no such folder; did you mean photos?"),
    ("image_folder", "photos", {"classes": ["cat", "bird"]}, "there is no folder photos/train/bird"),
    ("text_folder", "house.csv", {}, "is a file, expected a folder"),
    ("segmentation_folder", "street", {}, "there is no such folder"),
    ("npz", "all.npz", {"weights": "w"}, ""),
    ("npz", "al.npz", {}, "did you mean all.npz?"),
    ("npz", "all.npz", {"targets": ["y", "z"]}, "there is no array z_train; the arrays are x_train, y_train"),
    ("npz", "house.csv", {}, "is not a complete .npz file"),
    ("tfrecord", "records", {}, ""),
    ("tfrecord", "record", {}, "did you mean records?"),
    ("tfrecord", "photos", {}, "there is no file that ends in .tfrecord"),
    ("tokens", "photos", {}, "there is no file that ends in .txt"),
    ("huggingface", "hub", {}, "there is no such folder"),
    ("digits", "nowhere", {}, ""),
]


@pytest.mark.parametrize(("option", "data_dir", "arguments", "refusal"), CASES)
def test_files_and_columns_are_checked(
    folder: Path, option: str, data_dir: str, arguments: dict[str, Any], refusal: str
) -> None:
    found = check(option, data_dir, **arguments)
    assert refusal in found
    assert bool(found) == bool(refusal), found


def test_every_source_that_is_checked_is_an_option() -> None:
    targets = {target for path in CONF.glob("*.yaml") for target in re.findall(r"_target_: (\S+)", path.read_text())}
    assert set(CHECKS) <= targets


def test_no_tensorflow_is_imported_for_it() -> None:
    code = "import sys, scaleflow.dataset.launch_check; print(*{'tensorflow', 'keras', 'mlflow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == ""
