"""`python -m tests.strategy.tensorflow_server ADDRESS`: a server of TensorFlow's, until it is killed."""

from __future__ import annotations

import sys
import threading

import tensorflow as tf

if __name__ == "__main__":
    server = tf.distribute.Server({"worker": [sys.argv[1]]}, job_name="worker", task_index=0)
    print("up", flush=True)
    threading.Event().wait()
