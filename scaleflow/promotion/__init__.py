"""The decision whether a model becomes the one in use: the alias `champion` of a registered model."""
