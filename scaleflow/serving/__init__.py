"""The code that is copied into each logged model. It needs TensorFlow, MLflow, NumPy, pandas and pyarrow."""
