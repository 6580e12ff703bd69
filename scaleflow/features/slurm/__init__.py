"""Runs in Slurm jobs."""
