"""Runs in jobs of Slurm."""
