from dataclasses import dataclass, field
from typing import Literal

from scaleflow.interfaces.config import Plan, Rule
from scaleflow.interfaces.directions import NAME_ADVICE, find_direction
from scaleflow.interfaces.features import Command, Feature

#: Prefix of a floor's key for a slice of the report: `slice/COLUMN/VALUE`.
SLICE = "slice/"


@dataclass(frozen=True)
class PromotionOptions:
    """`promotion`: whether the trained model becomes the champion (the alias `champion` of a registered model)."""

    name: Literal["none", "champion"] = "none"
    model: str | None = None
    metric: str | None = None
    confidence: float = field(default=0.95, metadata={"above": 0.5, "below": 1.0})
    tolerance: float = 0.0
    at_least: dict[str, float] | None = None
    environment: Literal["here", "clean"] = "here"
    most_ms: float | None = field(default=None, metadata={"above": 0.0})
    most_mb: float | None = field(default=None, metadata={"above": 0.0})


def is_asked_for(plan: Plan) -> bool:
    """Returns whether a plan has a promotion, or at least the name of a model, which is then checked."""
    options = plan.of(PromotionOptions)
    return options.name != "none" or options.model is not None


def moves_alias_itself(plan: Plan) -> bool:
    return plan.tracking.register_as == plan.of(PromotionOptions).model


def has_unknown_direction(plan: Plan) -> bool:
    """Returns whether `promotion.at_least` has a metric whose better direction is unknown."""
    floors = plan.of(PromotionOptions).at_least or {}
    return any(not key.startswith(SLICE) and find_direction(key) is None for key in floors)


FEATURE = Feature(
    name="promotion",
    about="champion and challenger on the same examples",
    commands=(
        Command(
            name="promote",
            about="make it the champion if it is better: RUN_ID --model NAME",
            module="scaleflow.features.promotion.promote",
            group="tracked models",
            place=40,
            usage="RUN_ID --model NAME",
            other_names=("register", "deploy", "publish", "stage"),
        ),
    ),
    stages=("scaleflow.features.promotion.stage:STAGE",),
    public_names={
        "PromotionResult": "scaleflow.features.promotion.promote",
        "promote_model": "scaleflow.features.promotion.promote",
    },
    section=PromotionOptions,
    conf="scaleflow.features.promotion.conf",
    defaults=({"promotion": "none"},),
    ignored_keys=("promotion",),
    rules_place=35,
    rules=(
        Rule(
            "promotion=champion & tracking=none",
            "there is no store with registered models",
            "use tracking=mlflow, or promotion=none",
        ),
        Rule(
            "promotion=champion & tracking.alias in champion|challenger",
            "the run would move the alias before the promotion decides",
            "leave tracking.alias out",
            keys=("promotion.model", "tracking.register_as", "tracking.alias"),
            only_if=moves_alias_itself,
        ),
        Rule(
            "promotion.at_least",
            "it is not known whether larger values of each metric are better",
            NAME_ADVICE,
            only_if=has_unknown_direction,
        ),
    ),
    is_used=is_asked_for,
    check="scaleflow.features.promotion.checks:check_name",
    check_job="scaleflow.features.promotion.checks:check_job",
    end_task="scaleflow.features.promotion.end_task:PromoteModel",
)
