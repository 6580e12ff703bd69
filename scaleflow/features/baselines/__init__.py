"""Simple models of a table, fitted during a run for comparison with its model."""
