"""Determines the processes of a run, and the role, peers and GPUs of each. Does not import TensorFlow."""
