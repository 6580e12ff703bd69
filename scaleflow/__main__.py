"""`python -m scaleflow`."""

import re
import sys
import time
from collections.abc import Sequence

from scaleflow import __version__
from scaleflow.commands.process import end_with
from scaleflow.launcher.answer import JSON
from scaleflow.launcher.display import greet


def greet_and_run() -> int:
    """Imports the command, which takes a third of a second, and runs it; returns its exit code."""
    began = time.time()
    if surely_trains(sys.argv[1:]):
        greet(f"scaleflow {__version__}")
    from scaleflow.cli import main

    return main(began=began)


def surely_trains(words: Sequence[str]) -> bool:
    """Returns whether a command trains or is refused, whatever its config is.

    A flag may ask for something else, and the config of a cluster may ask for a script, which is all that is printed.
    """
    flags = ("-m", "--multirun", JSON)
    return all(word in flags or re.match(r"(?!cluster|experiment)\w[\w./]*=", word) for word in words)


if __name__ == "__main__":
    end_with(greet_and_run)
