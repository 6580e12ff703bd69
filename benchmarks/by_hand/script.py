"""A Keras script of moderate length, as users write it: 12 epochs, or as many as its argument says.

Its last line is a JSON object with the milliseconds of a step, of wall time and of processor time.
"""

import json
import sys
import time

import keras
import numpy as np

EXAMPLES = 48_000

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 12

keras.utils.set_random_seed(0)
x = np.random.rand(EXAMPLES, 784).astype("float32")
y = np.random.randint(0, 10, EXAMPLES)


class EpochTimes(keras.callbacks.Callback):
    """Keeps the times of each epoch's end."""

    def __init__(self):
        super().__init__()
        self.ends = []
        self.processor_ends = []

    def on_epoch_end(self, epoch, logs=None):
        self.ends.append(time.perf_counter())
        self.processor_ends.append(time.process_time())


def measure_step(ends):
    """Returns the milliseconds of a step, in the median epoch after the first, which also compiles the step."""
    return 1000 * float(np.median(np.diff(ends))) / (EXAMPLES // 32)


model = keras.Sequential(
    [
        keras.Input((784,)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
times = EpochTimes()
history = model.fit(x, y, epochs=epochs, verbose=0, callbacks=[times])
assert len(history.history["loss"]) == epochs
print(json.dumps({"step_ms": measure_step(times.ends), "processor_ms": measure_step(times.processor_ends)}))
