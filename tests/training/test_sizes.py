from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scaleflow.interfaces import BY_SIZE, Training


def choose_each(cases: list[tuple[Training, int, int]]) -> list[Training]:
    from scaleflow.training.sizes import choose_length_by_size

    return [choose_length_by_size(*case) for case in cases]


def test_epochs_and_batch_follow_from_the_number_of_examples(isolated: Callable[..., Any]) -> None:
    counts = (1, 500, 2_000, 10_000, 40_000, 10_000_000)
    filled = isolated(choose_each, [(Training(epochs=BY_SIZE, batch_size=BY_SIZE), count, 1) for count in counts])
    assert [each.epochs for each in filled] == [64, 64, 64, 64, 32, 8]
    assert [each.global_batch_size for each in filled] == [32, 32, 128, 256, 1024, 1024]


def test_what_is_typed_is_kept_and_the_batch_is_shared_equally(isolated: Callable[..., Any]) -> None:
    typed, by_size = Training(epochs=3, batch_size=10), Training(epochs=3, batch_size=BY_SIZE)
    whole = Training(epochs=3, batch_size=BY_SIZE, global_batch_size=60)
    kept, shared, given = isolated(choose_each, [(each, 500, 3) for each in (typed, by_size, whole)])
    assert kept == typed
    assert shared.global_batch_size == 33
    assert given.global_batch_size == 60
