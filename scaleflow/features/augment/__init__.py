"""Random changes to training examples."""
