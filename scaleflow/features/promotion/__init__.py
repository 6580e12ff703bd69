"""Compares champion and challenger on the same examples."""
