"""`scaleflow train.py` from the command line to the store."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Command

TRAIN = """
import keras
import numpy as np

UNITS = 4

keras.utils.set_random_seed(1)
x = {"left": np.random.rand(64, 3).astype("float32"), "right": np.random.rand(64, 1).astype("float32")}
y = x["left"].sum(1) + x["right"][:, 0]
left = keras.Input((3,), name="left")
right = keras.Input((1,), name="right")
joined = keras.layers.Dense(UNITS)(keras.layers.concatenate([left, right]))
model = keras.Model({"left": left, "right": right}, keras.layers.Dense(1)(joined))
model.compile("adam", "mse")
print("training", UNITS)
model.fit(x, y, epochs=1)
np.save("answers.npy", model.predict(x))
"""


def read_run(folder: str) -> dict[str, Any]:
    """What the store has of the only run there, and whether its model answers as the script's model did."""
    import mlflow
    import numpy as np

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    (model,) = mlflow.search_logged_models([run.info.experiment_id], output_format="list")
    loaded = mlflow.pyfunc.load_model(f"models:/{model.model_id}")
    np.random.seed(1)
    x = {"left": np.random.rand(64, 3).astype("float32"), "right": np.random.rand(64, 1).astype("float32")}
    answers = loaded.predict(x)
    return {
        "name": run.info.run_name,
        "status": run.info.status,
        "params": run.data.params,
        "metrics": sorted(name for name in run.data.metrics if not name.startswith("system/")),
        "difference": float(np.abs(answers - np.load(f"{folder}/answers.npy")).max()),
    }


def test_the_store_has_the_run_and_its_model(command: Command, isolated: Callable[..., Any], empty_store: Path) -> None:
    (command.folder / "train.py").write_text(TRAIN)
    (command.folder / "mlflow.db").write_bytes(empty_store.read_bytes())
    done = command("train.py", "script.UNITS=5", "tracking.uri=sqlite:///mlflow.db")
    assert done.returncode == 0, done.stderr
    assert "\ntraining 5\n" in done.stdout
    run = isolated(read_run, str(command.folder))
    assert run["status"] == "FINISHED"
    assert run["name"] == "UNITS=5 train.py-one_device-float32"
    assert run["params"]["script.UNITS"] == "5"
    assert run["metrics"] == ["train/loss"]
    assert run["difference"] < 1e-5
    assert run["params"]["script.file"] == "train.py"
    folder = str(command.run_folder().relative_to(command.folder))
    reading = ("--input", "train.py", "--output", "y.csv")
    for words in (["evaluate", folder], ["predict", folder, *reading], ["refit", folder]):
        refused = command(*words)
        assert refused.returncode == 2, words
        assert "it is the run of a script, which reads its data itself" in refused.stderr, words


def test_an_exception_of_the_script_ends_with_1_and_shows_its_lines(command: Command) -> None:
    (command.folder / "train.py").write_text("import keras\n\ndata = {}\nprint(data['x'])\n")
    done = command("train.py", "tracking=none")
    assert done.returncode == 1
    assert "train.py\", line 4, in <module>\n    print(data['x'])\n" in done.stderr
    assert done.stderr.rstrip().endswith("KeyError: 'x'")


#: Trains until Ctrl-C, and then evaluates.
ENDLESS = """
import keras
import numpy as np

model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((32, 3), "float32")
say = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("epoch", epoch) if epoch < 3 else None)
try:
    model.fit(x, x[:, 0], epochs=10_000_000, callbacks=[say])
except KeyboardInterrupt:
    print("caught, loss", model.evaluate(x, x[:, 0]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_and_ctrl_c_reaches_the_script(command: Command, number: int, code: int) -> None:
    (command.folder / "train.py").write_text(ENDLESS)
    with command.start("train.py", "tracking=none") as process:
        while "epoch 2" not in (line := process.stdout.readline()):
            assert line
        process.send_signal(number)
        out, err = process.communicate(timeout=240)
    assert process.wait() == code, err
    assert ("caught, loss" in out) == (number == signal.SIGINT)
    assert "KILLED" in out


#: Trains a small model, as fast as it can.
SMALL = """
import keras
import numpy as np

UNITS = 4

keras.utils.set_random_seed(1)
x = np.random.rand(64, 3).astype("float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(UNITS), keras.layers.Dense(1)])
model.compile("adam", "mse")
model.fit(x, x[:, 0], epochs=2, validation_split=0.5)
"""


def read_sweep(folder: str) -> tuple[str, str]:
    """Returns the name of the sweep's run, and all of its tags as text."""
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
    (parent,) = [run for run in runs if "scaleflow.swept" in run.data.tags]
    return str(parent.info.run_name), str(parent.data.tags) + str(parent.data.params)


def test_a_sweep_and_a_rerun_have_the_words_that_were_typed(
    command: Command, isolated: Callable[..., Any], empty_store: Path
) -> None:
    (command.folder / "train.py").write_text(SMALL)
    (command.folder / "mlflow.db").write_bytes(empty_store.read_bytes())
    words = ["train.py", "script.UNITS=3,5", "optimizer.learning_rate=0.1", "fit.batch_size=16", "seed=3"]
    swept = command("-m", *words, "hydra.sweep.dir=sweep", "tracking.uri=sqlite:///mlflow.db", "--json")
    assert swept.returncode == 0, swept.stderr
    jobs = json.loads(swept.stdout.splitlines()[-1])["jobs"]
    typed = ["train.py", "script.UNITS=3", "optimizer.learning_rate=0.1", "fit.batch_size=16", "seed=3"]
    assert jobs[0]["overrides"][:5] == typed
    assert "#1 script.UNITS=5" in swept.stdout
    assert yaml.safe_load((command.folder / "sweep/0/overrides.yaml").read_text())[:5] == typed
    name, texts = isolated(read_sweep, str(command.folder))
    assert name == "sweep of script.UNITS"
    for text in (swept.stdout, swept.stderr, texts):
        assert "script.constants" not in text
        assert "compiled_rate" not in text

    (command.folder / "train.py").write_text(f"{SMALL}\nprint('edited')\n")
    again = command("rerun", "sweep/0", "script.UNITS=4", "optimizer.learning_rate=0.5", "tracking=none", "--json")
    assert again.returncode == 0, again.stderr
    (params,) = [event["params"] for event in command.events() if event["event"] == "ready"]
    assert "note: the code is not that of the tracked run: train.py changed; --exact refuses this" in again.stdout
    assert params["script.UNITS"] == "4"
    assert float(params["optimizer.learning_rate"]) == 0.5
    assert params["fit.batch_size"] == "16"
    assert params["seed"] == "3"
    refused = command("rerun", "sweep/0", "script.UNIT=4", "tracking=none")
    assert refused.returncode == 2
    assert "did you mean script.UNITS?" in refused.stderr
