"""Creates the strategy object of a process from its name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from scaleflow.interfaces import Hardware, Partitioner, Strategy
from scaleflow.strategy.pipeline_parallelism import create_pipeline_parallel


def partition(options: Partitioner) -> Any:
    """Returns TensorFlow's partitioner of variables, None if variables stay whole."""
    if options.max_shards is None:
        return None
    if options.min_shard_bytes is None:
        return tf.distribute.experimental.partitioners.FixedShardsPartitioner(options.max_shards)
    return tf.distribute.experimental.partitioners.MinSizePartitioner(options.min_shard_bytes, options.max_shards)


def serve(options: Hardware) -> None:
    """Starts the server of this process, a worker or a parameter server by TF_CONFIG. Returns while it runs."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
    spec = resolver.cluster_spec()
    peers = sum(spec.num_tasks(role) for role in spec.jobs)
    config = server_config(options, peers, computes=resolver.task_type == "worker")
    tf.distribute.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc", config=config)


def server_config(options: Hardware, peers: int, computes: bool) -> tf.compat.v1.ConfigProto:
    """Converts `hardware` to a server's config, because `tf.config` applies only to a process's own operations.

    Without `inter_op_threads` there are more threads than processes (`peers`): the coordinator, each worker and each
    server may have a waiting operation here, each in its own thread. With fewer threads all of them would wait. A
    worker (`computes`) has one replica on one device; a parameter server uses no GPU.
    """
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=options.inter_op_threads or max(os.cpu_count() or 1, peers + 1),
        intra_op_parallelism_threads=options.intra_op_threads or 0,
        device_count={"GPU": 1 if computes and options.name != "cpu" else 0},
    )
    if not config.device_count["GPU"]:
        return config
    gpu = config.gpu_options
    gpu.visible_device_list = str(options.devices[0]) if options.devices else ""
    if options.memory_limit_mb is not None:
        gpu.experimental.virtual_devices.add(memory_limit_mb=[options.memory_limit_mb])
    else:
        gpu.allow_growth = options.memory_growth
    return config


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
        devices: logical devices, such as `CPU:0`; `multi_worker`, `parameter_server` and `tpu` ignore them.
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
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
        partitioner = partition(options.partitioner)
        return tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner), None
    if name == "tpu":
        return tf.distribute.TPUStrategy(tpu), None
    if name == "pipeline":
        return create_pipeline_parallel(devices, options), None
    note = None
    if len(devices) == 1:
        note = f"strategy=mirrored: there is one device, {devices[0]}, so there is one replica"
        if devices[0].startswith("CPU"):
            note += "; hardware.logical_devices=2 makes two"
    return tf.distribute.MirroredStrategy(list(devices)), note
