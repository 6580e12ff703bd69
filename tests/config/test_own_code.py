"""A name that a user's module lacks is found without importing the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scaleflow.config.own_code import check_own_names
from scaleflow.errors import ConfigError

MODULE = """
raise RuntimeError("nobody imports this")

from os.path import join as joined

if True:
    first, (second, *rest) = 1, (2, 3)
try:
    import json
except ImportError:
    json = None


def soft(inputs, outputs):
    hidden = 1


class Model:
    inner = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_module.py").write_text(MODULE)
    (tmp_path / "own_lazy.py").write_text("def __getattr__(name):\n    return name\n")
    (tmp_path / "own_star.py").write_text("from os import *\n")
    (tmp_path / "own_broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "own_package" / "inner").mkdir(parents=True)
    (tmp_path / "own_package" / "__init__.py").write_text("top = 1\n")
    (tmp_path / "own_package" / "deep.py").write_text("def build():\n    pass\n")
    (tmp_path / "own_folder").mkdir()
    (tmp_path / "own_folder" / "deep.py").write_text("def build():\n    pass\n")
    return tmp_path


def check(path: str, folder: Path) -> None:
    config: dict[str, Any] = {"model": {"_target_": path}}
    check_own_names(config, [str(folder / "empty"), str(folder)])


@pytest.mark.parametrize(
    "path",
    [
        *("own_module.soft", "own_module.Model", "own_module.Model.inner", "own_module.joined", "own_module.json"),
        *("own_module.first", "own_module.second", "own_module.rest", "own_lazy.anything", "own_star.anything"),
        *("own_package.top", "own_package.deep.build", "own_folder.deep.build", "own_package.inner.anything"),
        *("numpy.anything", "keras.layers.Dense"),
    ],
)
def test_a_name_that_may_exist_is_accepted(path: str, folder: Path) -> None:
    check(path, folder)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            "own_module.sofft",
            r"model\._target_=own_module\.sofft: .*own_module.py has no sofft; did you mean own_module\.soft\?",
        ),
        ("own_module.hidden", "has no hidden"),
        ("own_module.inner", "has no inner"),
        ("own_package.deep.bild", r"deep.py has no bild; did you mean own_package\.deep\.build\?"),
        ("own_folder.deep.bild", "deep.py has no bild"),
        ("own_broken.f", "own_broken.py, line 2: invalid syntax"),
        ("own_modul.soft", "there is no module own_modul"),
    ],
)
def test_a_name_that_cannot_exist_is_refused(path: str, expected: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=expected):
        check(path, folder)
