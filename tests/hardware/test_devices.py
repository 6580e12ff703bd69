from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Hardware
from tests.training.fake_engine import follow


def configured(**options: Any) -> dict[str, Any] | str:
    """The devices and threads there are then, or the refusal."""
    import tensorflow as tf

    from scaleflow.hardware import configure_devices

    try:
        devices = configure_devices(Hardware(**options))
    except ConfigError as refusal:
        return str(refusal)
    return {
        "kind": devices.kind,
        "names": devices.names,
        "logical": [device.name for device in tf.config.list_logical_devices()],
        "intra": tf.config.threading.get_intra_op_parallelism_threads(),
        "inter": tf.config.threading.get_inter_op_parallelism_threads(),
    }


def test_a_cpu_is_divided_and_its_threads_are_set(isolated: Callable[..., Any]) -> None:
    found = isolated(configured, name="cpu", logical_devices=3, intra_op_threads=1, inter_op_threads=2)
    assert found["kind"] == "CPU"
    assert found["names"] == ("CPU:0", "CPU:1", "CPU:2")
    assert found["logical"] == [f"/device:CPU:{i}" for i in range(3)]
    assert (found["intra"], found["inter"]) == (1, 2)


def test_one_device_named_by_its_index(isolated: Callable[..., Any]) -> None:
    found = isolated(configured, name="cpu", devices=[0])
    assert found["names"] == ("CPU:0",)
    assert (found["intra"], found["inter"]) == (0, 0)


def without_gpu(cases: list[dict[str, Any]]) -> list[dict[str, Any] | str]:
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    tf.config.list_physical_devices = without(tf.config.list_physical_devices)
    return [configured(**options) for options in cases]


def without(listed: Callable[..., Any]) -> Callable[..., Any]:
    """TensorFlow's list of devices as it is on a machine without a GPU."""
    return lambda kind=None: [] if kind == "GPU" else listed(kind)


def test_missing_devices_are_refused(isolated: Callable[..., Any]) -> None:
    wanted = [
        ({"name": "cpu", "devices": [0, 1]}, ("hardware.devices=[0, 1]: found 1 CPU", "use hardware.devices=[0]")),
        ({"name": "cpu", "devices": [5]}, ("hardware.devices=[5]: found 1 CPU; use hardware.devices=[0]",)),
        ({"name": "gpu"}, ("hardware=gpu: TensorFlow finds no GPU", "use hardware=cpu")),
        ({"memory_limit_mb": 100}, ("hardware.memory_limit_mb=100: there is no GPU, and", "leave it null")),
    ]
    messages = isolated(without_gpu, [options for options, _ in wanted])
    for message, (options, words) in zip(messages, wanted, strict=True):
        assert isinstance(message, str), options
        for word in words:
            assert word in message


def configured_late() -> dict[str, Any] | str:
    """The refusal in a process where TensorFlow runs already, as in a notebook with `debug=inline`."""
    import tensorflow as tf

    tf.config.list_logical_devices()
    return configured(name="cpu", logical_devices=2)


def test_devices_of_a_process_that_has_started_tensorflow_are_not_divided(isolated: Callable[..., Any]) -> None:
    message = isolated(configured_late)
    assert message.startswith("hardware=cpu: TensorFlow has already started in this process with other devices (")
    assert "remove debug=inline" in message


def test_auto_is_the_cpu_where_there_is_no_gpu(isolated: Callable[..., Any]) -> None:
    assert isolated(without_gpu, [{"name": "auto"}])[0]["names"] == ("CPU:0",)


def test_deterministic_runs_have_the_same_bits(isolated: Callable[..., Any], plan: Callable[..., Any]) -> None:
    chosen = plan(
        "hardware=cpu", "hardware.deterministic=true", "hardware.logical_devices=2", "strategy=mirrored", "model=cnn",
        "model.filters=[4]", "model.units=8", "model.dropout=0.2", "tracking=none", "dataset.limit=100",
    )  # fmt: skip
    first, second = isolated(follow, chosen, 3), isolated(follow, chosen, 3)
    assert first.losses == second.losses
    for one, other in zip(first.weights, second.weights, strict=True):
        np.testing.assert_array_equal(one, other)
