"""The options for drawing the tokens of a generated text."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from scaleflow.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """The options for drawing the tokens of a generated text."""

    tokens: int = 100  # the number of tokens. At least 1.
    #: Divides the logits. 0 always takes the most probable token; 1 draws from the model's distribution.
    temperature: float = 1.0
    top_k: int | None = None  # draws only from this many of the most probable tokens. At least 1. None: from all.
    #: draws only from the most probable tokens that together have this probability. Above 0, at most 1.
    top_p: float = 1.0
    seed: int = 0  # the same seed draws the same tokens. At least 0.

    def check(self, name: Callable[[str], str] = "{}=".format) -> None:
        """Raises ConfigError if a value is out of range. `name` formats the name of the value at the start of the
        message.
        """
        whole = "expected a whole number, at least"
        number = "expected a number"
        for key, value, least, rule in (
            ("tokens", self.tokens, 1, f"{whole} 1"),
            ("temperature", self.temperature, 0, f"{number}, at least 0"),
            ("top_k", self.top_k, 1, f"{whole} 1"),
            ("top_p", self.top_p, 0, f"{number} above 0, at most 1"),
            ("seed", self.seed, 0, f"{whole} 0"),
        ):
            is_whole = value is None or "whole" not in rule or type(value) is int
            is_in_range = value is None or (math.isfinite(value) and value >= least)
            if key == "top_p":
                is_in_range = 0 < self.top_p <= 1
            if not (is_whole and is_in_range):
                raise ConfigError(f"{name(key)}{value}: {rule}")
