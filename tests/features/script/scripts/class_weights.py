"""Rare positives: `class_weight`, an initial bias, and many metrics, among them counts."""

import keras
import numpy as np

EPOCHS = 3
BATCH_SIZE = 64

keras.utils.set_random_seed(18)
rng = np.random.default_rng(18)
targets = (rng.random(600) < 0.08).astype("uint8")[:, np.newaxis]
features = (rng.normal(size=(600, 16)) + 1.2 * targets).astype("float32")
num_val_samples = 120
train_features, train_targets = features[:-num_val_samples], targets[:-num_val_samples]
val_features, val_targets = features[-num_val_samples:], targets[-num_val_samples:]

mean = np.mean(train_features, axis=0)
std = np.std(train_features, axis=0)
train_features = (train_features - mean) / std
val_features = (val_features - mean) / std

counts = np.bincount(train_targets[:, 0])
print(f"Positives in training data: {counts[1]} ({100 * counts[1] / len(train_targets):.2f}% of total)")
class_weight = {0: 1.0 / counts[0], 1: 1.0 / counts[1]}

model = keras.Sequential(
    [
        keras.Input(shape=train_features.shape[1:]),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(
            1,
            activation="sigmoid",
            bias_initializer=keras.initializers.Constant(np.log(counts[1] / counts[0])),
        ),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(1e-2),
    loss="binary_crossentropy",
    metrics=[
        keras.metrics.FalseNegatives(name="fn"),
        keras.metrics.FalsePositives(name="fp"),
        keras.metrics.Precision(name="precision"),
        keras.metrics.Recall(name="recall"),
        keras.metrics.AUC(name="prc", curve="PR"),
    ],
)
history = model.fit(
    train_features,
    train_targets,
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    verbose=2,
    validation_data=(val_features, val_targets),
    class_weight=class_weight,
)
