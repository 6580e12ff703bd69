"""Formats of a trained model besides TensorFlow's, and the processes in which their own runtimes compute them."""
