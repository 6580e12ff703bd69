"""Runs the doctor."""

from scaleflow.command import end_with
from scaleflow.doctor.report import main

if __name__ == "__main__":
    end_with(main)
