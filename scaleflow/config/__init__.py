"""Composes the words of a command into a config, and parses and checks it. Imports no TensorFlow."""
