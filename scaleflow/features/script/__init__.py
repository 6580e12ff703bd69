"""Runs an unchanged Keras script: `scaleflow train.py strategy=mirrored precision=mixed -- --epochs 5`.

The words of the command become a config (`words.py`). The launcher starts a worker with the task `RunScript`
(`task.py`). The worker runs the script as `__main__` (`program.py`) within a strategy and a precision (`setting.py`),
and records what Keras does in its own `fit` and `evaluate` (`recorder.py`, `keras_calls.py`) and what the script asks
of MLflow (`mlflow_calls.py`).
"""
