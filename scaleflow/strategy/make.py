"""Creates the strategy object of a process from its name."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from scaleflow.interfaces import Strategy
from scaleflow.strategy.pipeline import create_pipeline
from scaleflow.strategy.servers import create_parameter_server

DEFAULTS = Strategy()


def resolve_strategy(options: Strategy, devices: Sequence[str]) -> str:
    """Returns the strategy's name; `auto` is `mirrored` if there are several devices, else `one_device`."""
    if options.name != "auto":
        return options.name
    return "mirrored" if len(devices) > 1 else "one_device"


def create_strategy(
    name: str,
    devices: Sequence[str],
    options: Strategy = DEFAULTS,
    tpu: tf.distribute.cluster_resolver.TPUClusterResolver | None = None,
) -> tuple[tf.distribute.Strategy, str | None]:
    """Creates the only strategy object of this process, and a note for the user or None.

    Call it before any TensorFlow operation: `multi_worker` configures the runtime. `multi_worker` and
    `parameter_server` wait until all processes that TF_CONFIG names are reachable.

    Args:
        name: a resolved name.
        devices: logical devices, such as `CPU:0`; `multi_worker`, `parameter_server` and `tpu` ignore them.
        options: the config group `strategy`.
        tpu: the connected TPU, for `tpu`.
    """
    if name == "one_device":
        note = f"strategy=one_device: uses {devices[0]} of {len(devices)} devices" if len(devices) > 1 else None
        return tf.distribute.OneDeviceStrategy(devices[0]), note
    if name == "multi_worker":
        communication = tf.distribute.experimental.CommunicationImplementation[options.communication.upper()]
        communication_options = tf.distribute.experimental.CommunicationOptions(implementation=communication)
        return tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication_options), None
    if name == "parameter_server":
        return create_parameter_server(options), None
    if name == "tpu":
        return tf.distribute.TPUStrategy(tpu), None
    if name == "pipeline":
        return create_pipeline(devices, options), None
    note = None
    if len(devices) == 1:
        note = f"strategy=mirrored: there is one device, {devices[0]}, so there is one replica"
        if devices[0].startswith("CPU"):
            note += "; hardware.logical_devices=2 makes two"
    return tf.distribute.MirroredStrategy(list(devices)), note
