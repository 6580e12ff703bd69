"""Runs the command."""

from scaleflow.commands.process import end_with
from scaleflow.predict.command import main

if __name__ == "__main__":
    end_with(main)
