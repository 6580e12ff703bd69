"""Compares versions of packages by their minor series."""


def to_series(version: str) -> tuple[int, int]:
    """Returns the major and minor number of a version: (3, 15) for "3.15.1". Raises ValueError for other texts."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
