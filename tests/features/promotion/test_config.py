"""The keys of `promotion`: what is refused, and what later commands take of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from scaleflow.config.compose import CommandWords, check_job, compose_config
from scaleflow.errors import ConfigError
from scaleflow.features.promotion.feature import PromotionOptions
from scaleflow.runs.reuse import reuse_config

RUN = "0123456789abcdef0123456789abcdef"


def test_a_run_promotes_nothing_by_default(plan: Callable[..., Any]) -> None:
    assert plan().of(PromotionOptions) == PromotionOptions()
    assert plan("~promotion").of(PromotionOptions).name == "none"


@pytest.mark.parametrize("words", [("promotion=champion", "promotion.model=a/b"), ("+promotion.model=a/b",)])
def test_a_name_that_no_registered_model_can_have_is_refused(plan: Callable[..., Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"promotion\.model=a/b: expected a name without / : % and quotes"):
        plan(*words)


def test_the_rules_about_a_promotion_come_before_those_about_the_evaluation(plan: Callable[..., Any]) -> None:
    """Of several rules that apply, the first is told."""
    floor = "promotion.at_least={test/profit: 5}"
    with pytest.raises(ConfigError, match=r"promotion\.at_least="):
        plan("promotion=champion", "promotion.model=m", floor, "evaluation.metrics=[f1_score]")


def test_jobs_of_a_sweep_do_not_promote() -> None:
    check_job(OmegaConf.create({"promotion": {"name": "none"}}))
    with pytest.raises(ConfigError, match="promotion=champion: of many jobs the best may be better by chance"):
        check_job(OmegaConf.create({"promotion": {"name": "champion", "model": "m"}}))


def test_a_command_that_evaluates_promotes_nothing() -> None:
    params = {"model": "mlp", "dataset": "digits", "tracking": "none", "promotion": "champion"}
    config: Any = OmegaConf.to_container(compose_config(["tracking=none"]).config, resolve=True)
    config["promotion"] = {"name": "champion", "model": "churn"}
    words = CommandWords(run_id=RUN)
    evaluated = reuse_config(config, params, words, ["dataset"])
    assert evaluated.resolved["promotion"] == {"name": "none"}
    repeated = reuse_config(config, params, words)
    assert repeated.resolved["promotion"]["model"] == "churn"


def test_the_recipe_from_data_to_a_model_in_use_asks_for_a_promotion(plan: Callable[..., Any], tmp_path: Path) -> None:
    options = plan("experiment=deliver", "export.formats=null").of(PromotionOptions)
    assert options.name == "champion"
    assert options.model == "digits"
    assert options.at_least == {"test/accuracy": 0.9}
