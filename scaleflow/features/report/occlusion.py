"""Finds the parts of pictures and the words of texts that mattered in the worst mistakes, for `evaluation=full`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from scaleflow.features.report.feature import ReportOptions
from scaleflow.interfaces import Outputs, map_named, name_leaves
from scaleflow.interfaces.hooks import KeptPredictions
from scaleflow.worker.kept_predictions import has_pixels

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def explain_mistakes(kept: KeptPredictions) -> dict[int, Any]:
    """Returns what mattered in the pictures or texts of the worst mistakes, by the example's index in the split.

    A part matters as much as covering it lowers the probability of the prediction (occlusion, Zeiler and Fergus 2014).
    After `evaluation.seconds` no further example is explained.

    Returns:
        For a picture [GRID, GRID] shares of 1. For a text a list of (word, share) in order. Empty without classes.
    """
    import numpy as np

    from scaleflow.evaluation.collector import EXAMPLE, choose_form
    from scaleflow.evaluation.outputs import analyse_output

    name, described = next(iter(name_leaves(kept.predictions.outputs).items()))
    key = find_explained_input(kept.reader.inputs)
    if key is None or choose_form(described) not in ("class", "best"):
        return {}
    is_picture = has_pixels(name_leaves(kept.reader.inputs)[key])
    analysis = analyse_output(kept.predictions, name, described)
    worst = analysis.worst[: kept.plan.of(ReportOptions).worst]
    examples = np.sort(kept.predictions.column(EXAMPLE)[analysis.rows[worst]])
    if not len(examples):
        return {}
    raw, _ = kept.reader.read_examples(examples)
    deadline = time.monotonic() + kept.plan.evaluation.seconds
    mattered: dict[int, Any] = {}
    for n, example in enumerate(examples):
        if time.monotonic() > deadline:
            break
        one = map_named(lambda _, values, n=n: values[n : n + 1], raw)  # type: ignore[misc]
        words, variants = occlude(name_leaves(one)[key][0], is_picture)
        if len(variants) > 1:  # otherwise a text without words
            shares = measure_parts(kept, one, key, variants, name, described)
            mattered[int(example)] = shape_shares(words, shares)
    return mattered


def find_explained_input(inputs: Any) -> str | None:
    """Returns the name of the first input that is a picture or a text, or None."""
    for name, described in name_leaves(inputs).items():
        if has_pixels(described) or described.dtype == "string":
            return name
    return None


def measure_parts(
    kept: KeptPredictions, one: Any, key: str, variants: list[Any], name: str, described: Outputs
) -> Array:
    """Returns how much each part of an input mattered for the prediction, [parts], as a share of the largest loss.

    Args:
        one: raw inputs of one example, [1, ...] each.
        key: name of the input. `variants` has its whole value, then a copy without each part.
        name: name of the output.
    """
    import numpy as np

    from scaleflow.serving.prediction_columns import compute_probabilities

    predict = kept.predict
    assert predict is not None
    is_text = isinstance(variants[0], str)

    def repeat(input_name: str, values: Array) -> Array:
        if input_name == key:
            return np.array(variants, object if is_text else values.dtype)
        return np.repeat(values, len(variants), axis=0)

    outputs = predict(kept.reader.preprocess(map_named(repeat, one)))
    chances = compute_probabilities(described, name_leaves(outputs)[name])
    assert chances is not None
    predicted = chances[0].argmax()
    losses = np.maximum(0, chances[0, predicted] - chances[1:, predicted])
    return np.asarray(losses / max(float(losses.max()), 1e-12))


def shape_shares(words: list[str], shares: Array) -> Any:
    """Returns the shares with the words of a text, or as the grid of a picture."""
    from scaleflow.serving.reasons import GRID

    if words:
        return list(zip(words, shares.tolist(), strict=True))
    return shares.reshape(GRID, GRID)


def occlude(value: Any, is_picture: bool) -> tuple[list[str], list[Any]]:
    """Returns a text's first words (none for a picture), and the value followed by a copy without each part."""
    from scaleflow.serving.cells import decode_text
    from scaleflow.serving.reasons import GRID, MAX_WORDS, cover_part, drop_word

    if is_picture:
        return [], [value, *(cover_part(value, place) for place in range(GRID**2))]
    text = decode_text(value)
    words = text.split()[:MAX_WORDS]
    return words, [text, *(drop_word(text, n) for n in range(len(words)))]
