"""Generates text with a language model."""
