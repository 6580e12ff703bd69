"""Embedding tables are updated by rows, with the losses and weights of updates of the whole table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.strategy.test_parameter_server import IN_SHARDS
from tests.training.fake_engine import far, follow_each, run_apart, run_each

IDS = "tests.training.ids.Ids"

ROWS, WIDTH = 4000, 8
#: A global batch of 32 examples with 4 row numbers each; 8 steps make an epoch.
BASE = (
    "hardware=cpu", "tracking=none", f"dataset._target_={IDS}", "dataset.validation=null", "model=text",
    f"model.embedding={WIDTH}", "model.units=8", "training.global_batch_size=32", "optimizer.learning_rate=0.3",
)  # fmt: skip
BY_ROWS = {
    "SGD": ("optimizer=sgd", "optimizer.momentum=0.0"),
    "Adagrad": ("optimizer=adagrad",),
    "LazyAdam": ("optimizer=lazy_adam",),
}
TWO = ("strategy=mirrored", "hardware.logical_devices=2")
CASES = [
    ("SGD", "strategy=one_device", "training.accumulate=2"),
    ("Adagrad", "strategy=one_device", "training.clip_norm=0.05"),
    ("Adagrad", *TWO, "training.accumulate=2", "training.clip_norm=0.05"),
    ("Adagrad", "strategy=one_device", "optimizer.rate_factors={words: 0.1}"),
    ("LazyAdam", "strategy=one_device", "optimizer.rate_factors={words: 0.1}"),
    ("LazyAdam", *TWO, "training.accumulate=2", "training.clip_norm=0.05"),
    pytest.param(
        ("Adagrad", *TWO, "training.accumulate=2", "model._target_=tests.training.ids.build_normalized"),
        marks=pytest.mark.slow,
    ),
    pytest.param(("SGD", *TWO, "precision=mixed_float16", "training.clip_norm=0.05"), marks=pytest.mark.slow),
    pytest.param(
        ("Adagrad", "strategy=one_device", "hardware.xla=true", "training.accumulate=2"), marks=pytest.mark.slow
    ),
    pytest.param(("Adagrad", *TWO, "hardware.xla=true", "training.accumulate=2"), marks=pytest.mark.slow),
]
STEPS = 12


def dense(words: tuple[str, ...], name: str) -> tuple[str, ...]:
    return (*words, f"optimizer._target_=tests.training.ids.Dense{name}")


def resume(plan: Any) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """The weights after an epoch in one go, and after one whose second half continues from a saved state."""
    from scaleflow.worker.build import build_training
    from tests.training.fake_engine import ignore, weights

    whole, half, rest = (build_training(plan, ignore) for _ in range(3))
    for built, first, last in ((whole, 0, 8), (half, 0, 4), (rest, 4, 8)):
        if built is rest:
            rest.engine.restore(half.engine.read_state())
        built.engine.train(built.feeds.train, built.feeds.train.open(0, first), 0, first, last - first, first)
    return weights(whole.engine), weights(rest.engine)


def notes_of(plan: Any) -> list[str]:
    from scaleflow.interfaces.events import Note
    from scaleflow.worker.build import build_training

    notes: list[str] = []
    build_training(plan, lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    return notes


def graphs_of_steps(plans: Sequence[Any]) -> list[list[list[int]]]:
    return [graph_of_a_step(plan) for plan in plans]


def graph_of_a_step(plan: Any) -> list[list[int]]:
    """The shape of each tensor that one compiled call of the loop computes."""
    from scaleflow.worker.build import build_training
    from tests.training.fake_engine import ignore

    built = build_training(plan, ignore)
    feed = built.feeds.train
    import tensorflow as tf

    position = [tf.constant(value, tf.int64) for value in (0, 0, 1)]
    graph = built.engine._function(feed).get_concrete_function(feed.open(0, 0), *position).graph
    graphs = [graph, *graph._functions.values()]
    operations = [op for each in graphs for op in getattr(each, "graph", each).get_operations()]
    return [out.shape.as_list() for op in operations for out in op.outputs if out.shape.rank]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_updates_by_rows_equal_updates_of_the_whole_table(
    isolated: Callable[..., Any], plan: Callable[..., Any], case: tuple[str, ...]
) -> None:
    optimizer, *more = case
    words = (*BASE, *BY_ROWS[optimizer], *more)
    found, wanted = isolated(follow_each, [plan(*each) for each in (words, dense(words, optimizer))], STEPS)
    tolerance = 2e-3 if "precision=mixed_float16" in case else 1e-5
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=0, atol=tolerance)
    assert far(found.weights, wanted.weights) < tolerance
    assert np.mean(wanted.losses[-4:]) < np.mean(wanted.losses[:4])


@pytest.mark.parametrize("optimizer", BY_ROWS)
def test_a_step_computes_nothing_of_the_size_of_the_table(
    isolated: Callable[..., Any], plan: Callable[..., Any], optimizer: str
) -> None:
    words = (*BASE, *BY_ROWS[optimizer], "strategy=one_device")
    by_rows, of_all = isolated(graphs_of_steps, [plan(*each) for each in (words, dense(words, optimizer))])
    assert [ROWS, WIDTH] not in by_rows
    assert [ROWS, WIDTH] in of_all


@pytest.mark.parametrize("optimizer", ["Adagrad", "LazyAdam"])
def test_training_by_rows_resumes_bit_for_bit(
    isolated: Callable[..., Any], plan: Callable[..., Any], optimizer: str
) -> None:
    whole, resumed = isolated(resume, plan(*BASE, *BY_ROWS[optimizer], "strategy=one_device"))
    assert all((a == b).all() for a, b in zip(whole, resumed, strict=True))


#: Optimizers, and why they update all rows.
REASONS = {
    ("optimizer=adagrad",): None,
    ("optimizer=lazy_adam",): None,
    ("optimizer=adam",): "Adam",
    ("optimizer=sgd",): "SGD with momentum",
    ("optimizer=adagrad", "training.engine=fit"): "training.engine=fit",
}


@pytest.mark.slow
def test_a_large_table_of_which_a_step_updates_all_rows_is_named(
    isolated: Callable[..., Any], plan: Callable[..., Any]
) -> None:
    large = (*BASE, "+dataset.rows=100000", "model.embedding=1", "strategy=one_device")
    found = isolated(run_apart, notes_of, [(plan(*large, *words),) for words in REASONS])
    for notes, reason in zip(found, REASONS.values(), strict=True):
        wanted = f"{reason}: each step updates all 100,000 rows of the embedding words, not only those of its batch; "
        assert [note[: len(wanted)] for note in notes if "rows" in note] == ([wanted] if reason else [])


@pytest.mark.slow
def test_several_processes_give_the_losses_and_weights_of_one_device(tmp_path: Path) -> None:
    words = (
        *(*BASE, *BY_ROWS["Adagrad"], "training.clip_norm=0.05", "training.max_steps=10"),
        *("training.steps_per_loop=1", "checkpoint=none", "hardware.intra_op_threads=1"),
    )
    wanted, *others = run_each(
        tmp_path,
        {
            "one_device": (*dense(words, "Adagrad"), "strategy=one_device"),
            "shards": (*words, *IN_SHARDS),
            "accumulated shards": (*words, *IN_SHARDS, "training.accumulate=2"),
            "multi_worker": (*words, "strategy=multi_worker", "training.accumulate=2"),
        },
    ).items()
    for name, found in others:
        assert found.losses == pytest.approx(wanted[1].losses, abs=1e-5), name
        assert far(found.weights, wanted[1].weights) < 1e-5, name
