"""What data looks like, what is wrong with it, and whether it differs from other data. No TensorFlow."""
