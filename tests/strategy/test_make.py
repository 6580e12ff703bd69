from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scaleflow.interfaces import Hardware, Strategy


def created(name: str, logical_devices: int) -> tuple[str, str, int, tuple[str, ...], str | None]:
    """The resolved name, the strategy's class, its replicas and devices, and the note."""
    from scaleflow import hardware, strategy

    devices = hardware.configure_devices(Hardware(name="cpu", logical_devices=logical_devices)).names
    resolved = strategy.resolve_strategy(Strategy(name), devices)  # type: ignore[arg-type]
    made, note = strategy.create_strategy(resolved, devices)
    places = tuple(device.rpartition("device:")[2] for device in made.extended.worker_devices)
    return resolved, type(made).__name__, made.num_replicas_in_sync, places, note


ONE, MIRRORED = "OneDeviceStrategy", "MirroredStrategy"


@pytest.mark.parametrize(
    ("name", "logical_devices", "wanted", "note"),
    [
        ("auto", 1, ("one_device", ONE, 1, ("CPU:0",)), None),
        ("auto", 2, ("mirrored", MIRRORED, 2, ("CPU:0", "CPU:1")), None),
        ("one_device", 2, ("one_device", ONE, 1, ("CPU:0",)), "strategy=one_device: uses CPU:0 of 2 devices"),
        ("mirrored", 3, ("mirrored", MIRRORED, 3, ("CPU:0", "CPU:1", "CPU:2")), None),
        ("mirrored", 1, ("mirrored", MIRRORED, 1, ("CPU:0",)), "hardware.logical_devices=2 makes two"),
    ],
)
def test_a_name_becomes_a_strategy_over_the_devices(
    isolated: Callable[..., Any], name: str, logical_devices: int, wanted: tuple[Any, ...], note: str | None
) -> None:
    *found, said = isolated(created, name, logical_devices)
    assert tuple(found) == wanted
    assert said is None if note is None else note in said
