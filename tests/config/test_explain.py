"""Errors of a command line in words."""

from __future__ import annotations

import pytest
from hydra.errors import HydraException
from omegaconf.errors import ConfigKeyError

from scaleflow.config.compose import compose_config, shorten_error
from scaleflow.errors import ConfigError


@pytest.mark.parametrize("error", [HydraException("no such group"), ConfigKeyError("no such group")])
def test_an_error_of_hydra_is_said_in_its_words(error: Exception) -> None:
    assert shorten_error(error) == "no such group"


def test_an_error_that_nobody_expected_is_known_by_its_class() -> None:
    assert shorten_error(AttributeError("no such group")) == "AttributeError: no such group"
    assert shorten_error(AttributeError()) == "AttributeError"


@pytest.mark.parametrize("word", ["model.freeze={0: [dense], 5: []}", "model.freeze=[dense]"])
def test_a_mapping_over_that_of_a_recipe_is_refused_with_the_remedy(
    word: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("own")
    (folder / "experiment").mkdir()
    (folder / "experiment" / "mine.yaml").write_text(
        "# @package _global_\nmodel:\n  freeze: {0: ['*', '!outputs'], 3: []}\n"
    )
    with pytest.raises(ConfigError, match=r"model\.freeze=.*: a recipe sets this mapping.*; type model\.freeze=null"):
        compose_config(["experiment=mine", word], [folder])
    composed = compose_config(["experiment=mine", "model.freeze=null", word], [folder])
    assert 3 not in (composed.config.model.freeze or {})
