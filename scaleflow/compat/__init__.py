"""Private names of other packages: what a new release of them can break. Nothing else in scaleflow uses such a name.

Each module is named after a package. Each function has its purpose in the first line, which `tests/compat` shows when
one of the names in the function is gone. The names were checked with all versions that pyproject.toml allows.
"""
