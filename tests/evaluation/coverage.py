"""Counts how many 95 % intervals hold the true value, by simulation: `python -m tests.evaluation.coverage [WORD ...]`.

Each case draws tests of a model whose true figures are known, and makes their intervals as a report does. With words it
runs the cases whose name has one of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special, stats

from scaleflow.evaluation.intervals import Intervals, bound_rates, find_quantile
from scaleflow.evaluation.measures import Classes, measure_classes, measure_one
from scaleflow.evaluation.resampling import Units
from scaleflow.interfaces.estimate import Estimate

Array = np.ndarray[Any, Any]
Estimates = Mapping[str, Estimate]

#: Points of the grid whose weighted figures are the true ones.
GRID_POINTS = 400_001


@dataclass(frozen=True)
class Model:
    """Two classes with normal scores, and the probability of the second class that a model gives.

    Attributes:
        share: of the second class.
        skill: the distance of the means of the scores.
        trust: a factor of the logits; 1: probabilities are right.
        threshold: of the decision; None: the likelier class.
    """

    share: float
    skill: float
    trust: float = 1.0
    threshold: float | None = None

    def read(self, target: Array, scores: Array) -> Classes:
        """Returns the predictions for targets with scores, both [n]."""
        shift = np.log(self.share / (1 - self.share))
        chance = special.expit(self.trust * (self.skill * scores - self.skill**2 / 2 + shift))
        predicted = (chance > (0.5 if self.threshold is None else self.threshold)).astype(np.int64)
        chances = np.stack([1 - chance, chance], axis=1)
        places = np.arange(len(target))
        of_target = chances[places, target]
        rank = 1 + (of_target < 0.5).astype(np.int64)
        confidence, is_answered = chances[places, predicted], np.ones(len(target), bool)
        return Classes(("no", "yes"), places, target, predicted, confidence, of_target, rank, chances, is_answered)

    def find_truth(self) -> dict[str, float]:
        grid = np.linspace(-8, 8, GRID_POINTS)
        density = np.exp(-(grid**2) / 2)
        density /= density.sum()
        target = np.repeat([0, 1], GRID_POINTS)
        weights = np.concatenate([(1 - self.share) * density, self.share * density])
        data = self.read(target, np.concatenate([grid, grid + self.skill]))
        found = list_estimates(data, Intervals(len(target), weights, is_wanted=False))
        return {name: estimate.value for name, estimate in found.items()}


def list_estimates(data: Classes, intervals: Intervals) -> Estimates:
    estimates, rows = measure_classes(data, intervals)
    own = {name: rows[1][name] for name in ("precision", "recall", "f1")}
    return {**estimates, **own}


def draw_units(rows: int, size: int, random: np.random.Generator) -> Units | None:
    """Returns groups with this mean number of rows, of unequal sizes; None for 1."""
    if size == 1:
        return None
    return Units(np.sort(random.integers(rows // size, size=rows)), "group", "")


def draw_classes(
    model: Model, rows: int, random: np.random.Generator, weights: str = "", size: int = 1
) -> tuple[Classes, Intervals]:
    """Draws a test. Weights do not depend on the rows; rows of a group have scores that are alike."""
    target = (random.random(rows) < model.share).astype(np.int64)
    noise = random.normal(size=rows)
    units = draw_units(rows, size, random)
    if units is not None:
        noise = 0.6**0.5 * random.normal(size=rows)[units.numbers] + 0.4**0.5 * noise
    own = None
    if weights == "uniform":
        own = random.uniform(0.5, 2, rows)
    elif weights == "lognormal":
        own = random.lognormal(0, 0.7, rows)
    return model.read(target, noise + model.skill * target), Intervals(rows, own, units)


def draw_errors(kind: str, rows: int, random: np.random.Generator) -> Array:
    if kind == "normal":
        return random.normal(size=rows)
    if kind == "skewed":
        return random.gamma(1.0, size=rows) - 0.5
    errors = random.normal(size=rows)  # and 25 large ones in 60,000
    return errors * np.where(random.random(rows) < 25 / 60_000, 100, 1)


def find_error_truth(kind: str) -> dict[str, float]:
    if kind == "normal":
        return {"mae": (2 / np.pi) ** 0.5, "rmse": 1.0, "r2": 1 - 1 / 4, "bias": 0.0}
    if kind == "skewed":
        mae = float(stats.gamma(1).expect(lambda x: abs(x - 0.5)))
        return {"mae": mae, "rmse": 1.25**0.5, "r2": 1 - 1.25 / 4, "bias": 0.5}
    share = 25 / 60_000
    squares = 1 - share + share * 1e4
    return {"mae": (2 / np.pi) ** 0.5 * (1 + 99 * share), "rmse": squares**0.5, "r2": 1 - squares / 4, "bias": 0.0}


@dataclass
class Coverage:
    """How many intervals of a figure were made, and where the true value was."""

    count: int = 0
    below: int = 0  # the true value is below the interval
    above: int = 0
    width: float = 0.0

    @property
    def share(self) -> float:
        return 1 - (self.below + self.above) / max(1, self.count)


def simulate(
    draw: Callable[[np.random.Generator], Estimates], truth: Mapping[str, float], repeats: int
) -> dict[str, Coverage]:
    """Counts for each figure how many intervals hold its true value. A figure that is not defined does not count."""
    found = {name: Coverage() for name in truth}
    for seed in range(repeats):
        estimates = draw(np.random.default_rng([seed, repeats]))
        for name, true in truth.items():
            estimate = estimates[name]
            if np.isnan(estimate.low):
                continue
            found[name].count += 1
            found[name].below += true < estimate.low - 1e-12
            found[name].above += true > estimate.high + 1e-12
            found[name].width += (estimate.high - estimate.low) / repeats
    return found


def find_exact_coverage(rate: float, rows: int) -> float:
    """Returns the share of intervals of a rate of independent rows that hold it: over all counts, without drawing."""
    spread = 12 * (rows * rate * (1 - rate)) ** 0.5 + 40
    hits = np.arange(max(0, int(rows * rate - spread)), min(rows, int(rows * rate + spread)) + 1)
    lows, highs = bound_rates(hits / rows, np.full(len(hits), float(rows)), find_quantile(0.95))
    chances = stats.binom.pmf(hits, rows, rate)
    return float(chances[(lows <= rate) & (rate <= highs)].sum())


#: By a name: rows, the model, weights, the mean size of groups.
CLASS_CASES: dict[str, tuple[int, Model, str, int]] = {
    "half 300": (300, Model(0.5, 1.5), "", 1),
    "half 100000": (100_000, Model(0.5, 1.5), "", 1),
    "tenth 1000": (1000, Model(0.1, 2.0, threshold=0.3), "", 1),
    "tenth 10000 too sure": (10_000, Model(0.1, 2.0, trust=2.0), "", 1),
    "1e-2 2000": (2000, Model(0.01, 3.0, threshold=0.1), "", 1),
    "1e-3 24000": (24_000, Model(1e-3, 3.0, threshold=0.03), "", 1),
    "24 of 100000": (100_000, Model(24e-5, 4.0, threshold=0.02), "", 1),
    "24 of 100000 weak": (100_000, Model(24e-5, 2.0, threshold=0.003), "", 1),
    "10 of 100000": (100_000, Model(1e-4, 4.0, threshold=0.02), "", 1),
    "100 of a million": (1_000_000, Model(1e-4, 4.0, threshold=0.02), "", 1),
    "uniform weights, tenth 2000": (2000, Model(0.1, 2.0, threshold=0.3), "uniform", 1),
    "lognormal weights, tenth 2000": (2000, Model(0.1, 2.0, threshold=0.3), "lognormal", 1),
    "lognormal weights, 1e-3 50000": (50_000, Model(1e-3, 3.0, threshold=0.03), "lognormal", 1),
    "groups of 20, half 1000": (1000, Model(0.5, 1.5), "", 20),
    "groups of 10, tenth 4000": (4000, Model(0.1, 2.0, threshold=0.3), "", 10),
    "groups of 10, 1e-3 50000": (50_000, Model(1e-3, 3.0, threshold=0.03), "", 10),
    "groups of 10 and weights, 1e-2 20000": (20_000, Model(0.01, 3.0, threshold=0.1), "uniform", 10),
}

#: By a name: the kind of errors, rows, the mean size of groups.
VALUE_CASES: dict[str, tuple[str, int, int]] = {
    "normal 30": ("normal", 30, 1),
    "normal 1000": ("normal", 1000, 1),
    "skewed 200": ("skewed", 200, 1),
    "25 outliers in 60000": ("outliers", 60_000, 1),
    "skewed 2000, groups of 20": ("skewed", 2000, 20),
}

RATE_CASES = [(rate, rows) for rate in (1e-4, 1e-3, 0.01, 0.1, 0.5) for rows in (100, 1000, 10_000, 100_000, 1_000_000)]


def draw_class_estimates(name: str) -> tuple[Callable[[np.random.Generator], Estimates], dict[str, float]]:
    rows, model, weights, size = CLASS_CASES[name]

    def draw(random: np.random.Generator) -> Estimates:
        return list_estimates(*draw_classes(model, rows, random, weights, size))

    return draw, model.find_truth()


def draw_value_estimates(name: str) -> tuple[Callable[[np.random.Generator], Estimates], dict[str, float]]:
    kind, rows, size = VALUE_CASES[name]

    def draw(random: np.random.Generator) -> Estimates:
        units = draw_units(rows, size, random)
        errors, target = draw_errors(kind, rows, random), 2 * random.normal(size=rows)
        if units is not None:
            errors, target = errors[units.numbers], target[units.numbers]
        return measure_one(target, errors, Intervals(rows, units=units))

    return draw, find_error_truth(kind)


def list_cases(words: list[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    for maker, cases in ((draw_class_estimates, CLASS_CASES), (draw_value_estimates, VALUE_CASES)):
        for name in cases:
            if not words or any(word in name for word in words):
                yield name, lambda maker=maker, name=name: maker(name)


def main(repeats: int = 400) -> None:
    words = sys.argv[1:]
    for rate, rows in RATE_CASES if not words or "rates" in words else ():
        print(f"rate {rate:g} of {rows:,} rows: {100 * find_exact_coverage(rate, rows):.1f} %")
    for name, make in list_cases(words):
        began = time.monotonic()
        draw, truth = make()
        found = simulate(draw, truth, repeats)
        print(f"{name} ({(time.monotonic() - began) / repeats:.3f} s each)")
        for metric, each in found.items():
            sides = f"{each.below} below, {each.above} above of {each.count}"
            print(
                f"   {metric:20} {100 * each.share:5.1f} %  true {truth[metric]:.4g}  width {each.width:.3g}  {sides}"
            )


if __name__ == "__main__":
    main()
