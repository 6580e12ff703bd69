"""Words of a split that the training split does not have."""

from __future__ import annotations

import numpy as np
import pytest

from scaleflow.dataset.column_kinds import TEXT
from scaleflow.dataset.schema import SplitSample
from scaleflow.features.checks.rules import find_unknown_words, find_words


def make_split(texts: list[str]) -> SplitSample:
    return SplitSample({"note": np.array(texts, object)}, {"note": TEXT}, {}, len(texts))


def draw_texts(seed: int, count: int, words: int, form: str = "word{}") -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(form.format(each) for each in random.integers(words, size=8)) for _ in range(count)]


def test_words_of_another_language_are_found() -> None:
    splits = {
        "train": make_split(draw_texts(0, 200, 400)),
        "validation": make_split(draw_texts(1, 50, 400)),
        "test": make_split(draw_texts(2, 50, 400, "mot{}")),
    }
    (found,) = find_unknown_words(splits)
    assert found.text == "note: the training split does not have 100% of the words of the split test"


@pytest.mark.parametrize("words", [50, 1000, 1_000_000])
def test_random_splits_have_no_such_words(words: int) -> None:
    """Also of texts that share few words anyway, such as names."""
    for seed in range(20):
        texts = draw_texts(seed, 120, words)
        assert not list(find_unknown_words({"train": make_split(texts[:90]), "test": make_split(texts[90:])}))
    assert not list(find_unknown_words({"train": make_split(texts)}))
    assert not list(find_unknown_words({"train": make_split(texts), "test": make_split(["", ""])}))


def test_words_are_split_as_the_model_splits_them() -> None:
    assert find_words("КИНО, «Déjà» 映画館") == ["кино", "déjà", "映", "画", "館"]
