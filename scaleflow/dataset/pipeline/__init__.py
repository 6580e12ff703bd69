"""The input pipeline of all sources: splits, checks, preprocessing, shuffling, caches and feeds."""
