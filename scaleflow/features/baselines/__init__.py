"""Simple models of a table, fitted while a run trains, with which its model is compared."""
