"""Connects to a TPU, which has to come before any other operation: it configures the runtime that runs them."""

from __future__ import annotations

import tensorflow as tf

from scaleflow.errors import ConfigError


def connect_tpu(address: str) -> tf.distribute.cluster_resolver.TPUClusterResolver:
    """Finds a TPU, makes its devices this process's and initialises them.

    TensorFlow waits for ever where something else than a TPU listens: the launcher ends that.

    Args:
        address: `grpc://HOST:PORT`, `local` or a name.

    Raises:
        ConfigError: if TensorFlow can't use it.
    """
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=address)
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, OSError, RuntimeError, ValueError) as error:
        reason = str(getattr(error, "message", None) or error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"hardware.tpu={address}: TensorFlow {tf.__version__} finds no TPU there ({reason[0][:160]}); it takes a "
            "TensorFlow that is built for TPUs, and a TPU that nobody else uses; or use strategy=mirrored"
        ) from error
    return resolver
