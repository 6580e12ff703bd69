"""From the rows of all sources to batches: splits, checks, preprocessing, shuffling, caches and feeds."""
