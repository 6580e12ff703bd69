"""From words to a plan: what was typed is composed, read, checked; no TensorFlow."""
