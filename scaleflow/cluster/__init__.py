"""Finds the processes of a run and gives each its role, peers and GPUs. This package does not import TensorFlow."""
