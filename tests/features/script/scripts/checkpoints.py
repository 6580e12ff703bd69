"""Checkpoints: ModelCheckpoint, a second fit from the best weights with `initial_epoch`, and a saved model."""

from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow import keras

keras.utils.set_random_seed(3)
CHECKPOINT_FOLDER = Path("training_checkpoints")


def create_model():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


rng = np.random.default_rng(3)
y = rng.integers(0, 10, size=500)
x = (rng.normal(size=(10, 64))[y] + rng.normal(size=(500, 64))).astype("float32")
x_train, y_train, x_test, y_test = x[:400], y[:400], x[400:], y[400:]

model = create_model()
CHECKPOINT_FOLDER.mkdir(exist_ok=True)
save_best = keras.callbacks.ModelCheckpoint(
    filepath=CHECKPOINT_FOLDER / "best.weights.h5",
    save_weights_only=True,
    save_best_only=True,
    monitor="val_loss",
    verbose=1,
)
save_each = keras.callbacks.ModelCheckpoint(CHECKPOINT_FOLDER / "epoch_{epoch:02d}.keras", save_freq="epoch")
first_history = model.fit(
    x_train, y_train, epochs=2, validation_data=(x_test, y_test), callbacks=[save_best, save_each]
)
print(sorted(path.name for path in CHECKPOINT_FOLDER.iterdir()))

new_model = create_model()
new_model.load_weights(CHECKPOINT_FOLDER / "best.weights.h5")
loss, accuracy = new_model.evaluate(x_test, y_test, verbose=2)
print(f"Restored model, accuracy: {100 * accuracy:5.2f}%")

second_history = new_model.fit(x_train, y_train, initial_epoch=2, epochs=4, validation_data=(x_test, y_test))

new_model.save("my_model.keras")
saved_model = keras.models.load_model("my_model.keras")
np.testing.assert_allclose(saved_model.predict(x_test), new_model.predict(x_test))

checkpoint = tf.train.Checkpoint(model=new_model)
manager = tf.train.CheckpointManager(checkpoint, str(CHECKPOINT_FOLDER / "tf"), max_to_keep=2)
manager.save()
print("Latest checkpoint exists:", manager.latest_checkpoint is not None)
