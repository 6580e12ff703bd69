"""Checks the options of a promotion before a run starts."""

from collections.abc import Mapping
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.features.promotion.feature import PromotionOptions
from scaleflow.interfaces import Plan, name_command
from scaleflow.tracking.uri import check_model_name


def check_name(plan: Plan) -> None:
    """Raises ConfigError if `promotion.model` is not a valid name of a registered model."""
    model = plan.of(PromotionOptions).model
    if model is not None:
        check_model_name("promotion.model=", model)


def check_job(keys: Mapping[str, Any]) -> None:
    """Raises ConfigError if a sweep's job requests a promotion."""
    if keys.get("name") == "champion":
        raise ConfigError(
            "promotion=champion: of many jobs the best may be better by chance; leave it out, and promote the best job "
            f"afterwards with {name_command('promote')} RUN_ID"
        )
