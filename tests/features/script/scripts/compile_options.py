"""`compile` with all it has: a rate schedule, clipping, averaged weights, Huber and a percentage error."""

import keras
import numpy as np
from keras.losses import Huber
from keras.optimizers import SGD
from keras.optimizers.schedules import ExponentialDecay

keras.utils.set_random_seed(29)
rng = np.random.default_rng(29)
x = rng.uniform(-1, 1, size=(400, 5)).astype("float32")
y = (10 + x @ np.array([3.0, -2.0, 0.5, 0.0, 1.0]) + 0.1 * rng.normal(size=400)).astype("float32")

normalizer = keras.layers.Normalization()
normalizer.adapt(x)
model = keras.Sequential([keras.Input((5,)), normalizer, keras.layers.Dense(16, "gelu"), keras.layers.Dense(1)])
schedule = ExponentialDecay(initial_learning_rate=0.05, decay_steps=5, decay_rate=0.9, staircase=True)
model.compile(
    optimizer=SGD(schedule, momentum=0.9, nesterov=True, clipnorm=1.0, use_ema=True, ema_momentum=0.9),
    loss=Huber(delta=0.5),
    metrics=["mape"],
)
history = model.fit(x, y, batch_size=32, epochs=3, validation_split=0.2)
print("Iterations:", int(model.optimizer.iterations))
print("Rate at the end:", float(schedule(model.optimizer.iterations)))
