"""A new project, its schema, and the disk space of old runs."""
