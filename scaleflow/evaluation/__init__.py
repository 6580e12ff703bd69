"""Records a model's predictions, and computes figures from them with their intervals. No TensorFlow."""
