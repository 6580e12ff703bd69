"""Starts the processes of a run, on this machine or on Ray, watches them, restarts them and stops them."""
