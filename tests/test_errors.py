"""What is said of other packages' exceptions."""

from __future__ import annotations

import pytest

from scaleflow.errors import first_line

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
        (TRACED, "Bad.call(): expected 32, received 256"),
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
    ],
)
def test_the_reason_is_found_in_what_keras_writes_around_it(text: str, reason: str) -> None:
    assert first_line(ValueError(text)) == reason
