"""What scaleflow adds to Hydra."""
