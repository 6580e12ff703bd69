"""The code that travels in each logged model. It needs TensorFlow, MLflow, numpy, pandas and pyarrow."""
