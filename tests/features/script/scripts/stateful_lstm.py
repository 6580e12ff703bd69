"""A time series with windows of `timeseries_dataset_from_array` and a stateful LSTM whose state is reset by hand."""

import keras
import numpy as np
from keras import layers

BATCH_SIZE = 16
SEQUENCE_LENGTH = 10
EPOCHS = 3

keras.utils.set_random_seed(10)
rng = np.random.default_rng(10)
time = np.arange(500)
series = (np.sin(time / 8) + 0.1 * rng.normal(size=500)).astype("float32")
mean, std = series[:400].mean(), series[:400].std()
series = (series - mean) / std


def make_windows(values):
    windows = keras.utils.timeseries_dataset_from_array(
        values[:-1, np.newaxis],
        values[SEQUENCE_LENGTH:],
        sequence_length=SEQUENCE_LENGTH,
        batch_size=BATCH_SIZE,
        shuffle=False,
    )
    # A stateful layer needs batches of one size.
    return windows.filter(lambda x, y: keras.ops.shape(x)[0] == BATCH_SIZE)


train_ds = make_windows(series[:400])
test_ds = make_windows(series[400:])

model = keras.Sequential(
    [
        keras.Input(batch_shape=(BATCH_SIZE, SEQUENCE_LENGTH, 1)),
        layers.LSTM(12, stateful=True, return_sequences=True),
        layers.LSTM(8, stateful=True),
        layers.Dense(1),
    ]
)
model.compile(optimizer="adam", loss="mse", metrics=[keras.metrics.RootMeanSquaredError()])


class ResetStates(keras.callbacks.Callback):
    """Clears the states of the recurrent layers before each epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        for layer in self.model.layers:
            if hasattr(layer, "reset_states"):
                layer.reset_states()


history = model.fit(train_ds, epochs=EPOCHS, shuffle=False, callbacks=[ResetStates()])
for layer in model.layers[:2]:
    layer.reset_states()
print("Test:", model.evaluate(test_ds, verbose=0))
