"""What is said of other packages' exceptions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scaleflow.errors import find_cause, read_reason

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


CALL = "Exception encountered when calling Bad.call()."
ARGUMENTS = "Arguments received by Bad.call():\n  • x=1"
TRACED = f"""in user code:

    File "a.py", line 4, in call
        return x

    ValueError: {CALL}
    \n    {BOLD}expected 32, received 256{PLAIN}
    \n    {ARGUMENTS}"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "ValueError"),
        ("it fails\nfor a reason", "it fails"),
        (
            f"{CALL}\n\n{BOLD}{{{{function_node __wrapped__MatMul}}}} In[0]: [2,4] [Op:MatMul] name: {PLAIN}\n\n"
            f"{ARGUMENTS}",
            "Bad.call(): In[0]: [2,4]",
        ),
        (TRACED, "Bad.call(): expected 32, received 256 (a.py, line 4, in call)"),
        (
            f"{CALL}\n\n{BOLD}Could not infer the shape. Error encountered:\n\nin user code:\n\n    File 'a'\n\n"
            f"    TypeError: bfloat16 is not float32\n{PLAIN}\n\n{ARGUMENTS}",
            "Bad.call(): TypeError: bfloat16 is not float32",
        ),
        (
            "It could not be deserialized.\n\nconfig={'a': 1}.\n\nException encountered: Could not locate class "
            "'Own'. Full object config: {'module': None}",
            "Could not locate class 'Own'.",
        ),
        (
            "A total of 1 objects could not be loaded. Example error message for object <Dense>:\n\n"
            "Layer 'd' expected 2 variables, but received 0\n\nList of objects that could not be loaded:\n[<Dense>]",
            "Layer 'd' expected 2 variables, but received 0",
        ),
        (
            f"Exception encountered when calling Outer.call().\n\n{CALL}\n\nDimensions must be equal, but are 8 and 46 "
            "for '{{node MatMul}} = MatMul[T=DT_FLOAT](Placeholder)' with input shapes: [?,8], [46,4].\n\n"
            f"{ARGUMENTS}\n\n{ARGUMENTS}",
            "Bad.call(): Dimensions must be equal, but are 8 and 46 with input shapes: [?,8], [46,4].",
        ),
        (
            "Own could not be deserialized.\n\nException encountered: Unable to revive.\n\nReceived config={}\n\n"
            "Error encountered during deserialization: Own.__init__() got an unexpected keyword argument 'trainable'",
            "Own.__init__() got an unexpected keyword argument 'trainable'",
        ),
        (
            "{{function_node f}} Error in user-defined function passed to MapDataset:1 transformation with iterator: "
            "Iterator::Root::Map: ValueError: too large\nTraceback (most recent call last):\n\n"
            f'  File "{Path(np.__file__)}", line 1, in call\n\n  File "rows.py", line 7, in read\n    return x\n\n'
            "ValueError: too large\n\n\t [[{{node PyFunc}}]] [Op:IteratorGetNext]",
            "ValueError: too large (rows.py, line 7, in read)",
        ),
        (
            'Graph execution error:\n\nDetected at node f defined at (most recent call last):\n  File "my.py", line 3, '
            "in call\n\nassertion failed: [too large] [x =] [32]\n\t [[{{node f}}]] [Op:__inference_1]",
            "too large x = 32 (my.py, line 3, in call)",
        ),
    ],
)
def test_the_reason_is_found_in_what_keras_writes_around_it(text: str, reason: str) -> None:
    assert read_reason(ValueError(text)) == reason


def call_library(function: Callable[[], object], message: str) -> None:
    """Hides what a function raises, as Keras does."""
    source = f"def call(f):\n try:\n  f()\n except Exception:\n  raise NotImplementedError({message!r})"
    names: dict[str, Callable[..., None]] = {}
    exec(compile(source, np.__file__, "exec"), names)
    names["call"](function)


def fail() -> None:
    raise ValueError("rows differ:\n3 and 4\nmore")


def fail_with_own_words() -> None:
    try:
        fail()
    except ValueError:
        raise KeyError("no such row") from None


@pytest.mark.parametrize(
    ("function", "reason", "name"),
    [(fail, "rows differ: 3 and 4", "ValueError"), (fail_with_own_words, "'no such row'", "KeyError")],
)
def test_an_error_of_the_users_code_is_shown_with_its_line_in_place_of_what_a_library_makes_of_it(
    function: Callable[[], None], reason: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    with pytest.raises(NotImplementedError) as caught:
        call_library(function, "it could not be inferred")
    code = function.__code__
    line = code.co_firstlineno + (1 if function is fail else 4)
    assert read_reason(caught.value) == f"{reason} (test_errors.py, line {line}, in {code.co_name})"
    assert type(find_cause(caught.value)).__name__ == name


def test_an_error_of_a_library_alone_has_no_line() -> None:
    with pytest.raises(ValueError, match="matmul") as caught:
        np.ones(2) @ np.ones(3)
    error = caught.value.with_traceback(None)
    assert read_reason(error) == str(error)
