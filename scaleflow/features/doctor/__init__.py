"""`python -m scaleflow doctor`: reports what this machine has, and which options work on it.

`machine` and `tensorflow_probe` collect facts. `command` judges the options by these facts, without running them, and
prints the report. Only `tensorflow_probe`, in a separate process, imports TensorFlow.
"""
