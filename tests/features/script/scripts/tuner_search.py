"""A search of keras-tuner, and a last fit with the best values."""

import keras
import keras_tuner
import numpy as np
from keras import layers

keras.utils.set_random_seed(20)
rng = np.random.default_rng(20)
y = rng.integers(0, 4, size=300)
x = (rng.normal(size=(4, 10))[y] + rng.normal(size=(300, 10))).astype("float32")
x_train, y_train, x_val, y_val = x[:240], y[:240], x[240:], y[240:]


def build_model(hp):
    model = keras.Sequential([keras.Input((10,))])
    for number in range(hp.Int("num_layers", 1, 2)):
        model.add(layers.Dense(hp.Choice(f"units_{number}", [8, 16, 32]), activation="relu"))
    if hp.Boolean("dropout"):
        model.add(layers.Dropout(0.25))
    model.add(layers.Dense(4, activation="softmax"))
    learning_rate = hp.Float("lr", min_value=1e-3, max_value=1e-1, sampling="log")
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=learning_rate),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


tuner = keras_tuner.RandomSearch(
    hypermodel=build_model,
    objective="val_accuracy",
    max_trials=3,
    executions_per_trial=1,
    overwrite=True,
    directory="tuning",
    project_name="blobs",
    seed=20,
)
tuner.search_space_summary()
tuner.search(x_train, y_train, epochs=2, validation_data=(x_val, y_val))
tuner.results_summary()

best_hps = tuner.get_best_hyperparameters(1)[0]
model = build_model(best_hps)
history = model.fit(x, y, epochs=2)
