"""Draws each class as often as `dataset.balance` says, and corrects the model's probabilities for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scaleflow.errors import ConfigError
from scaleflow.features.balance.feature import BalanceOptions
from scaleflow.interfaces import Outputs, OutputStructure, Rows
from scaleflow.interfaces.hooks import DrawnExamples, TrainingData, WorkerHook

if TYPE_CHECKING:
    import numpy as np

    from scaleflow.dataset import Splits

    Array = np.ndarray[Any, Any]

KEY = "dataset.balance"

#: Maximum number of classes that a note lists.
MAX_SHOWN = 10


class BalanceClasses(WorkerHook):
    """Draws each class as often as `dataset.balance` says."""

    def draw_examples(self, data: TrainingData) -> DrawnExamples | None:
        options = data.plan.of(BalanceOptions)
        if options.balance is None:
            return None
        return balance_classes(options, data.splits)


def balance_classes(options: BalanceOptions, splits: Splits) -> DrawnExamples:
    """Reads the classes of the training split and decides how often an epoch draws each class.

    All workers read the same classes.

    Raises:
        ConfigError: if examples do not have one class each, if classes are unknown before training, or if the shares of
            classes cannot be drawn.
    """
    import numpy as np

    from scaleflow import objective
    from scaleflow.features.balance.order import ClassOrder, count_drawn, find_shifts

    described = get_single_output(splits.outputs)
    objective.check_classes(described, KEY, options.balance)
    check_rows(splits.train)
    classes = read_classes(splits.train, described)
    numbers = objective.number_classes(described)
    counts = np.bincount(classes, minlength=max(numbers.values()) + 1)
    if isinstance(options.balance, dict):
        shares = {numbers[name]: share for name, share in options.balance.items()}
        check_shares(options.balance, shares, counts)
        drawn = count_drawn(counts, shares)
    else:
        assert options.balance is not None
        drawn = count_drawn(counts, options.balance)

    names = described.names or [str(number) for number in range(len(counts))]
    note = describe_epoch(names, counts, drawn)
    order = ClassOrder(classes, drawn)
    if not options.prior_correction:
        return DrawnExamples(
            order=order, outputs=described, note=f"{note}; probabilities are those of the drawn shares"
        )
    shifts = find_shifts(counts, drawn)
    if described.kind == "binary":  # its single logit is for the second class
        shifts = [shifts[1] - shifts[0]]
    return DrawnExamples(
        order=order,
        outputs=replace(described, logit_shift=tuple(shifts)),
        note=f"{note}; probabilities are corrected by log(true share / drawn share)",
    )


def get_single_output(described: OutputStructure) -> Outputs:
    """Returns the only output of a dataset. Raises ConfigError if examples do not have one class each."""
    if isinstance(described, Mapping):
        has = "several outputs"
    elif described.is_one_class and described.ignore is None:
        return described
    else:
        has = f"{described.kind} targets {described.shape}"
        if described.ignore is not None:
            has += ", some of which are ignored"
    raise ConfigError(f"{KEY}: needs one class of each example, and the dataset has {has}; leave it null")


def check_rows(examples: Rows) -> None:
    """Raises ConfigError if examples are only read during training."""
    if examples.blocks or not examples.is_random_access:
        raise ConfigError(
            f"{KEY}: the classes of examples that are read while training are not known before; use "
            "dataset.cache=memory, or objective.class_weight=balanced"
        )


def read_classes(examples: Rows, described: Outputs) -> Array:
    """Returns the class of each training example, [n] int64."""
    import numpy as np

    from scaleflow import dataset

    targets = np.concatenate([np.ravel(batch) for batch, *_ in dataset.read_targets("train", examples)])
    if described.kind == "binary":
        targets = targets > 0.5
    return targets.astype(np.int64)


def check_shares(shares_by_name: Mapping[str, float], shares: Mapping[int, float], counts: Array) -> None:
    """Raises ConfigError for shares that cannot be drawn.

    Args:
        shares_by_name: shares by class name, for messages.
        shares: the same shares by class number.
        counts: number of examples of each class in the training split.
    """
    missing = [name for name, number in zip(shares_by_name, shares, strict=True) if not counts[number]]
    others = sum(bool(count) for number, count in enumerate(counts) if number not in shares)
    total = sum(shares.values())
    problem = ""
    if others and total > 1 - 1e-9:
        plural = "es" if others > 1 else ""
        problem = f"leaves nothing for {others} other class{plural}; use shares below 1 in total"
    elif not others and abs(total - 1) > 1e-6:
        problem = f"the shares of all classes sum to {total:g}; leave one class out, or let them sum to 1"
    elif missing:
        problem = f"the training split has no example of {missing[0]}"
    if problem:
        raise ConfigError(f"{KEY}={dict(shares_by_name)}: {problem}")


def describe_epoch(names: Sequence[str], counts: Array, drawn: Array) -> str:
    """Returns a note with the number of examples of each class in an epoch and in the training split."""
    shown = [f"{many:,} of {name} (of {count:,})" for name, many, count in zip(names, drawn, counts, strict=True)]
    more = f" and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
    return f"{KEY}: an epoch has {drawn.sum():,} examples: {', '.join(shown[:MAX_SHOWN])}{more}"
