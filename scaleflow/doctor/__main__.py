"""Runs the doctor."""

from scaleflow.doctor.report import entry

if __name__ == "__main__":
    entry()
