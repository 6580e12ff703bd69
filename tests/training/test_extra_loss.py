"""What a model adds to the loss of its outputs: it is in the reported loss, as in Keras's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scaleflow.interfaces import Hardware, Inputs, Outputs
from tests.training.fake_engine import assemble, random_arrays, run_apart
from tests.training.test_fit import Straight, fit_of
from tests.training.test_loop import DIVISIONS, add_square


def penalised(inputs: Inputs, outputs: Outputs) -> Any:
    """Has a regularizer of weights, one of activities, and a loss that a layer adds."""
    import keras

    raw = keras.Input(inputs.shape, dtype=inputs.dtype)
    x = keras.layers.Dense(8, activity_regularizer=keras.regularizers.L2(0.1))(raw)
    logits = keras.layers.Dense(*outputs.shape, kernel_regularizer=keras.regularizers.L2(0.3))(add_square(x))
    return keras.Model(raw, logits)


class Reports(Straight):
    """Keeps all values of the last call."""

    def end_call(self, steps: int, means: Any, seconds: float, waited: float = 0.0) -> None:
        super().end_call(steps, means, seconds, waited)
        self.values = means


def trained(kind: str, accumulate: int, names: list[str], is_fit: bool) -> tuple[dict[str, float], dict[str, float]]:
    """The values of the second epoch: ours and plain Keras's."""
    import keras

    from scaleflow import strategy

    arrays = random_arrays(24)
    made = strategy.create_strategy(kind, names)[0]
    size = 12 // made.num_replicas_in_sync // accumulate
    parts = assemble(made, arrays, "classification", 3, penalised, batch_size=size, accumulate=accumulate)
    twin = penalised(Inputs((6,)), Outputs("classification", (3,)))
    twin.set_weights(parts.loop.model.get_weights())
    engine, host = fit_of(parts) if is_fit else parts.loop, Reports(2, 2)
    engine.run(parts.feed, host)
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metric = keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy")
    twin.compile(keras.optimizers.SGD(0.1), entropy, metrics=[metric])
    logs = twin.fit(arrays.inputs, arrays.targets, batch_size=12, epochs=2, shuffle=False, verbose=0).history
    return dict(host.values), {name: values[-1] for name, values in logs.items()}


def trained_each(cases: list[tuple[str, int, bool]]) -> list[tuple[dict[str, float], dict[str, float]]]:
    from scaleflow import hardware

    names = hardware.configure_devices(Hardware(name="cpu", logical_devices=2)).names
    return run_apart(trained, ((kind, accumulate, names, is_fit) for kind, accumulate, is_fit in cases))


def test_the_reported_loss_is_what_keras_reports(isolated: Callable[..., Any]) -> None:
    cases = [*((*division, False) for division in DIVISIONS), ("one_device", 1, True), ("mirrored", 1, True)]
    for case, (found, keras_logs) in zip(cases, isolated(trained_each, cases), strict=True):
        assert found["loss"] == pytest.approx(keras_logs["loss"], rel=1e-5), case
        assert found["extra_loss"] == pytest.approx(keras_logs["loss"] - keras_logs["entropy"], rel=1e-4), case
        assert found["extra_loss"] > 0.1
