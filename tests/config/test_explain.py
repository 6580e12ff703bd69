"""Errors of a command line in words."""

from __future__ import annotations

import pytest
from hydra.errors import HydraException
from omegaconf.errors import ConfigKeyError

from scaleflow.config.hydra_errors import shorten_error


@pytest.mark.parametrize("error", [HydraException("no such group"), ConfigKeyError("no such group")])
def test_an_error_of_hydra_is_said_in_its_words(error: Exception) -> None:
    assert shorten_error(error) == "no such group"


def test_an_error_that_nobody_expected_is_known_by_its_class() -> None:
    assert shorten_error(AttributeError("no such group")) == "AttributeError: no such group"
    assert shorten_error(AttributeError()) == "AttributeError"
