"""Records a model's predictions, and computes metrics from them with their intervals. No TensorFlow."""
