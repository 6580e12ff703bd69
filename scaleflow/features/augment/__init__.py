"""Random changes of the training examples."""
