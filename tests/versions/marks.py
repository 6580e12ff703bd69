"""Skips a test where a package is too old for what it tests."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from scaleflow.interfaces.versions import to_series


def needs(package: str, least: str) -> pytest.MarkDecorator:
    """The test needs this version of a package, or a newer one."""
    return pytest.mark.skipif(to_series(version(package)) < to_series(least), reason=f"needs {package} {least}")
