"""What a trial needs of a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from scaleflow.config.compose import compose_config
from scaleflow.config.plan import find_batch_multiple
from scaleflow.errors import ConfigError
from scaleflow.features.search.find import prepare_trial
from scaleflow.features.search.trial_kinds import RateTest
from scaleflow.interfaces import Plan


@pytest.mark.parametrize(
    ("words", "multiple"),
    [
        (("strategy=multi_worker", "cluster.workers=6", "dataset.shards=6"), 1),
        (("strategy=multi_worker", "cluster.workers=2", "dataset.shards=8", "training.accumulate=2"), 2),
        (("strategy=multi_worker", "cluster.workers=3", "dataset.shards=4"), 4),
        (("strategy=pipeline", "strategy.micro_batches=6", "dataset.shards=4"), 12),
        (("strategy=pipeline", "strategy.micro_batches=6", "strategy.replicas=2", "dataset.shards=4"), 6),
    ],
)
def test_the_batch_sizes_of_a_search_are_divided_by_shards_and_micro_batches(
    plan: Callable[..., Plan], words: tuple[str, ...], multiple: int
) -> None:
    table = "dataset=table", "dataset.data_dir=a.csv", "dataset.target=b", "training.batch_size=auto"
    assert find_batch_multiple(plan(*table, *words)) == multiple


def test_a_test_of_the_rate_leaves_out_the_schedule_of_a_table_s_optimizer(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3,4\n")
    table = "dataset=table", f"dataset.data_dir={tmp_path}/a.csv", "dataset.target=b", "tracking=none"
    found = prepare_trial(compose_config(table), RateTest()).spec.plan.optimizer
    assert (found.schedule, found.learning_rate) == ("constant", 0.003)
    typed = compose_config((*table, "optimizer=adam", "optimizer.schedule=cosine"))
    with pytest.raises(ConfigError, match=r"optimizer\.schedule=cosine"):
        prepare_trial(typed, RateTest())
