"""Controls how often training draws each class."""
