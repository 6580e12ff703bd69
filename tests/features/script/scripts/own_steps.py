"""Own `compute_loss`, `train_step` and `test_step` that call the compiled loss and metrics, with weighted examples."""

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(37)


class SmoothedModel(keras.Model):
    """Adds a penalty for large outputs to the compiled loss."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        return loss + 0.01 * tf.reduce_mean(tf.square(y_pred))

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=False)
        return self.compute_metrics(x, y, y_pred, sample_weight) | {"penalized_loss": loss}


rng = np.random.default_rng(37)
x = rng.normal(size=(320, 8)).astype("float32")
y = (x[:, :2].sum(axis=1, keepdims=True) + 0.2 * rng.normal(size=(320, 1))).astype("float32")
weights = rng.uniform(0.5, 1.5, size=320).astype("float32")

inputs = keras.Input((8,))
hidden = keras.layers.Dense(16, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-3))(inputs)
model = SmoothedModel(inputs, keras.layers.Dense(1)(hidden))
model.compile(optimizer="adam", loss="mse", metrics=["mae"])
history = model.fit(
    x[:256], y[:256], sample_weight=weights[:256], batch_size=32, epochs=3, validation_data=(x[256:], y[256:])
)
