"""Runs the jobs of a sweep, many runs from one command: ledger, devices, report, and the parent run."""

from scaleflow.sweep.runner import SweepRunner
