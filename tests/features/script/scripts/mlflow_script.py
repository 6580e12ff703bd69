"""MLflow's own way: an experiment, `start_run` with MLflow's Keras callback, params, and a logged model."""

import keras
import mlflow
import numpy as np
from mlflow.models import infer_signature

PARAMS = {"epochs": 2, "learning_rate": 0.01, "batch_size": 32, "optimizer": "sgd"}

keras.utils.set_random_seed(32)
rng = np.random.default_rng(32)
x = rng.normal(size=(300, 11)).astype("float32")
y = (6 + x[:, 0] - x[:, 4] + 0.3 * rng.normal(size=300)).astype("float32")
x_train, y_train = x[:200], y[:200]
x_valid, y_valid = x[200:250], y[200:250]
x_test, y_test = x[250:], y[250:]

mlflow.set_experiment("wine-quality")
with mlflow.start_run() as run:
    mlflow.log_params(PARAMS)
    mlflow.set_tags({"release": "1.0", "team": "cellar"})
    mlflow.log_param("shape", x_train.shape)
    model = keras.Sequential(
        [
            keras.Input([x_train.shape[1]]),
            keras.layers.Normalization(mean=np.mean(x_train, axis=0), variance=np.var(x_train, axis=0)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(PARAMS["learning_rate"], momentum=0.5),
        loss="mean_squared_error",
        metrics=[keras.metrics.RootMeanSquaredError()],
    )
    history = model.fit(
        x_train,
        y_train,
        validation_data=(x_valid, y_valid),
        epochs=PARAMS["epochs"],
        batch_size=PARAMS["batch_size"],
        callbacks=[mlflow.keras.MlflowCallback()],
    )
    eval_loss, eval_rmse = model.evaluate(x_test, y_test)
    mlflow.log_metric("eval_rmse", eval_rmse)
    mlflow.log_image((255 * rng.random((8, 8, 3))).astype("uint8"), "noise.png")
    mlflow.log_dict({"units": 16}, "units.json")
    signature = infer_signature(x_test, model.predict(x_test))
    mlflow.keras.log_model(model, name="model", signature=signature, pip_requirements=["keras"])

print("Run:", run.info.run_id)
