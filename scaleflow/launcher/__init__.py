"""The launcher: prepares a run, supervises its processes, displays and records it, and reports how it ended."""
