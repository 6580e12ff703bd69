"""Constants at the top of a script: which there are, and other values for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.features.script.source import Program, parse_script

SCRIPT = """
import math

EPOCHS = 3
RATE: float = 0.1
NAME = "small"
SIZES = (8, 16)
DEPTH = -2
NOTHING = None
HALF = math.pi / 2
COUNT = 1
COUNT = 2
for place in range(3):
    LAST = place

def train():
    EPOCHS = 7
    return EPOCHS
"""


def parse(tmp_path: Path, text: str = SCRIPT) -> Program:
    path = tmp_path / "train.py"
    path.write_text(text)
    return parse_script(path)


def run(program: Program) -> dict[str, Any]:
    """The variables of a script after it ran."""
    variables: dict[str, Any] = {}
    exec(program.compile(), variables)
    return variables


def test_constants_are_names_that_are_assigned_once_to_a_written_value(tmp_path: Path) -> None:
    constants = parse(tmp_path).constants
    values = {name: constant.value for name, constant in constants.items()}
    assert values == {
        "EPOCHS": 3,
        "RATE": 0.1,
        "NAME": "small",
        "SIZES": (8, 16),
        "DEPTH": -2,
        "NOTHING": None,
    }


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("EPOCHS", 5, 5),
        ("RATE", 1, 1.0),
        ("RATE", float("1e-3"), 1e-3),
        ("RATE", float("-inf"), float("-inf")),
        ("NAME", "it's", "it's"),
        ("SIZES", [4], (4,)),
        ("NOTHING", 3, 3),
        ("EPOCHS", None, None),
    ],
)
def test_the_script_runs_with_another_value(tmp_path: Path, name: str, given: Any, expected: Any) -> None:
    program = parse(tmp_path)
    program.replace_constant(name, given)
    found = run(program)[name]
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("EPOCH", 5, "no constant EPOCH at its top level; did you mean script.EPOCHS?"),
        ("EPOCHS", "many", "expected a whole number, as 3 in the script"),
        ("EPOCHS", 1.5, "expected a whole number"),
        ("EPOCHS", True, "expected a whole number"),
        ("NAME", 3, "expected a text"),
        ("COUNT", 3, "assigns COUNT several times"),
        ("HALF", 3, "no constant HALF"),
        ("LAST", 3, "no constant LAST"),
    ],
)
def test_what_a_command_cannot_set_is_refused(tmp_path: Path, name: str, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(tmp_path).replace_constant(name, given)


def test_an_error_names_the_line_of_the_script(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.py, line 2: "):
        parse(tmp_path, "x = 1\ny = = 2\n")


def test_a_line_of_the_script_keeps_its_number(tmp_path: Path) -> None:
    program = parse(tmp_path, "A = 1\n\n\nraise ValueError(A)\n")
    program.replace_constant("A", 7)
    with pytest.raises(ValueError, match="7") as raised:
        run(program)
    assert raised.traceback[-1].lineno == 3  # counted from 0


def write_notebook(tmp_path: Path, *cells: str) -> Path:
    path = tmp_path / "train.ipynb"
    content = {"cells": [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]}
    content["cells"].insert(1, {"cell_type": "markdown", "source": ["not code ("]})
    path.write_text(json.dumps(content))
    return path


def test_the_code_cells_of_a_notebook_run_in_order(tmp_path: Path) -> None:
    program = parse_script(write_notebook(tmp_path, "%matplotlib inline\nA = 2", "b = A * 3"))
    assert program.magics == ["%matplotlib inline"]
    program.replace_constant("A", 5)
    assert run(program)["b"] == 15


def test_ipython_s_timing_keeps_the_code_and_other_cells_of_ipython_are_refused(tmp_path: Path) -> None:
    program = parse_script(write_notebook(tmp_path, "%%time\na = 1", "%time b = a + 1"))
    assert run(program)["b"] == 2
    with pytest.raises(ConfigError, match=r"%%writefile x\.py: only IPython can run this cell"):
        parse_script(write_notebook(tmp_path, "%%writefile x.py\na = 1"))


def test_a_command_of_the_shell_in_a_notebook_is_refused(tmp_path: Path) -> None:
    path = write_notebook(tmp_path, "!pip install numpy")
    with pytest.raises(ConfigError, match="!pip install numpy: only a shell can run this line"):
        parse_script(path)


@pytest.mark.parametrize("content", ["no JSON", "{}", '{"cells": 3}'])
def test_what_is_no_notebook_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "train.ipynb"
    path.write_text(content)
    with pytest.raises(ConfigError, match="it is no notebook"):
        parse_script(path)
