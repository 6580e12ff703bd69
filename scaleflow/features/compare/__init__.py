"""Compares runs by their ingredients and results. Finds them in folders or in the store."""
