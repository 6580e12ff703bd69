"""The code that travels in each logged model. It needs TensorFlow, MLflow, pandas and numpy, and no scaleflow."""
