"""Runs the command."""

from scaleflow.__main__ import entry

if __name__ == "__main__":
    entry("pipeline")
