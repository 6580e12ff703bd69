"""The strategy of a TPU's cores, which take each step together."""

from __future__ import annotations

import tensorflow as tf


def create_tpu(resolver: tf.distribute.cluster_resolver.TPUClusterResolver) -> tf.distribute.Strategy:
    """Makes the strategy over a TPU that is connected and initialised."""
    return tf.distribute.TPUStrategy(resolver)
