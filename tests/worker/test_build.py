"""What the worker refuses before it builds a model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Batching, Plan, Training
from scaleflow.worker.data import check_batch_size


def test_a_batch_of_which_most_would_be_padding_is_refused() -> None:
    check_batch_size(Training(batch_size=1024), Batching(1024, 2, 2), 40)
    check_batch_size(Training(global_batch_size=8192), Batching(4096, 1, 2), 4096)
    with pytest.raises(ConfigError, match=r"training.batch_size=4096: .* 8,192 examples, .* has 4,095; use a"):
        check_batch_size(Training(batch_size=4096), Batching(4096, 1, 2), 4095)
    with pytest.raises(ConfigError, match=r"training.global_batch_size=1000000007: .* has 38; use a smaller one"):
        check_batch_size(Training(global_batch_size=1000000007), Batching(1000000007, 1, 1), 38)


def fill_and_type(plan: Plan, typed: Plan) -> list[Any]:
    """In a child, of 4,000 examples on two replicas: the batches as chosen and as typed, and what is recorded."""
    from dataclasses import replace

    from scaleflow.config.plan import make_batching
    from scaleflow.worker.build import fill_sizes

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


def watch(made: Plan) -> list[Any]:
    from scaleflow.worker.build import choose_monitors

    chosen = [choose_monitors(made, validates) for validates in (True, False)]
    return [(each.training.early_stopping, each.checkpoint.best) for each in chosen]


def test_without_a_validation_split_there_is_nothing_to_stop_by(
    isolated: Callable[..., Any], plan: Callable[..., Plan]
) -> None:
    validated, other = isolated(watch, plan("tracking=none", "model=tabular"))
    assert [each.monitor for each in validated] == ["val/loss", "val/loss"]
    assert validated[0].patience == 20
    assert other == (None, None)


def refuse_positive(plans: list[Plan]) -> list[str]:
    from scaleflow.config.targets import bind_target, locate_target
    from scaleflow.interfaces import Outputs
    from scaleflow.objective import Loader, find_positive_losses
    from scaleflow.worker.data import refuse_negative_outputs

    found = []
    for made in plans:
        for kind in ("regression", "binary"):
            losses = find_positive_losses(
                Outputs(cast(Any, kind), (1,)), made.objective, Loader(locate_target, bind_target)
            )
            try:
                refuse_negative_outputs(made, losses)
                found.append("")
            except ConfigError as error:
                found.append(str(error))
    return found


def test_a_loss_of_positive_values_is_refused_on_models_that_return_any_number(
    isolated: Callable[..., Any], plan: Callable[..., Plan]
) -> None:
    losses = ("poisson", "msle", "kld", "{_target_: keras.losses.Poisson}", "huber", "null")
    plans = [plan("tracking=none", "model=mlp", f"objective.loss={each}") for each in losses]
    file = plan("tracking=none", "model=keras_file", "model.path=net.keras", "objective.loss=poisson")
    found = isolated(refuse_positive, [*plans, file])
    assert found[1::2] == [""] * 7  # probabilities are positive
    values = found[::2]
    for text in values[:4]:
        assert text.endswith(
            ": is for outputs above 0, and model=mlp returns any number; use a model of your own whose last layer is "
            "positive, such as activation='softplus', or a loss such as huber"
        )
    assert values[0].startswith("objective.loss=poisson")
    assert values[4:] == ["", "", ""]
