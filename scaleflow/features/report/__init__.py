"""The report of a test: a page with findings, slices, importance of columns, and mistakes with their inputs."""
