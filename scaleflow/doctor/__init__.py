"""`python -m scaleflow.doctor`: reports what this machine has, and which options work on it.

`machine` and `tensorflow_probe` collect facts, `verdicts` judges the options, `report` prints. Only
`tensorflow_probe`, which runs in its own process, imports TensorFlow.
"""
