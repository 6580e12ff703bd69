"""What is made of a model's predictions: the record of them, figures, findings and a report. No TensorFlow."""
