"""Prompts of a table or a folder are continued, each with random numbers of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.interfaces.sampling import Sampling


class FakeModel:
    """Continues a prompt with the seed that it is given, and knows no question marks."""

    def encode(self, text: str) -> str:
        if "?" in text:
            raise ConfigError("the run does not know '?'")
        return text

    def generate(self, tokens: str, sampling: Sampling) -> Iterator[str]:
        yield tokens
        yield f" {sampling.seed}"


def continue_each() -> tuple[list[list[str | None]], str]:
    from scaleflow.features.predict.chunks import PromptModel

    found = []
    for seed in (1, 1, 2):
        model = PromptModel(FakeModel(), Sampling(seed=seed))  # type: ignore[arg-type]
        prompts = np.array(["x", "x", "x", "?"], object)
        found.append(model.predict({"": prompts}, lambda row: f"row {row}")[""].tolist())
    return found, model.explain_failure(3)


def test_a_row_s_text_follows_from_its_name_and_the_seed(isolated: Callable[..., Any]) -> None:
    (first, again, other), reason = isolated(continue_each)
    assert first == again
    assert len({*first, *other}) == 7, "six texts, and none for the prompt that is not known"
    assert (first[3], reason) == (None, "the run does not know '?'")
