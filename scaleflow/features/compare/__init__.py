"""Compares runs: what each was made of, and what came of it. It finds them in their folders, or in the store."""
