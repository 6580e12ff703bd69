"""scaleflow: one command line, one distributed TensorFlow run, recorded in MLflow."""

__version__ = "0.1.0"

__all__ = ["__version__"]
