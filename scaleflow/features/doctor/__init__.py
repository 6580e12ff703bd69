"""`python -m scaleflow doctor`: reports what this machine has, and which options work on it.

`machine` and `tensorflow_probe` collect facts; `report` judges the options by them, runs nothing for that, and prints.
Only `tensorflow_probe`, which runs in its own process, imports TensorFlow.
"""
