"""A sample of the random chains of two commands, and what draws and judges them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.chains.__main__ import Chains, table
from tests.chains.draw import CHANGES, FORMS, SECONDS, draw_case
from tests.chains.oracle import compute_metrics, to_class
from tests.chains.trial import Result

SEED = 1

#: Small chains: each second command, classes, words, blanks and dates that differ.
SAMPLE = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Chains:
    return Chains(tmp_path_factory.mktemp("chains") / "cases", SEED, keeps=False)


@pytest.mark.slow
@pytest.mark.parametrize("number", SAMPLE)
def test_a_chain_gives_the_right_number_or_is_refused_in_words(chains: Chains, number: int) -> None:
    assert chains.try_out(number).wrong == []


def test_a_chain_is_a_function_of_the_seed_and_its_number() -> None:
    assert draw_case(3, 7) == draw_case(3, 7)
    assert draw_case(3, 7) != draw_case(4, 7) != draw_case(4, 8)
    cases = [draw_case(0, number) for number in range(400)]
    assert {case.second for case in cases} == set(SECONDS)
    assert {case.form for case in cases} == set(FORMS)
    assert {case.change for case in cases} == set(CHANGES)
    assert not any(case.must_work and case.must_refuse for case in cases)


def test_every_change_and_form_writes_a_file(tmp_path: Path) -> None:
    sizes = Counter[int]()
    for number in range(60):
        case = draw_case(2, number)
        data = case.make_data()
        changed = CHANGES[case.change].make(data)
        sizes[changed.write(tmp_path / f"{number}").stat().st_size] += 1
        assert len({len(each) for each in changed.to_inputs().values()}) == 1
    assert len(sizes) > 40


def test_metrics_by_hand() -> None:
    found = compute_metrics(np.array([[0.0], [np.log(3)]]), ["no", "no"], ["no", "yes"])
    assert found["loss"] == pytest.approx((np.log(2) + np.log(4)) / 2)
    assert found["accuracy"] == 0.5
    assert compute_metrics(np.array([[1.0], [3.0]]), [0.0, 1.0], None) == {"mae": 1.5}
    assert [to_class(value) for value in ("a", 1, 1.0, 2.5)] == ["a", "1", "1", "2.5"]


def test_the_table_counts_what_is_wrong() -> None:
    result = Result(draw_case(0, 0), outcome="right", wrong=["something"])
    assert table([result], 0).splitlines()[-3].endswith("| 1 | 0 | 0 | 1 |")
