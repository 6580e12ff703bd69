"""`dataset.balance`: how often each class occurs in an epoch, and how probabilities are corrected for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Outputs, Plan

if TYPE_CHECKING:
    from scaleflow.dataset import ClassOrder, Splits

KEY = "dataset.balance"

#: The most classes that a note lists.
MOST_SHOWN = 10


@dataclass(frozen=True)
class Balance:
    """The order of the training examples, the outputs of the model, which may correct probabilities, and a note."""

    order: ClassOrder
    outputs: Outputs
    text: str


def balance_classes(plan: Plan, splits: Splits) -> Balance | None:
    """Reads the classes of the training split, if `dataset.balance` is set; all workers read the same.

    Raises ConfigError if examples have no single class, or if it is not known before they are read.
    """
    option = plan.dataset.balance
    if option is None:
        return None
    import numpy as np

    from scaleflow import dataset, objective

    described, train = splits.outputs, splits.train
    if isinstance(described, Mapping) or not described.is_one_class or described.ignore is not None:
        has = "several outputs" if isinstance(described, Mapping) else f"{described.kind} targets {described.shape}"
        has += "" if isinstance(described, Mapping) or described.ignore is None else ", some of which are ignored"
        raise ConfigError(f"{KEY}: needs one class of each example, and the dataset has {has}; leave it null")
    objective.check_classes(described, KEY, option)
    if train.blocks or not train.is_random_access:
        raise ConfigError(
            f"{KEY}: the classes of examples that are read while training are not known before; use "
            "dataset.cache=memory, or objective.class_weight=balanced"
        )
    targets = np.concatenate([np.ravel(batch) for batch, *_ in dataset.read_targets("train", train)])
    classes = (targets > 0.5 if described.kind == "binary" else targets).astype(np.int64)
    numbers = objective.names_of_classes(described)
    counts = np.bincount(classes, minlength=max(numbers.values()) + 1)
    wanted = option if isinstance(option, str) else {numbers[name]: share for name, share in option.items()}
    if not isinstance(wanted, str):
        check_shares(option, wanted, counts)
    drawn = dataset.count_drawn(counts, wanted)
    names = described.names or [str(number) for number in range(len(counts))]
    shown = [f"{many:,} of {name} (of {count:,})" for name, many, count in zip(names, drawn, counts, strict=True)]
    more = f" and {len(shown) - MOST_SHOWN} more" if len(shown) > MOST_SHOWN else ""
    text = f"{KEY}: an epoch has {drawn.sum():,} examples: {', '.join(shown[:MOST_SHOWN])}{more}; "
    order = dataset.ClassOrder(classes, drawn)
    if not plan.dataset.prior_correction:
        return Balance(order, described, f"{text}probabilities are those of the drawn shares")
    shifts = dataset.find_shifts(counts, drawn)
    shifts = [shifts[1] - shifts[0]] if described.kind == "binary" else shifts
    corrected = replace(described, logit_shift=tuple(shifts))
    return Balance(order, corrected, f"{text}probabilities are corrected by log(true share / drawn share)")


def check_shares(given: Any, shares: Mapping[int, float], counts: Any) -> None:
    """Rejects shares that cannot be drawn."""
    missing = [name for name, number in zip(given, shares, strict=True) if not counts[number]]
    others = sum(bool(count) for number, count in enumerate(counts) if number not in shares)
    total = sum(shares.values())
    problem = f"the training split has no example of {missing[0]}" if missing else ""
    if others and total > 1 - 1e-9:
        problem = f"leaves nothing for {others} other class{'es' if others > 1 else ''}; use shares below 1 in total"
    elif not others and abs(total - 1) > 1e-6:
        problem = f"the shares of all classes sum to {total:g}; leave one class out, or let them sum to 1"
    if problem:
        raise ConfigError(f"{KEY}={dict(given)}: {problem}")
