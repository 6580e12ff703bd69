"""scaleflow's Hydra plugins: launchers, a sweeper, and config options from installed packages."""
