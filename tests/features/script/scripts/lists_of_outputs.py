"""Lists of inputs and outputs, with a list of `loss_weights` and a weight per example for each output."""

import numpy as np
import tensorflow as tf
from tensorflow.keras.layers import Concatenate, Dense, Input
from tensorflow.keras.models import Model

tf.keras.utils.set_random_seed(16)
rng = np.random.default_rng(16)
image_features = rng.normal(size=(320, 10)).astype("float32")
meta_features = rng.normal(size=(320, 4)).astype("float32")
age = (2 * image_features[:, 0] + meta_features[:, 0]).astype("float32")
group = (meta_features[:, 1] > 0).astype("float32")
age_weights = np.where(group == 1, 2.0, 1.0)
group_weights = np.ones(320)

first = Input((10,))
second = Input((4,))
hidden = Concatenate()([Dense(12, activation="relu")(first), Dense(4, activation="relu")(second)])
model = Model([first, second], [Dense(1, name="age")(hidden), Dense(1, activation="sigmoid", name="group")(hidden)])
model.compile(
    optimizer="adam",
    loss=["mean_squared_error", "binary_crossentropy"],
    loss_weights=[0.3, 1.0],
    metrics=[["mae"], ["accuracy"]],
)

train = slice(0, 240)
test = slice(240, 320)
history = model.fit(
    [image_features[train], meta_features[train]],
    [age[train], group[train]],
    sample_weight=[age_weights[train], group_weights[train]],
    validation_data=([image_features[test], meta_features[test]], [age[test], group[test]]),
    epochs=3,
    batch_size=40,
    verbose=0,
)
for name, values in history.history.items():
    print(name, [round(value, 4) for value in values])
print(model.evaluate([image_features[test], meta_features[test]], [age[test], group[test]], verbose=0))
