"""`dataset.balance`: draws classes equally often, or by given shares."""

from dataclasses import dataclass, field
from typing import Literal

from scaleflow.interfaces.config import Plan, Rule
from scaleflow.interfaces.features import Feature


@dataclass(frozen=True)
class BalanceOptions:
    """Keys of `dataset`: how often each class occurs in an epoch, and whether probabilities are corrected for that."""

    balance: Literal["oversample", "undersample"] | dict[str, float] | None = field(
        default=None, metadata={"above": 0.0, "at_most": 1.0}
    )
    prior_correction: bool = True


def is_balanced(plan: Plan) -> bool:
    return plan.of(BalanceOptions).balance is not None


def has_too_large_shares(plan: Plan) -> bool:
    balance = plan.of(BalanceOptions).balance
    return isinstance(balance, dict) and sum(balance.values()) > 1 + 1e-9


FEATURE = Feature(
    name="balance",
    about="classes that are drawn equally often, or by their shares",
    section=BalanceOptions,
    group="dataset",
    conf="scaleflow.features.balance.conf",
    defaults=("balance_keys",),
    key_names={
        "dataset.balance=oversample": "oversample balance balanced isunbalance classbalance",
        "dataset.balance=undersample": "undersample",
    },
    rules=(
        Rule(
            "dataset.balance!=null",
            "the shares sum to more than 1",
            "give some classes their share of the examples: {positive: 0.3}; the others divide the rest",
            only_if=has_too_large_shares,
        ),
        Rule(
            "dataset.balance!=null & objective.class_weight!=null",
            "rare classes would count twice",
            "use only one of the two",
        ),
        Rule(
            "dataset.balance!=null & dataset.prior_correction & training.step._target_!=null",
            "a custom step computes its loss from outputs that are corrected already",
            "use dataset.prior_correction=false",
        ),
        Rule(
            "dataset.prior_correction=false & dataset.balance=null",
            "examples are drawn as they are, so that there is nothing to correct",
            "leave dataset.prior_correction out",
        ),
        Rule(
            "dataset.balance!=null & debug.overfit",
            "debug.overfit trains on the first batch only",
            "use only one of the two",
        ),
    ),
    worker="scaleflow.features.balance.hook:BalanceClasses",
    changes_training=True,
    is_used=is_balanced,
)
