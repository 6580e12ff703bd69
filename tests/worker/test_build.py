"""What the worker refuses before it builds a model."""

from __future__ import annotations

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Batching, Training
from scaleflow.worker.data import check_batch_size


def test_a_batch_of_which_most_would_be_padding_is_refused() -> None:
    check_batch_size(Training(batch_size=1024), Batching(1024, 2, 2), 40)
    check_batch_size(Training(global_batch_size=8192), Batching(4096, 1, 2), 4096)
    with pytest.raises(ConfigError, match=r"training.batch_size=4096: .* 8,192 examples, .* has 4,095; use a"):
        check_batch_size(Training(batch_size=4096), Batching(4096, 1, 2), 4095)
    with pytest.raises(ConfigError, match=r"training.global_batch_size=1000000007: .* has 38; use a smaller one"):
        check_batch_size(Training(global_batch_size=1000000007), Batching(1000000007, 1, 1), 38)
