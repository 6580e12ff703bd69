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


#: Modules whose names are only known when they run, and forms of files and of code that define `build`.
UNUSUAL: dict[str, str | bytes] = {
    "declared.py": "def prepare():\n    global build\n    build = dict\n\n\nprepare()\n",
    "executed.py": "exec('build = dict')\n",
    "by_vars.py": "vars()['build'] = dict\n",
    "by_locals.py": "locals()['build'] = dict\n",
    "replaced.py": "import sys\nsys.modules[__name__] = object()\n",
    "matched.py": "match {'a': [1]}:\n    case {'a': [*build]}:\n        pass\n",
    "with_mark.py": b"\xef\xbb\xbfdef build():\n    pass\n",
    "in_latin_1.py": b"# coding: latin-1\nTEXT = '\xe4'\n\n\ndef build():\n    pass\n",
    "with_escape.py": "PATTERN = '\\d'\n\n\ndef build():\n    pass\n",
    "twice.py": "other = 1\n",
    "twice/__init__.py": "build = dict\n",
    "only_bytecode.pyc": b"",
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_modules_are_accepted(name: str, tmp_path: Path) -> None:
    for each in (name, name.replace(".py", "/__init__.py") if name == "twice.py" else name):
        file = tmp_path / each
        file.parent.mkdir(exist_ok=True)
        content = UNUSUAL[each]
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    check(f"{name.partition('.')[0].partition('/')[0]}.build", tmp_path)


def test_submodules_without_source_and_in_other_folders_are_accepted(tmp_path: Path) -> None:
    for name, text in (("compiled", "top = 1\n"), ("extended", "__path__.append('elsewhere')\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    (tmp_path / "compiled" / "fast.cpython-311-x86_64-linux-gnu.so").touch()
    check("compiled.fast.build", tmp_path)
    check("extended.other.build", tmp_path)


def test_a_module_may_be_found_with_the_path_that_another_own_module_extends(tmp_path: Path) -> None:
    (tmp_path / "own_data.py").write_text("import sys\n\nsys.path.insert(0, 'lib')\n\n\ndef make():\n    pass\n")
    config = {"dataset": {"_target_": "own_data.make"}, "model": {"_target_": "own_net.build"}}
    check_own_names(config, [str(tmp_path)])
    (tmp_path / "own_data.py").write_text("def make():\n    pass\n")
    with pytest.raises(ConfigError, match="there is no module own_net"):
        check_own_names(config, [str(tmp_path)])


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
