"""Gradient accumulation by hand inside of `train_step`: each batch is cut into micro-batches."""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(5)


class AccumulatingModel(keras.Model):
    """A model that adds the gradients of its micro-batches before an update."""

    def __init__(self, micro_batches=4, **kwargs):
        super().__init__(**kwargs)
        self.micro_batches = micro_batches

    def train_step(self, data):
        x, y = data
        sums = [tf.zeros_like(weight) for weight in self.trainable_variables]
        x_parts = tf.split(x, self.micro_batches)
        y_parts = tf.split(y, self.micro_batches)
        for x_part, y_part in zip(x_parts, y_parts, strict=True):
            with tf.GradientTape() as tape:
                y_pred = self(x_part, training=True)
                loss = self.compute_loss(x=x_part, y=y_part, y_pred=y_pred) / self.micro_batches
            gradients = tape.gradient(loss, self.trainable_variables)
            sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss * self.micro_batches)
                else:
                    metric.update_state(y_part, y_pred)
        self.optimizer.apply_gradients(zip(sums, self.trainable_variables, strict=True))
        return {metric.name: metric.result() for metric in self.metrics}


rng = np.random.default_rng(5)
x = rng.normal(size=(320, 16)).astype("float32")
y = rng.integers(0, 3, size=320)
x[np.arange(320), y] += 3

inputs = keras.Input((16,))
outputs = keras.layers.Dense(3)(keras.layers.Dense(16, activation="tanh")(inputs))
model = AccumulatingModel(micro_batches=4, inputs=inputs, outputs=outputs)
model.compile(
    optimizer=keras.optimizers.Adam(0.01),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(x, y, batch_size=64, epochs=3)
