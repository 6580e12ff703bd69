"""Sends messages at the end of runs and sweeps, and when processes are restarted."""
