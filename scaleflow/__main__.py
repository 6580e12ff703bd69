"""Entry point of `python -m scaleflow` and of the console script."""

import re
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from scaleflow.launcher.processes.handover import hand_over


def entry() -> None:
    """Runs the command and ends the process. Hands the command to a warm server, if there is one."""
    run = greet_and_run
    try:
        if sys.argv[1:3] != ["--json", "warm"] and sys.argv[1:2] != ["warm"]:
            hand_over()
    except KeyboardInterrupt:
        run = interrupt
    from scaleflow.commands.process import end_with

    end_with(run)


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


def greet_and_run() -> int:
    """Imports the command, which takes a third of a second, and runs it. Returns its exit code."""
    from scaleflow import __version__
    from scaleflow.interfaces.collector import pause_collector
    from scaleflow.launcher.display import greet

    began = time.time()
    if surely_trains(sys.argv[1:]):
        greet(f"scaleflow {__version__}")
    with pause_collector():
        from scaleflow.cli import main

    return main(began=began)


def surely_trains(words: Sequence[str]) -> bool:
    """Returns whether a command either trains or is rejected, whatever its config is.

    With other flags it may do something else. With `cluster` or `experiment` overrides it may print a job script, which
    must be the only output.
    """
    flags = ("-m", "--multirun", "--json")
    return all(word in flags or re.match(r"(?!cluster|experiment)\w[\w./]*=", word) for word in words)


if __name__ == "__main__":
    entry()
