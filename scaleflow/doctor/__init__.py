"""`python -m scaleflow.doctor`: what is on this machine, and what works on it.

`machine` and `probe` look, `judge_option` draws conclusions, `report` tells. Nothing but `probe`, which runs in a
process of
its own, imports TensorFlow.
"""
