"""The code that travels in each logged model: it needs TensorFlow, MLflow, pandas and numpy, and nothing of scaleflow."""
