"""What the model uses: permutation importance of columns, and occlusion of pictures and texts.

These need the model, so the worker measures them, within `evaluation.seconds`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scaleflow.interfaces import Inputs, Outputs, map_named, name_leaves
from scaleflow.worker.kept_predictions import KeptSplit, has_pixels

if TYPE_CHECKING:
    import numpy as np

    from scaleflow.evaluation.predictions import Predictions
    from scaleflow.training import Engine

    Array = np.ndarray[Any, Any]

#: How often each column is permuted, if there is time.
REPEATS = 5

#: The most values of an input without columns that count as columns.
MOST_VALUES = 64

#: The sides of the grid of a picture, and the most words of a text, that are occluded one by one.
GRID, MOST_WORDS = 8, 40

#: A column is unused if the whole interval of its importance is within this share of what a constant loses.
LEAST = 0.01


def list_permuted(inputs: Any) -> dict[str, tuple[str, int | None]]:
    """Returns the columns of a table by their names: the input, and the place in it; empty if there is no table."""
    named: Mapping[str, Inputs] = name_leaves(inputs)
    if all(not each.shape for each in named.values()) and len(named) > 1:
        return {name: (name, None) for name in named}
    if len(named) == 1 and len(next(iter(named.values())).shape) == 1:
        ((name, described),) = named.items()
        if described.shape[0] <= MOST_VALUES and described.vocabulary is None and described.dtype != "string":
            return {f"{name or 'input'}[{n}]": (name, n) for n in range(described.shape[0])}
    return {}


def measure_columns(
    engine: Engine, kept: KeptSplit, predictions: Predictions, most: int, seconds: float
) -> list[dict[str, Any]]:
    """Returns a row for each column of a table, the most important first; empty if it is none.

    Args:
        engine: has the model.
        kept: the split.
        predictions: of it.
        most: the examples to use; 0: nothing is measured.
        seconds: after which no further column is permuted.
    """
    import numpy as np

    from scaleflow.evaluation.collector import EXAMPLE, choose_form
    from scaleflow.evaluation.one_column import score_column
    from scaleflow.evaluation.resampling import Figure, Resamples

    columns = list_permuted(kept.reader.inputs)
    name, described = next(iter(name_leaves(kept.outputs).items()))
    if not columns or not most or choose_form(described) == "positions":
        return []
    places = predictions.column(EXAMPLE)
    places = places if len(places) <= most else np.sort(np.random.default_rng(0).choice(places, most, replace=False))
    raw, targets = kept.reader.read_examples(places)
    target = name_leaves(targets)[name]
    if described.ignore is not None:
        rows = np.flatnonzero((target != described.ignore).reshape(len(target), -1).all(axis=1))
        raw, target = map_named(lambda _, values: values[rows], raw), target[rows]
    inputs = kept.reader.preprocess(raw)
    deadline = time.monotonic() + seconds

    def score(changed: Any) -> Array:
        return score_outputs(described, target, name_leaves(engine.predict(changed))[name])

    whole, random = score(inputs), np.random.default_rng(1)
    losses: dict[str, list[Array]] = {column: [] for column in columns}
    for _ in range(REPEATS):
        for column, (key, place) in columns.items():
            if time.monotonic() < deadline:
                losses[column].append(whole - score(permute(inputs, key, place, random.permutation(len(target)))))
    resamples, is_class = Resamples(len(target), 200), described.is_one_class
    measure, constant_loss = measure_constant(described, target)
    found = []
    for column, (key, place) in columns.items():
        importance = Figure(np.nan) if not losses[column] else resamples.mean(np.mean(losses[column], axis=0))
        row: dict[str, Any] = {"column": column, "importance": importance, "measure": measure}
        row["is_useless"] = max(-importance.low, importance.high) < LEAST * constant_loss
        if is_class or target.size == len(target):
            values, flat = name_leaves(raw)[key], target.reshape(len(target))
            answers = flat.astype(np.int64) if is_class else flat.astype(np.float64)
            row["alone"], constant = score_column(values if place is None else values[:, place], answers, is_class)
            gain = row["alone"] - constant if is_class else constant - row["alone"]
            row["tells"] = bool(gain > max(0.01 if is_class else 0.0, 0.03 * abs(constant)))
        found.append(row)
    return sorted(found, key=lambda row: -np.nan_to_num(row["importance"].value, nan=-np.inf))


def score_outputs(described: Outputs, target: Array, outputs: Array) -> Array:
    """Returns how good outputs are, [n]: minus the log loss, the mean over labels, or minus the absolute error.

    Not whether they are right: if one class is rare, a useful model may always predict the other one.
    """
    import numpy as np

    flat, wanted = outputs.astype(np.float64).reshape(len(target), -1), target.reshape(len(target), -1)
    if described.kind == "classification":
        peak = flat.max(axis=1)
        sums = peak + np.log(np.exp(flat - peak[:, None]).sum(axis=1))
        return np.asarray(flat[np.arange(len(flat)), wanted[:, 0].astype(np.int64)] - sums)
    losses = (
        np.abs(flat - wanted)
        if described.kind == "regression"
        else np.logaddexp(0, np.where(wanted > 0.5, -flat, flat))
    )
    return np.asarray(-losses.mean(axis=1))


def measure_constant(described: Outputs, target: Array) -> tuple[str, float]:
    """Returns the measure of an importance, and how much of it the best constant loses."""
    import numpy as np

    flat = target.reshape(len(target), -1)
    if described.kind == "regression":
        return "mae", float(np.abs(flat - np.median(flat, axis=0)).mean())
    if described.kind == "classification":
        shares = np.unique(flat, return_counts=True)[1] / len(flat)
        return "log loss", float(-(shares * np.log(shares)).sum())
    shares = np.clip((flat > 0.5).mean(axis=0), 1e-12, 1 - 1e-12)
    return "log loss", float(-(shares * np.log(shares) + (1 - shares) * np.log(1 - shares)).mean())


def permute(inputs: Any, key: str, place: int | None, order: Array) -> Any:
    """Returns inputs with one column in another order."""

    def change(name: str, values: Any) -> Any:
        if name != key:
            return values
        if place is None:
            return values[order]
        changed = values.copy()
        changed[:, place] = values[order, place]
        return changed

    return map_named(change, inputs)


# ---------------------------------------------------------------------------------------------
# Occlusion
# ---------------------------------------------------------------------------------------------


def explain_mistakes(
    engine: Engine, kept: KeptSplit, predictions: Predictions, most: int, seconds: float
) -> dict[int, Any]:
    """Returns what mattered in the pictures or texts of the worst mistakes, by the index of the example.

    A part matters as much as its loss takes from the probability of the prediction (occlusion, Zeiler and Fergus 2014).

    Args:
        engine: has the model.
        kept: the split.
        predictions: of it.
        most: the number of mistakes.
        seconds: after which no further example is explained.

    Returns:
        For a picture [GRID, GRID] shares of 1; for a text (word, share) in its order. Empty if there are no classes.
    """
    import numpy as np

    from scaleflow.evaluation.collector import EXAMPLE, choose_form
    from scaleflow.evaluation.outputs import analyse_output

    name, described = next(iter(name_leaves(kept.outputs).items()))
    inputs = name_leaves(kept.reader.inputs)
    key = next((n for n, each in inputs.items() if has_pixels(each) or each.dtype == "string"), None)
    if key is None or choose_form(described) not in ("class", "best"):
        return {}
    analysis = analyse_output(predictions, name, described, 0)
    examples = np.sort(predictions.column(EXAMPLE)[analysis.rows[analysis.worst[:most]]])
    raw = kept.reader.read_examples(examples)[0] if len(examples) else {}
    deadline, found = time.monotonic() + seconds, {}
    for n, example in enumerate(examples):
        if time.monotonic() > deadline:
            break
        value = name_leaves(raw)[key][n]
        parts, variants = occlude_picture(value) if has_pixels(inputs[key]) else occlude_text(value)
        if not parts and not has_pixels(inputs[key]):  # a text without words
            continue
        repeated = {
            each: np.repeat(values[n : n + 1], len(variants), axis=0) for each, values in name_leaves(raw).items()
        }
        repeated[key] = np.array(variants, object if parts else value.dtype)
        batch = kept.reader.preprocess(map_named(functools.partial(take_named, repeated), raw))
        chances = compute_chances(name_leaves(engine.predict(batch))[name])
        losses = np.maximum(0, chances[0].max() - chances[1:, chances[0].argmax()])
        shares = losses / max(float(losses.max()), 1e-12)
        found[int(example)] = list(zip(parts, shares.tolist(), strict=True)) if parts else shares.reshape(GRID, GRID)
    return found


def take_named(values: Mapping[str, Any], name: str, _: Any) -> Any:
    return values[name]


def occlude_picture(picture: Array) -> tuple[None, list[Array]]:
    """Returns a picture, and copies of it in each of which a part of a grid has the mean colour."""
    import numpy as np

    mean = picture.mean(axis=(0, 1))
    edges = [np.linspace(0, side, GRID + 1).astype(int) for side in picture.shape[:2]]
    variants = [picture]
    for down in range(GRID):
        for across in range(GRID):
            changed = picture.copy()
            changed[edges[0][down] : edges[0][down + 1], edges[1][across] : edges[1][across + 1]] = mean
            variants.append(changed)
    return None, variants


def occlude_text(text: Any) -> tuple[list[str], list[Any]]:
    """Returns the first words of a text; and the text, and copies of it that each lack a word."""
    whole = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    words = whole.split()[:MOST_WORDS]
    rest = whole.split()[MOST_WORDS:]
    return words, [whole, *(" ".join([*words[:n], *words[n + 1 :], *rest]) for n in range(len(words)))]


def compute_chances(outputs: Array) -> Array:
    """Returns the probabilities of classes, [n, classes], for logits."""
    import numpy as np

    from scaleflow.evaluation.columns import compute_sigmoid, compute_softmax

    if outputs.ndim == 2 and outputs.shape[1] > 1:
        return compute_softmax(outputs)
    chance = compute_sigmoid(outputs).reshape(len(outputs))
    return np.stack([1 - chance, chance], axis=1)
