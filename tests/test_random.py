"""A sample of the random command lines, and what draws and judges them."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.random.__main__ import Cases, table
from tests.random.draw import STRATEGIES, drawn
from tests.random.judge import differences, wrong_refusal
from tests.random.trial import Result

SEED = 1

#: Small cases: comparisons, interruptions, a store, wrong words. `make random` tries many.
SAMPLE = {14: "trained", 18: "refused", 19: "refused", 22: "refused", 35: "trained", 39: "trained", 58: "trained"}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("random") / "cases", SEED, keeps=False)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "outcome"), SAMPLE.items())
def test_a_case_trains_or_is_refused_in_words(cases: Cases, number: int, outcome: str) -> None:
    result = cases.try_out(number)
    assert (result.wrong, result.outcome) == ([], outcome)
    assert result.compared == (result.case.plain is not None and outcome == "trained")


def test_a_case_is_a_function_of_the_seed_and_its_number() -> None:
    assert drawn(3, 7) == drawn(3, 7)
    assert drawn(3, 7) != drawn(4, 7) != drawn(4, 8)


def test_every_strategy_is_drawn_and_most_words_are_right() -> None:
    cases = [drawn(0, number) for number in range(300)]
    assert {case.strategy for case in cases} == set(STRATEGIES)
    assert 0 < sum(bool(case.wrong) for case in cases) < 60
    assert sum(case.plain is not None for case in cases) > 100
    assert sum(bool(case.stop) for case in cases) == 150
    assert len(Counter(case.model for case in cases)) > 40


@pytest.mark.parametrize(
    "said",
    [
        "scaleflow: ValueError: no such shape; the traceback is in run/worker-0.log",
        "scaleflow: model=cnn: no such shape; the traceback is in run/worker-0.log",
        "scaleflow: keras.errors.SomeException came up",
        "Killed",
        "scaleflow: a\nb\nc\nd",
    ],
)
def test_a_refusal_that_is_none_is_found(said: str) -> None:
    assert list(wrong_refusal(said))


def test_a_refusal_in_words_is_none_too_many() -> None:
    assert list(wrong_refusal("scaleflow: strategy=miror: there is no such option; did you mean mirrored?")) == []


def test_differences_are_found_and_small_ones_are_none() -> None:
    one = {("train/loss", 1): 1.0, ("val/loss", 2): 2.0, ("train/accuracy", 1): 0.5}
    assert list(differences(one, one, (0.0, 0.0), only_losses=False)) == []
    assert list(differences(one, {**one, ("train/loss", 1): 1.00001}, (1e-4, 0.0), only_losses=True)) == []
    assert list(differences(one, {**one, ("train/loss", 1): 1.1}, (1e-4, 0.0), only_losses=True))
    assert list(differences(one, {**one, ("train/accuracy", 1): 0.6}, (1e-4, 0.0), only_losses=False))
    assert list(differences(one, {key: one[key] for key in list(one)[:1]}, (1e-4, 0.0), only_losses=True))
    assert list(differences(one, {**one, ("train/loss", 1): float("nan")}, (1e-4, 0.0), only_losses=True))


def test_the_table_counts_what_is_wrong() -> None:
    result = Result(drawn(0, 0), outcome="trained", wrong=["something"])
    assert table([result], 0).splitlines()[-3].endswith("| 1 | 1 | 0 | 0 | 0 | 1 |")
