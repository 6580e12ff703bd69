"""The strategy object of a process, by its name."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from scaleflow.interfaces import Strategy
from scaleflow.strategy.pipeline import create_pipeline
from scaleflow.strategy.servers import create_parameter_server
from scaleflow.strategy.tpu import create_tpu
from scaleflow.strategy.workers import create_multi_worker

NOTHING_SAID = Strategy()


def resolve_strategy(options: Strategy, devices: Sequence[str]) -> str:
    """The strategy's name, `auto` decided: `mirrored` where there are several devices."""
    if options.name != "auto":
        return options.name
    return "mirrored" if len(devices) > 1 else "one_device"


def create_strategy(
    name: str,
    devices: Sequence[str],
    options: Strategy = NOTHING_SAID,
    tpu: tf.distribute.cluster_resolver.TPUClusterResolver | None = None,
) -> tuple[tf.distribute.Strategy, str | None]:
    """Makes the one strategy object of this process.

    Args:
        name: a resolved name.
        devices: logical devices, such as `CPU:0`; a multi-worker strategy takes all there are.
        options: what else the config says.
        tpu: where the TPU is, for `tpu`.

    Returns:
        The strategy, and what the user should know about it.
    """
    if name == "one_device":
        note = f"strategy=one_device: uses {devices[0]} of {len(devices)} devices" if len(devices) > 1 else None
        return tf.distribute.OneDeviceStrategy(devices[0]), note
    if name == "multi_worker":
        return create_multi_worker(options), None
    if name == "parameter_server":
        return create_parameter_server(options), None
    if name == "tpu":
        return create_tpu(tpu), None
    if name == "pipeline":
        return create_pipeline(devices, options), None
    note = None
    if len(devices) == 1:
        note = f"strategy=mirrored: there is one device, {devices[0]}, so there is one replica"
        if devices[0].startswith("CPU"):
            note += "; hardware.logical_devices=2 makes two"
    return tf.distribute.MirroredStrategy(list(devices)), note
