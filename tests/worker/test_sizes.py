"""What is recorded of `by_size` gives the same run if it is typed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from scaleflow.interfaces import Batching, Plan


def fill_and_type(plan: Plan, typed: Plan) -> list[Any]:
    """In a child, of 4,000 examples on two replicas: the batches as chosen and as typed, and what is recorded."""
    from dataclasses import replace

    from scaleflow.config.plan import make_batching
    from scaleflow.worker.sizes import fill_sizes

    found: list[Any] = []
    batching = Batching(256, plan.training.accumulate, 2)
    data = SimpleNamespace(
        splits=SimpleNamespace(train=range(4000), folds=0), runtime=SimpleNamespace(batching=batching)
    )
    data.divide = lambda options: data
    filled, _, recorded = fill_sizes(plan, cast(Any, data))
    again = replace(typed.training, batch_size=recorded["training.batch_size"])
    for options in (filled.training, again):
        each = make_batching(options, 2)
        found.append((each.global_size, each.batch_size))
    return [*found, recorded["training.batch_size"]]


def test_a_batch_by_size_is_recorded_as_it_is_typed(isolated: Callable[..., Any], plan: Callable[..., Plan]) -> None:
    for accumulate in (1, 2):
        words = ("tracking=none", f"training.accumulate={accumulate}")
        chosen, typed, recorded = isolated(fill_and_type, plan(*words, "training.batch_size=by_size"), plan(*words))
        assert chosen == typed
        assert recorded == 256 // 2 // accumulate
