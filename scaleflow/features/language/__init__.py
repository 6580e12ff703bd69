"""Text from a language model."""
