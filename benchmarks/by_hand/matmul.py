"""A bare loop of matrix products in each dtype: what a device reaches at most. Prints TFLOP/s as JSON.

python matmul.py 8192 gpu
"""

import json
import sys
import time

import tensorflow as tf

PRODUCTS, ROUNDS = 10, 4


def measure(size: int, dtype: str) -> float:
    left, right = (tf.cast(tf.random.stateless_uniform([size, size], [0, seed]), dtype) for seed in range(2))

    @tf.function
    def multiply() -> tf.Tensor:
        product = left
        for _ in range(PRODUCTS):
            product = tf.matmul(product, right) / size
        return tf.reduce_sum(tf.cast(product, tf.float32))

    multiply().numpy()
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        multiply().numpy()
        seconds.append(time.perf_counter() - begin)
    return PRODUCTS * 2 * size**3 / min(seconds) / 1e12


size, kind = int(sys.argv[1]), sys.argv[2]
for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)
with tf.device(f"{kind.upper()}:0"):
    print(json.dumps({dtype: measure(size, dtype) for dtype in ("float32", "float16", "bfloat16")}))
