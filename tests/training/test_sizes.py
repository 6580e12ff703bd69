from __future__ import annotations

import pytest

from scaleflow.interfaces import BY_SIZE, Training
from scaleflow.training.sizes import choose_length_by_size


@pytest.mark.parametrize(
    ("examples", "epochs", "batch"),
    [(1, 64, 32), (500, 64, 32), (2_000, 64, 128), (10_000, 64, 256), (40_000, 32, 1024), (10_000_000, 8, 1024)],
)
def test_epochs_and_batch_follow_from_the_number_of_examples(examples: int, epochs: int, batch: int) -> None:
    filled = choose_length_by_size(Training(epochs=BY_SIZE, batch_size=BY_SIZE), examples, 1)
    assert (filled.epochs, filled.global_batch_size) == (epochs, batch)


def test_what_is_typed_is_kept_and_the_batch_is_shared_equally() -> None:
    typed = Training(epochs=3, batch_size=10)
    assert choose_length_by_size(typed, 500, 3) == typed
    assert choose_length_by_size(Training(epochs=3, batch_size=BY_SIZE), 500, 3).global_batch_size == 33
    whole = Training(epochs=3, batch_size=BY_SIZE, global_batch_size=60)
    assert choose_length_by_size(whole, 500, 3).global_batch_size == 60
