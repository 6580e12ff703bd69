"""Side-by-side ratios against what a user would write by hand: `python -m benchmarks`."""
