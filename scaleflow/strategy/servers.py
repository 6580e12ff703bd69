"""The strategy in which workers train asynchronously on variables that parameter servers hold.

A coordinator (TF_CONFIG's `chief`) schedules functions on the workers. Workers read variables from the servers and
apply updates there without waiting for each other (Li et al. 2014,
https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu).
"""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from scaleflow.interfaces import Hardware, Partitioner, Strategy


def create_parameter_server(options: Strategy) -> tf.distribute.Strategy:
    """Creates the coordinator's strategy."""
    return tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc"),
        variable_partitioner=partition(options.partitioner),
    )


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
