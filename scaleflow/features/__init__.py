"""The optional parts of scaleflow, a folder each. `interfaces/features.py` finds them, and the core names none."""
