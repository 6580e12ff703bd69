"""The script that trains a compiled model of `scaleflow.run`, alone in its folder: scripts import from their folder."""
