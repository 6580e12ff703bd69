"""Validation without held-out rows: each member of an ensemble leaves out one fold, and is evaluated on that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from scaleflow.dataset.reading.division import assign_folds
from scaleflow.errors import ConfigError
from scaleflow.interfaces import AUTO, FOLD, OUT_OF_FOLD, Dataset, DivisionKeys, InputStructure, Rows, Split

if TYPE_CHECKING:
    from scaleflow.dataset.pipeline.rows import ArrayRows

Array = np.ndarray[Any, Any]

RANDOM = Split("random")

#: The fraction that `auto` holds out, if there are no folds.
HELD_OUT = 0.1

#: `auto` uses folds up to this many training examples. Of more, a tenth is enough to choose an epoch by.
MOST_EXAMPLES = 10_000


def choose_validation(
    options: Dataset, inputs: InputStructure, examples: int, folds: int
) -> tuple[str | float | None, int]:
    """Returns the fraction or the split to validate on, and the number of folds, 0 for none.

    Args:
        options: the config group `dataset`.
        inputs: of the dataset.
        examples: of the training split.
        folds: into how many the model can divide them; 0: it has no members that could leave out one.

    Raises:
        ConfigError: for `out_of_fold`, if that is not possible.
    """
    if options.validation not in (AUTO, OUT_OF_FOLD):
        return options.validation, 0
    obstacles = {
        "the model has no members without common weights; use model=tabular with model.shared=by_size": not folds,
        "the dataset has a single input": not isinstance(inputs, Mapping),
        "dataset.augment mixes examples of several folds": options.augment is not None,
        f"dataset.cache={options.cache} keeps no examples in memory": options.cache in ("none", "file"),
        "dataset.shards reads while training": options.shards > 1,
        "dataset.split by time has no folds of which each is later than what a member trains on": (
            options.split.by == "time"
        ),
    }
    obstacle = next((why for why, applies in obstacles.items() if applies), None)
    if options.validation == OUT_OF_FOLD and obstacle is not None:
        raise ConfigError(f"dataset.validation={OUT_OF_FOLD}: {obstacle}; or use dataset.validation={HELD_OUT}")
    if obstacle is None and 2 * folds <= examples and (options.validation == OUT_OF_FOLD or examples <= MOST_EXAMPLES):
        return None, folds
    return HELD_OUT, 0


def number_folds(examples: Rows, folds: int, rule: Split = RANDOM, keys: DivisionKeys | None = None) -> Rows:
    """Returns examples with the number of a fold as a further input; `folds=0`: that of no fold, -1.

    The same rows always get the same folds: a run that begins with the weights of another one (`model.init_from`), and
    with its rows, has members that have not seen their folds there either.
    The folds have nearly the same number of examples, and nearly the same targets; or whole groups of `keys`, if `rule`
    says so.
    """
    arrays = cast("ArrayRows", examples)  # training in folds keeps them in memory
    numbers = np.full(len(arrays), -1, np.int32)
    if folds and keys is not None and rule.by in ("group", "hash"):
        numbers = assign_folds(rule, keys, len(arrays), folds, (0, 2))
    elif folds:
        random = np.random.default_rng([0, 2])
        order = random.permutation(len(arrays))
        if isinstance(arrays.targets, np.ndarray) and arrays.targets[0].size == 1:
            order = order[np.argsort(np.ravel(arrays.targets)[order], kind="stable")]
        drawn = random.permuted(np.tile(np.arange(folds, dtype=np.int32), (-(-len(arrays) // folds), 1)), axis=1)
        numbers[order] = np.ravel(drawn)[: len(arrays)]
    return replace(arrays, inputs={**arrays.inputs, FOLD: numbers})
