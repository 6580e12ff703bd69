"""Learning rates, batch sizes and settings, found by trying them."""
