"""The strategy of several processes that take each step together."""

from __future__ import annotations

import tensorflow as tf

from scaleflow.interfaces import Strategy

COMMUNICATION = {
    "auto": tf.distribute.experimental.CommunicationImplementation.AUTO,
    "ring": tf.distribute.experimental.CommunicationImplementation.RING,
    "nccl": tf.distribute.experimental.CommunicationImplementation.NCCL,
}


def create_multi_worker(options: Strategy) -> tf.distribute.Strategy:
    """Makes the strategy, which waits until all workers that TF_CONFIG names are there.

    Has to come before any operation: it configures the runtime that runs them.
    """
    communication = tf.distribute.experimental.CommunicationOptions(implementation=COMMUNICATION[options.communication])
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication)
