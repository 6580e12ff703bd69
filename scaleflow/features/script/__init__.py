"""Runs an unchanged Keras script: `scaleflow train.py strategy=mirrored precision=mixed -- --epochs 5`.

The words of the command become a config (`words.py`), and the launcher checks it (`check.py`). It starts a worker with
the task `RunScript` (`task.py`). The worker parses the script and replaces its constants (`source.py`), and runs it as
`__main__` (`run_script.py`) with a strategy and a precision (`runtime.py`). It records what Keras does in its own `fit`
and `evaluate` (`keras_calls.py`, `recorder.py`), what the script asks of MLflow (`mlflow_calls.py`) and what it prints
(`printing.py`; in the launcher `output.py`). At the end it saves the model (`saved_model.py`).

In a notebook or another program, `scaleflow.fit` and `scaleflow.Record` (`in_process.py`) record a training of that
process in a run without a launcher (`local_run.py`). `scaleflow.run` trains a compiled model with a script
of scaleflow's own (`compiled_model.py`, `compiled/train_compiled.py`).
"""
