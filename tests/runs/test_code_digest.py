"""Digests of a user's code, without importing it."""

import sys
from pathlib import Path
from typing import Any

import pytest

from scaleflow.runs.code_digest import find_code
from scaleflow.runs.identity import compare
from scaleflow.runs.provenance.collect import read_code
from scaleflow.runs.provenance.record import Provenance

CONFIG: dict[str, Any] = {
    "dataset": {"_target_": "data.Waves"},
    "model": {"_target_": "nets.build", "layer": {"_target_": "nets.blocks.Block"}},
    "optimizer": {"_target_": "keras.optimizers.Adam"},
    "training": {"callbacks": [{"_target_": "scaleflow.training.callbacks.Stop"}, {"_target_": 3}]},
}

FILES = {
    "data.py": "import numpy as np\nimport json, shared\n\nclass Waves:\n    size = 1\n",
    "shared.py": "x = 1\n",
    "nets/__init__.py": "from .blocks import Block\ndef build():\n    from nets import late\n    return late\n",
    "nets/blocks.py": "from . import sizes\nfrom ... import beyond\nclass Block: ...\n",
    "nets/sizes.py": "import nets\n",  # a cycle
    "nets/late.py": "from other_path.deep import *\n",
    "unused.py": "",
    "json.py/data.txt": "",
}


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name, text in FILES.items():
        write(tmp_path / "conf" / name, text)
    write(tmp_path / "elsewhere/other_path/deep.py", "y = 2\n")  # a namespace package on Python's own path
    write(tmp_path / "lib/site-packages/numpy/__init__.py", "z = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    return [str(tmp_path / "lib/site-packages"), str(tmp_path / "conf")]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_users_modules_and_their_imports_count(search: list[str]) -> None:
    expected = ["data.py", "nets/__init__.py", "nets/blocks.py", "nets/late.py", "nets/sizes.py"]
    assert list(find_code(CONFIG, search)) == [*expected, "other_path/deep.py", "shared.py"]
    assert not {"data", "nets", "shared", "other_path"} & set(sys.modules)


def test_only_the_code_itself_counts(search: list[str], tmp_path: Path) -> None:
    before = read_code(CONFIG, search)
    write(tmp_path / "conf/data.py", "# new\n" + FILES["data.py"].replace("size = 1", "size  =  (1)  # one"))
    write(tmp_path / "conf/nets/sizes.py", "def (")  # cannot be parsed
    write(tmp_path / "conf/nets/late.py", "import unused\n")
    now = read_code(CONFIG, search)
    records = [Provenance(code=each) for each in (before, now)]
    assert compare(records[0], records[0], ("code",)) == []
    assert [str(each) for each in compare(*records, ("code",)) if each.matters] == [
        *("nets/late.py changed", "nets/sizes.py changed", "other_path/deep.py is gone", "unused.py is new")
    ]


def test_no_code_of_a_user(tmp_path: Path) -> None:
    assert find_code({"model": {"_target_": "keras.Sequential"}, "dataset": {"_target_": "__main__.Data"}}, []) == {}
    assert find_code({"model": {"_target_": "scaleflow.model.mlp.build"}}, [str(Path.cwd())]) == {}
