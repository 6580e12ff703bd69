"""How well a single column tells the target."""

from __future__ import annotations

import numpy as np

from scaleflow.evaluation.single_column import score_column


def test_a_column_that_tells_the_target_is_told_from_one_that_does_not() -> None:
    random = np.random.default_rng(0)
    target = random.integers(3, size=600)
    noise = random.normal(size=600)
    word = np.array(["x", "y", "z"], object)[target]
    for column, is_good in ((target + 0.01 * noise, True), (word, True), (noise, False), (np.full(600, np.nan), False)):
        score, constant = score_column(column, target, is_class=True)
        assert (score > 0.95) == is_good
        assert constant < 0.5
    price = 3 * noise + 100
    error, constant = score_column(noise, price, is_class=False)
    assert error < 0.2 * constant
    assert np.isnan(score_column(noise[:20], price[:20], is_class=False)[0])
    is_wrong = random.random(600) < 0.7  # and does not count
    for is_class, answers in ((True, np.where(is_wrong, 0, target)), (False, np.where(is_wrong, 0, 9.0 * target))):
        score, constant = score_column(word, answers, is_class, (~is_wrong).astype(float))
        assert (score > 0.95, constant < 0.5) == (True, True) if is_class else score < 0.05 * constant
