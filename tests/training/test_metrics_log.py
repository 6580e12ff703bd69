"""What a step computes, as it is counted in the graph that was traced of it; and what is made of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces.events import Event
from scaleflow.worker.runtime import StartupTimer
from tests.training.fake_engine import ignore

BASE = ("hardware=cpu", "tracking=none", "checkpoint=none", "dataset=synthetic", "dataset.examples=200")
MLP = (*BASE, "model=mlp", "model.units=[16]", "dataset.shape=[8]", "dataset.outputs=4")
CNN = (*BASE, "model=cnn", "model.filters=[8,16]", "model.units=32", "dataset.shape=[12,12,3]", "dataset.outputs=4")

#: Forward and backward, of an example: an input's gradient is not needed in the first layer.
OF_MLP = 2 * (8 * 16 * 2 + 16 * 4 * 3)


def counted(plans: list[Any]) -> list[float | None]:
    from scaleflow.worker.build import build_training

    return [build_training(plan, ignore).engine.flops_per_example for plan in plans]


@pytest.mark.slow
def test_multiplications_are_counted_forward_and_backward_however_a_step_is_divided(
    isolated: Callable[..., Any], plan: Callable[..., Any]
) -> None:
    one = "strategy=one_device"
    ways = [
        (*MLP, one),
        (*MLP, one, "training.accumulate=4"),
        (*MLP, one, "training.engine=fit"),
        (*MLP, one, "hardware.xla=true"),
        (*MLP, one, "precision=mixed"),
        (*MLP, one, "profiler=trace", "training.max_steps=100"),
    ]
    assert isolated(counted, [plan(*words) for words in ways]) == [OF_MLP] * len(ways)
    both = "strategy=mirrored", "hardware.logical_devices=2"
    options = "training.engine=loop", "training.engine=fit", "training.accumulate=4", "hardware.xla=true"
    ways = [(*MLP, *both, option) for option in options]
    assert isolated(counted, [plan(*words) for words in ways]) == [OF_MLP] * len(ways)


def test_convolutions_are_counted(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    (found,) = isolated(counted, [plan(*CNN, "strategy=one_device")])
    first, second = 12 * 12 * 8 * 27, 6 * 6 * 16 * 72
    head = 3 * 3 * 16 * 32 + 32 * 4
    assert found == 2 * (2 * first + 3 * second + 3 * head)


def of_functions() -> list[float | None]:
    import tensorflow as tf

    from scaleflow.training.metrics_log import count_flops

    def graph(function: Callable[..., Any], *shapes: tuple[int | None, ...]) -> Any:
        return tf.function(function).get_concrete_function(*(tf.TensorSpec(shape) for shape in shapes)).graph

    def looped(a: Any, b: Any) -> Any:
        return tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x @ b), (0, a))[1]

    return [
        count_flops(graph(lambda a, b: tf.einsum("bij,bjk->bik", a, b), (2, 3, 4), (2, 4, 5))),
        count_flops(graph(lambda a, b: tf.einsum("...j,jk->...k", a, b), (2, 3, 4), (4, 5))),
        count_flops(graph(tf.matmul, (2, 3, 4), (2, 4, 5))),
        count_flops(graph(lambda a, b: tf.matmul(a, b, transpose_a=True), (4, 3), (4, 5))),
        count_flops(graph(lambda a, b: tf.nn.depthwise_conv2d(a, b, [1, 1, 1, 1], "SAME"), (1, 4, 4, 2), (3, 3, 2, 1))),
        count_flops(graph(lambda a, b: (a @ b, a + 1)[1], (3, 4), (4, 5))),  # nobody asks for the product
        count_flops(graph(looped, (4, 4), (4, 4))),
        count_flops(graph(looped, (4, 4), (4, 4)), (3,)),
        count_flops(graph(tf.matmul, (None, 4), (4, 5))),
    ]


def test_each_kind_of_operation_is_counted_and_what_is_not_known_is_not_guessed(isolated: Callable[..., Any]) -> None:
    assert isolated(of_functions) == [240, 240, 240, 120, 2 * 32 * 9, 0, None, 3 * 128, None]


def peaks() -> list[float | None]:
    from scaleflow.hardware.devices import device_peak, process_peak

    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "Tesla T4", "NVIDIA A1000", "")
    found = [device_peak(name, "mixed_float16") for name in names]
    return [
        *found,
        device_peak("Tesla T4", "mixed_bfloat16"),
        device_peak(names[0], "float32"),
        process_peak("CPU", "float32", 1),
    ]


def test_a_gpus_peak_is_known_by_its_name_and_a_cpu_has_none(isolated: Callable[..., Any]) -> None:
    assert isolated(peaks) == [312e12, 989.5e12, 756.5e12, 65e12, None, None, None, 156e12, None]


def test_the_time_to_the_first_step_is_the_sum_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    since = iter([7.0, 8.0, 10.0, 11.5])
    monkeypatch.setattr("scaleflow.worker.runtime.measure_since", lambda began: next(since))
    startup_timer = StartupTimer(100.0, **{"import": 5.0})
    for part in ("launch", "build", "data", "build"):
        startup_timer.end_part(part)
    assert startup_timer.values() == {
        "perf/seconds_to_first_step": 11.5,
        "perf/seconds_to_first_step_import": 5.0,
        "perf/seconds_to_first_step_launch": 2.0,
        "perf/seconds_to_first_step_build": 2.5,
        "perf/seconds_to_first_step_data": 2.0,
    }


def clocked() -> dict[str, float]:
    from scaleflow.training.metrics_log import EpochClock

    clock = EpochClock()
    assert clock.speed() == {}
    for steps, seconds in ((94, 0.094), (1, 0.5), (5, 0.01)):
        clock.add(steps * 8, steps, seconds, waited=0.0)
    return clock.speed()


def test_a_step_counts_as_the_mean_of_its_call(isolated: Callable[..., Any]) -> None:
    assert isolated(clocked) == pytest.approx(
        {
            "perf/examples_per_second": 800 / 0.604,
            "perf/step_ms": 6.04,
            "perf/step_ms_p50": 1.0,
            "perf/step_ms_p95": 2.0,
        }
    )


def measure_utilisation(plan: Any, folder: Path) -> list[dict[str, float]]:
    import dataclasses
    import time

    from scaleflow.runs import RunSpec, WorkerProcess
    from scaleflow.worker.build import build_training
    from scaleflow.worker.tasks import TrainModel
    from scaleflow.worker.train import make_session, make_worker_sync
    from scaleflow.worker.trainer import Trainer

    events: list[dict[str, float]] = []
    built = build_training(plan, ignore)
    built = dataclasses.replace(built, facts=dataclasses.replace(built.facts, peak_flops=1e12))
    job = RunSpec(plan, folder, time.time(), TrainModel())

    def emit(event: Event) -> None:
        events.append(getattr(event, "values", {}))

    trainer = Trainer(WorkerProcess(job, emit, bool))
    trainer.setup = built
    trainer.worker_sync = make_worker_sync(trainer)
    make_session(trainer).run()
    return [values for values in events if "perf/mfu" in values]


def test_utilisation_is_the_models_operations_to_the_devices_peak(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path
) -> None:
    values, *_ = isolated(measure_utilisation, plan(*MLP, "strategy=one_device", "training.epochs=1"), tmp_path)
    assert values["perf/mfu"] == pytest.approx(values["perf/examples_per_second"] * OF_MLP / 1e12)
