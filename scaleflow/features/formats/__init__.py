"""More formats of a trained model."""
