"""A layer at the end that adds the loss itself: targets are inputs, and `compile` names no loss."""

import keras
import numpy as np

keras.utils.set_random_seed(9)


class LogisticEndpoint(keras.layers.Layer):
    """Returns probabilities. If it gets targets, it adds the loss and a metric."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy_metric = keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)

    def call(self, logits, targets=None, sample_weight=None):
        if targets is not None:
            self.add_loss(self.loss_fn(targets, logits, sample_weight))
            self.accuracy_metric.update_state(targets, logits, sample_weight)
        return keras.ops.sigmoid(logits)


inputs = keras.Input((3,), name="inputs")
targets = keras.Input((1,), name="targets")
hidden = keras.layers.Dense(8, activation="relu")(inputs)
logits = keras.layers.Dense(1)(hidden)
predictions = LogisticEndpoint(name="predictions")(logits, targets)
model = keras.Model(inputs=[inputs, targets], outputs=predictions)
model.compile(optimizer=keras.optimizers.Adam(0.01))

rng = np.random.default_rng(9)
features = rng.normal(size=(256, 3)).astype("float32")
data = {"inputs": features, "targets": (features.sum(axis=1, keepdims=True) > 0).astype("float32")}
history = model.fit(data, epochs=3, batch_size=32, verbose=2)
