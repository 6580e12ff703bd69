"""Runs the doctor."""

from scaleflow.commands.process import end_with
from scaleflow.doctor.report import main

if __name__ == "__main__":
    end_with(main)
