"""Contains all uses of private names of other packages. New releases of these packages can break them.

There is one module per package. The first line of each function's docstring is its purpose: `tests/compat` shows it if
a release lacks a name that the function uses. The names exist in all versions that pyproject.toml allows.
"""
