"""A callback that evaluates `self.model`, logs figures and texts to MLflow, and saves files."""

from pathlib import Path

import keras
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import mlflow
import numpy as np

EPOCHS = 3
BATCH_SIZE = 32
PLOT_FOLDER = Path("plots")

keras.utils.set_random_seed(77)
rng = np.random.default_rng(77)
x = rng.normal(size=(480, 8)).astype("float32")
y = (x[:, 0] ** 2 + x[:, 1] ** 2 > 1.5).astype("int32") + (x[:, 2] > 1).astype("int32")
x_train, y_train = x[:320], y[:320]
x_val, y_val = x[320:400], y[320:400]
x_test, y_test = x[400:], y[400:]


class ConfusionMatrixCallback(keras.callbacks.Callback):
    """Draws a confusion matrix after each epoch, and keeps the best model by its macro recall."""

    def __init__(self, features, labels, folder):
        super().__init__()
        self.features = features
        self.labels = labels
        self.folder = folder
        self.best_recall = -1.0

    def on_train_begin(self, logs=None):
        self.folder.mkdir(parents=True, exist_ok=True)

    def on_epoch_end(self, epoch, logs=None):
        scores = self.model.evaluate(self.features, self.labels, verbose=0, return_dict=True)
        answers = self.model.predict(self.features, verbose=0).argmax(axis=1)
        matrix = np.zeros((3, 3), dtype=int)
        np.add.at(matrix, (self.labels, answers), 1)
        recall = float(np.mean(np.diag(matrix) / np.maximum(matrix.sum(axis=1), 1)))
        logs["holdout_recall"] = recall

        figure, axes = plt.subplots()
        axes.imshow(matrix)
        axes.set_title(f"epoch {epoch}, loss {scores['loss']:.3f}")
        figure.savefig(self.folder / f"confusion_{epoch}.png")
        mlflow.log_figure(figure, f"confusion/epoch_{epoch}.png")
        plt.close(figure)

        mlflow.log_metric("holdout_recall", recall, step=epoch)
        mlflow.log_metrics({f"holdout_{name}": value for name, value in scores.items()}, step=epoch)
        if recall > self.best_recall:
            self.best_recall = recall
            self.model.save(self.folder / "best.keras")

    def on_train_end(self, logs=None):
        mlflow.log_text(f"best recall: {self.best_recall}\n", "best.txt")
        mlflow.log_artifact(str(self.folder / "best.keras"), "checkpoints")


model = keras.Sequential(
    [
        keras.Input((8,)),
        keras.layers.Dense(24, activation="tanh"),
        keras.layers.Dense(3, activation="softmax"),
    ]
)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])

with mlflow.start_run(run_name="confusion"):
    mlflow.log_params({"epochs": EPOCHS, "batch_size": BATCH_SIZE})
    mlflow.set_tag("purpose", "confusion matrices")
    history = model.fit(
        x_train,
        y_train,
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        validation_data=(x_val, y_val),
        callbacks=[ConfusionMatrixCallback(x_val, y_val, PLOT_FOLDER)],
    )
    test_loss, test_accuracy = model.evaluate(x_test, y_test)
    mlflow.log_metric("final_test_accuracy", test_accuracy)
