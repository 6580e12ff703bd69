"""The schema of data, its faults, and its drift."""
