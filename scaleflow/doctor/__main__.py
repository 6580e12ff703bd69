"""Runs the doctor."""

from scaleflow.__main__ import entry

if __name__ == "__main__":
    entry("doctor")
