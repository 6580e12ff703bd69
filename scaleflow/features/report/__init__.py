"""The report of a test: a page with findings, slices, the importance of columns, and mistakes with their inputs."""
