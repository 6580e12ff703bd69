"""New projects, the schema of configs, and the disk space of old runs."""
