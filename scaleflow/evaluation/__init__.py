"""What is made of a model's predictions: the record of them, and figures with their intervals. No TensorFlow."""
