"""Many runs by one command: its jobs, which of them are to be run, how they share a machine, and what they show."""

from scaleflow.sweep.runner import SweepRunner

__all__ = ["SweepRunner"]
