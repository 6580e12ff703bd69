"""`python -m scaleflow`."""

import sys
import time

from scaleflow import __version__
from scaleflow.command import end_with, surely_trains
from scaleflow.launcher.display import greet


def run_command() -> int:
    """Imports the command, which takes a third of a second, and runs it; returns its exit code."""
    began = time.time()
    if surely_trains(sys.argv[1:]):
        greet(f"scaleflow {__version__}")
    from scaleflow.cli import main

    return main(began=began)


if __name__ == "__main__":
    end_with(run_command)
