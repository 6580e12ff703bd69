"""Keras's callbacks together: a rate schedule, early stopping, a CSV log, backup, NaN check, and a lambda."""

import numpy as np
from tensorflow import keras

EPOCHS = 5

keras.utils.set_random_seed(38)
rng = np.random.default_rng(38)
x = rng.normal(size=(300, 9)).astype("float32")
y = (np.tanh(x[:, 0]) + 0.3 * rng.normal(size=300)).astype("float32")

model = keras.Sequential([keras.Input((9,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
model.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse", metrics=["mae"])


def scheduler(epoch, lr):
    if epoch < 2:
        return lr
    return float(lr * np.exp(-0.5))


batches = []
callbacks = [
    keras.callbacks.LearningRateScheduler(scheduler, verbose=1),
    keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, min_delta=0.01, verbose=1),
    keras.callbacks.CSVLogger("training.csv"),
    keras.callbacks.BackupAndRestore("backup"),
    keras.callbacks.TerminateOnNaN(),
    keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(logs["loss"])),
]
history = model.fit(x, y, epochs=EPOCHS, batch_size=30, validation_split=0.2, callbacks=callbacks)
print("Epochs:", history.epoch)
print("Batches:", len(batches))
print("Rates:", history.history["learning_rate"])
