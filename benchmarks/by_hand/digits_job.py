"""The default job as one would write it: digits, an MLP, Keras `fit`, a run in MLflow with its model.

MLFLOW_TRACKING_URI=sqlite:///mlflow.db python digits_job.py
"""

import json

import keras
import mlflow
import numpy as np
from sklearn.datasets import load_digits

EPOCHS = 20
BATCH_SIZE = 32
LEARNING_RATE = 1e-3
UNITS = (128, 128)


def load():
    digits = load_digits()
    x = digits.images[..., None].astype(np.float32)
    y = digits.target.astype(np.int32)
    order = np.random.default_rng(20).permutation(len(x))
    test, validation, train = np.split(order, [359, 359 + 144])
    return (x[train], y[train]), (x[validation], y[validation]), (x[test], y[test])


def log_epoch(epoch, logs):
    mlflow.log_metrics(logs, step=epoch + 1)


def main():
    keras.utils.set_random_seed(0)
    train, validation, test = load()
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Rescaling(1 / 16),
            keras.layers.Flatten(),
            *(keras.layers.Dense(units, activation="relu") for units in UNITS),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(LEARNING_RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    mlflow.set_experiment("by_hand")
    with mlflow.start_run():
        mlflow.log_params(
            {"epochs": EPOCHS, "batch_size": BATCH_SIZE, "learning_rate": LEARNING_RATE, "units": UNITS, "model": "mlp"}
        )
        model.fit(
            *train,
            validation_data=validation,
            epochs=EPOCHS,
            batch_size=BATCH_SIZE,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=log_epoch)],
            verbose=2,
        )
        loss, accuracy = model.evaluate(*test, verbose=0)
        mlflow.log_metrics({"test_loss": loss, "test_accuracy": accuracy}, step=EPOCHS)
        model.save("model.keras")
        model.export("saved_model", verbose=False)
        mlflow.log_artifact("model.keras", "model")
        mlflow.log_artifacts("saved_model", "model/saved_model")
    print(json.dumps({"accuracy": accuracy}))


if __name__ == "__main__":
    main()
