"""The rules by which trials choose what they try and what they find."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from scaleflow.features.search.trial_kinds import RateTest
from scaleflow.features.search.trial_rules import (
    BatchMeasurement,
    Divergence,
    choose_batch_size,
    choose_next_size,
    choose_rate,
    explain_end,
    fits_twice,
    limit_batch_size,
    list_close_sizes,
    take_faster,
)


def search(rate_of: Callable[[int], float | None], most: int, multiple: int = 1) -> list[BatchMeasurement]:
    trials: list[BatchMeasurement] = []
    while (size := choose_next_size(trials, multiple, most)) is not None:
        trials.append(BatchMeasurement(size, rate_of(size)))
        assert len(trials) < 20
    return trials


def sizes(trials: list[BatchMeasurement]) -> list[int]:
    return [trial.batch_size for trial in trials]


def test_sizes_double_until_three_of_them_are_not_faster() -> None:
    trials = search(lambda size: min(size, 64) * 10.0, most=4096)
    assert sizes(trials) == [8, 16, 32, 64, 128, 256, 512]
    assert choose_batch_size(trials) == (trials[3], "the fastest of 7, 640 examples/s")
    assert explain_end(trials, trials[3], 4096) == ""


def test_a_small_gain_and_two_slow_measurements_do_not_end_the_search() -> None:
    trials = search(lambda size: 100.0 if size in (128, 256) else 100 + size / 100, most=4096)
    assert sizes(trials)[-1] == 4096
    chosen, _ = choose_batch_size(trials) or (None, "")
    assert chosen == trials[-1]


def test_a_smaller_size_is_chosen_only_if_it_is_as_fast_within_a_percent() -> None:
    rates = {8: 50.0, 16: 98.0, 32: 99.0, 64: 100.0, 128: 96.0}
    trials = [BatchMeasurement(size, rate) for size, rate in rates.items()]
    chosen, reason = choose_batch_size(trials) or (None, "")
    assert chosen == trials[2]
    assert reason == "the smallest of 5 that is fast enough: 99 examples/s, 99% of the fastest, 64"


def test_close_sizes_are_measured_again_and_the_faster_result_counts() -> None:
    trials = [
        BatchMeasurement(8, 50.0),
        BatchMeasurement(16, 90.0),
        BatchMeasurement(32, 100.0),
        BatchMeasurement(64, None),
    ]
    assert list_close_sizes(trials) == [32, 16]
    assert list_close_sizes(trials[:2]) == []
    faster = take_faster(trials, BatchMeasurement(16, 110.0))
    assert [trial.rate for trial in faster] == [50.0, 110.0, 100.0, None]
    assert list_close_sizes(faster) == [32, 16]
    assert take_faster(faster, BatchMeasurement(32, 99.0)) == faster
    assert list_close_sizes(take_faster(faster, BatchMeasurement(16, 120.0))) == []  # 32 is no longer close


def test_a_batch_that_does_not_fit_ends_the_search() -> None:
    trials = search(lambda size: None if size > 40 else size, most=4096)
    assert sizes(trials) == [8, 16, 32, 64]
    assert "does not fit" in explain_end(trials, trials[2], 4096)
    smaller = search(lambda size: None if size > 2 else size, most=4096)
    assert sizes(smaller) == [8, 4, 2]
    assert choose_batch_size(smaller) == (smaller[2], "the fastest of 1, 2 examples/s")
    assert sizes(search(lambda size: None, most=4096)) == [8, 4, 2, 1]
    assert choose_batch_size([BatchMeasurement(1, None)]) is None
    assert choose_next_size([BatchMeasurement(8, 1.0, may_double=False)], 1, 4096) is None
    diverged = [BatchMeasurement(8, 1.0), BatchMeasurement(16, None, problem="the loss is not finite")]
    assert choose_next_size(diverged, 1, 4096) is None
    assert explain_end(diverged, diverged[0], 4096) == (
        "; training.batch_size=16 cannot be used: the loss is not finite"
    )


@pytest.mark.parametrize(
    ("multiple", "most", "expected"), [(3, 40, [12, 24]), (16, 20, [16]), (1, 5, [4]), (1, 1, [1])]
)
def test_sizes_are_multiples_within_the_limit(multiple: int, most: int, expected: list[int]) -> None:
    trials = search(float, most, multiple)
    assert sizes(trials) == expected
    assert "too few steps" in explain_end(trials, trials[-1], most)


def test_an_epoch_keeps_its_steps() -> None:
    assert limit_batch_size(1293, 1, None) == 161
    assert limit_batch_size(1293, 4, 100) == 3
    assert limit_batch_size(5, 4, None) == 1


def test_memory_is_left_for_twice_the_batch() -> None:
    assert fits_twice(before=100, peak=180, now=120, available=175)  # 80 more now, 160 for twice that, 20 are taken
    assert not fits_twice(before=100, peak=180, now=120, available=174)


def curve(test: RateTest, least_at: float) -> tuple[list[float], list[float]]:
    """The rates, and losses that fall until one of them and rise after it, with noise."""
    rates = [test.rate_at(step) for step in range(test.steps)]
    return rates, [abs(math.log10(rate / least_at)) + 1 + 0.1 * math.sin(97.0 * at) for at, rate in enumerate(rates)]


def test_the_rate_is_a_tenth_of_the_one_with_the_least_loss() -> None:
    test = RateTest()
    rates, losses = curve(test, 0.05)
    assert (rates[0], rates[-1]) == (test.low, pytest.approx(test.high))
    found, reason = choose_rate(rates, losses, test.steps) or (0.0, "")
    assert 0.004 <= found <= 0.006
    assert found == float(f"{found:.1e}")
    assert "a tenth" in reason
    assert "--high" not in reason
    rates, losses = curve(test, 100.0)
    _, reason = choose_rate(rates, losses, test.steps) or (0.0, "")
    assert "--high" in reason
    assert choose_rate(rates[:100], losses[:100], test.steps) is not None
    assert choose_rate(rates, losses[::-1], test.steps) is None
    assert choose_rate(rates, [2.0] * test.steps, test.steps) is None
    assert choose_rate(rates, [0.0] * test.steps, test.steps) is None
    assert choose_rate([], [], test.steps) is None


@pytest.mark.parametrize("deviation", [0.02, 0.2])
def test_noise_alone_gives_no_rate(deviation: float) -> None:
    test = RateTest()
    rates = [test.rate_at(step) for step in range(test.steps)]
    random = Random(0)
    found = [
        choose_rate(rates, [2.3 + random.gauss(0.0, deviation) for _ in rates], test.steps) is not None
        for _ in range(100)
    ]
    assert sum(found) <= 5


def test_a_loss_diverges_at_four_times_its_minimum() -> None:
    watched = Divergence()
    assert not any(watched.add(loss) for loss in (2.0, 1.5, 1.0, 1.0, 8.0))
    assert [watched.add(30.0) for _ in range(3)][-1]
    assert Divergence().add(math.nan)
    negative = Divergence()
    assert not any(negative.add(loss) for loss in (-1.0, -2.0, 0.5))
