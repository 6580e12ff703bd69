"""The run of a script: Keras trains as in plain Python, and everything is recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from scaleflow.features.script.events import ParamsLogged, ScriptPrinted
from scaleflow.interfaces.events import (
    ArtifactWritten,
    DatasetDescribed,
    EpochEnded,
    Event,
    FaultReported,
    ModelExported,
    Note,
    RunEnded,
    RunReady,
    RunRefused,
    StepsPlanned,
    TagsSet,
)
from tests.features.script.runs import join_histories, read_points, record_script, run_plainly

TRAIN = """
import sys

import keras
import numpy as np

EPOCHS = 2
UNITS = 8

keras.utils.set_random_seed(7)
x = np.random.rand(96, 4).astype("float32")
y = (x.sum(1) > 2).astype("int32")
print("arguments", sys.argv[1:])
model = keras.Sequential([
    keras.Input((4,)),
    keras.layers.Dense(UNITS, activation="relu"),
    keras.layers.Dropout(0.3),
    keras.layers.Dense(2, activation="softmax"),
])
model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x, y, epochs=EPOCHS, batch_size=32, validation_split=0.25, class_weight={0: 1.0, 1: 2.0})
model.layers[0].trainable = False
model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, epochs=1)
loss, accuracy = model.evaluate(x, y)
assert 0 <= accuracy <= 1
"""

#: Trains with a loss that Keras does not know, and returns it.
OWN_STEP = """
import keras
import numpy as np
import tensorflow as tf

OWN_LOSS = True

class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs):
        return self.layer(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = tf.reduce_mean(tf.square(predicted - y)) if OWN_LOSS else self.compute_loss(x, y, predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"own_loss": loss}

x = np.linspace(0, 1, 256, dtype="float32").reshape(64, 4)
model = Own()
model.compile("sgd", "mse")
model.fit(x, x.sum(1, keepdims=True) ** 2, batch_size=16, epochs=2, shuffle=False)
"""


@pytest.fixture
def record(isolated: Callable[..., Any], tmp_path: Path) -> Callable[..., list[Event]]:
    """`record(text, "strategy=mirrored")`: the events of a script with this text."""

    def run(text: str, *words: str, stops_after: float | None = None) -> list[Event]:
        (tmp_path / "train.py").write_text(text)
        events: list[Event] = isolated(record_script, ["train.py", *words], str(tmp_path), stops_after)
        return events

    return run


def find(events: Sequence[Event], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def read_params(events: Sequence[Event]) -> dict[str, str]:
    params = dict(find(events, RunReady)[0].params)
    for event in find(events, ParamsLogged):
        params |= event.values
    return params


def read_output(events: Sequence[Event]) -> str:
    return "\n".join(event.text for event in find(events, ScriptPrinted))


def test_it_trains_with_the_bits_of_plain_python_and_records_its_history(
    record: Callable[..., list[Event]], isolated: Callable[..., Any], tmp_path: Path
) -> None:
    events = record(TRAIN, "--", "--lr", "3")
    histories = isolated(run_plainly, "train.py", str(tmp_path))
    points = read_points(events)
    for name, values in join_histories(histories).items():
        assert [value for _, value in points[name]] == values, name
    assert [step for step, _ in points["train/loss"]] == [3, 6, 9], "updates of both fits"
    assert [step for step, _ in points["test/accuracy"]] == [9]
    assert "arguments ['--lr', '3']" in read_output(events)
    assert "━" not in read_output(events), "Keras's progress bar"
    assert [(event.epoch, event.epochs) for event in find(events, EpochEnded)] == [(1, 2), (2, 2), (1, 1)]
    assert (find(events, RunReady)[0].steps, find(events, StepsPlanned)[0].steps) == (6, 9), "for the progress"
    expected = {
        "script.EPOCHS": "2",
        "script.arguments": "--lr 3",
        "fit.batch_size": "32",
        "fit.class_weight": "{0: 1.0, 1: 2.0}",
        "fit_2.epochs": "1",
        "fit_2.optimizer": "SGD",
        "loss": "sparse_categorical_crossentropy",
        "optimizer": "Adam",
        "resolved.strategy": "one_device",
    }
    params = read_params(events)
    assert {name: params.get(name) for name in expected} == expected
    assert float(params["optimizer.learning_rate"]) == pytest.approx(0.01)
    assert "seed" not in params
    assert isinstance(events[-1], RunEnded)
    assert events[-1].status == "FINISHED"
    (data,) = find(events, DatasetDescribed)
    assert list(data.splits) == ["train"], "the script trains and evaluates with the same arrays"
    assert data.splits["train"]["examples"] == 96
    assert data.splits["train"]["inputs"] == {"dtype": "float32", "shape": [4]}


def test_the_command_changes_constants_arguments_of_fit_and_the_rate(record: Callable[..., list[Event]]) -> None:
    words = ("script.UNITS=3", "script.EPOCHS=1", "fit.batch_size=8", "optimizer.learning_rate=0.5")
    params = read_params(record(TRAIN, *words))
    assert params["resolved.parameters"] == "23"  # 4 x 3 + 3, 3 x 2 + 2
    assert (params["fit.epochs"], params["fit.batch_size"]) == ("1", "8")
    assert float(params["optimizer.learning_rate"]) == 0.5


@pytest.mark.parametrize("own", ["true", "false"])
def test_an_own_step_trains_the_same_on_two_replicas(record: Callable[..., list[Event]], own: str) -> None:
    one = read_points(record(OWN_STEP, f"script.OWN_LOSS={own}"))
    two = read_points(record(OWN_STEP, f"script.OWN_LOSS={own}", "strategy=mirrored", "hardware.logical_devices=2"))
    first = [value for _, value in one["train/own_loss"]]
    second = [value for _, value in two["train/own_loss"]]
    assert len(first) == 2
    # Keras reports the last batch; the replicas report the mean of its two halves.
    assert second == pytest.approx(first, rel=1e-5)


MLFLOW = """
import keras
import mlflow
import numpy as np

mlflow.set_experiment("elsewhere")
with mlflow.start_run(run_name="mine"):
    mlflow.log_params({"alpha": 0.5, "fit.epochs": 7})
    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            mlflow.log_metric("own", epoch + 1.5)
            mlflow.log_text(f"epoch {epoch}", "notes/log.txt")
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((32, 3), "float32")
    model.fit(x, x[:, 0], epochs=2, callbacks=[Own()])
    mlflow.set_tag("who", "me")
    try:
        mlflow.log_text("x", "../outside.txt")
    except ValueError as error:
        print("refused", error)
"""


def test_a_run_of_mlflow_without_a_name_draws_the_random_numbers_that_mlflow_draws(
    record: Callable[..., list[Event]],
) -> None:
    text = "import random\nimport mlflow\nrandom.seed(3)\nmlflow.start_run()\nprint('drawn', random.random())\n"
    named = text.replace("start_run()", "start_run(run_name='mine')")
    expected = "import random\nfrom mlflow.utils.name_utils import _generate_random_name\nrandom.seed(3)\n"
    expected += "_generate_random_name()\nprint('drawn', random.random())\n"
    outputs = [read_output(record(script)) for script in (text, named, expected)]
    assert outputs[0] == outputs[2]
    assert outputs[0] != outputs[1]


def test_calls_of_mlflow_go_to_the_run(record: Callable[..., list[Event]]) -> None:
    events = record(MLFLOW)
    assert read_points(events)["own"] == [(0, 1.5), (1, 2.5)]
    params = read_params(events)
    assert (params["alpha"], params["fit.epochs"]) == ("0.5", "7")
    tags: dict[str, str] = {}
    for event in find(events, TagsSet):
        tags |= event.values
    assert tags == {"mlflow.runName": "mine", "who": "me"}
    files = [(Path(event.path).read_text(), event.folder) for event in find(events, ArtifactWritten)]
    assert files == [("epoch 0", "notes"), ("epoch 1", "notes")]
    notes = " ".join(event.text for event in find(events, Note))
    assert "mlflow.set_experiment has no effect in a script" in notes
    assert "the param fit.epochs keeps its first value, 7" in notes
    assert "refused mlflow: the artifact '../outside.txt' would leave the folder" in read_output(events)


def test_a_script_that_fails_before_it_trains_has_no_run(record: Callable[..., list[Event]]) -> None:
    events = record("import keras\n\ndef load():\n    raise OSError('no data')\n\nload()\n")
    assert not find(events, RunReady)
    refusal = events[-1]
    assert isinstance(refusal, RunRefused)
    assert refusal.died
    assert "line 6, in <module>\n    load()\n" in refusal.message
    assert "OSError: no data" in refusal.message
    assert "scaleflow" not in refusal.message.replace("test_a_script", "")


def test_a_script_that_fails_later_fails_its_run(record: Callable[..., list[Event]]) -> None:
    events = record(f"{TRAIN}\nraise RuntimeError('late')\n")
    assert find(events, RunReady)
    assert find(events, FaultReported)[-1].error == "RuntimeError: late"
    output = read_output(events)
    assert output.endswith("RuntimeError: late")
    assert "keras_calls.py" not in output


@pytest.mark.parametrize(("call", "is_good"), [("sys.exit(0)", True), ("sys.exit()", True), ("exit(3)", False)])
def test_sys_exit_ends_the_run_with_its_code(record: Callable[..., list[Event]], call: str, is_good: bool) -> None:
    events = record(f"import sys\nimport mlflow\nmlflow.log_metric('a', 1)\n{call}\n")
    assert read_points(events)["a"] == [(0, 1.0)]
    assert isinstance(events[-1], RunEnded if is_good else FaultReported)
    if not is_good:
        assert events[-1].error == "the script ended with sys.exit(3)"


#: Registers functions for its end, and then leaves with a text.
LEAVING = """
import atexit
import sys
import mlflow

def fail():
    raise ValueError("in the end")

atexit.register(print, "last")
atexit.register(fail)
atexit.register(print, "never")
atexit.register(mlflow.log_metric, key="late", value=2)
atexit.unregister(print)
atexit.register(print, "first")
mlflow.log_metric("a", 1)
CODE = "no data"
sys.exit(CODE)
"""


@pytest.mark.parametrize("code", ["no data", "null"])
def test_functions_of_atexit_run_before_the_run_ends(record: Callable[..., list[Event]], code: str) -> None:
    events = record(LEAVING.replace('"no data"', "None") if code == "null" else LEAVING)
    output = read_output(events).splitlines()
    assert output[0] == "first"
    assert "ValueError: in the end" in output
    assert "last" not in output, "unregistered"
    assert read_points(events)["late"] == [(0, 2.0)]
    if code == "null":
        assert events_end(events) == "FINISHED"
    else:
        assert output[-1] == "no data"
        assert events[-1].error == "the script ended with sys.exit('no data')"


#: Evaluates two models with different metrics, and one of them on two sets of data.
TWO_MODELS = """
import keras
import numpy as np

def make(metric):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[metric])
    return model

x = np.linspace(0, 1, 96, dtype="float32").reshape(32, 3)
y = x[:, :1]
first = make("mae")
second = make("mape")
first.fit(x, y)
first.evaluate(x, y)
second.fit(x, y)
second.evaluate(x, y)
print(second.evaluate(x, 1 + y)[0])
first.evaluate(x, y)
"""


def test_the_last_evaluation_of_the_last_model_is_the_test(record: Callable[..., list[Event]]) -> None:
    events = record(TWO_MODELS)
    points = read_points(events)
    assert sorted(name for name in points if name.startswith("test/")) == ["test/loss", "test/mape"]
    ((step, loss),) = points["test/loss"]
    assert step == 2
    assert loss == pytest.approx(float(read_output(events)))
    others = sorted(name for name in points if name.startswith("evaluate_"))
    assert others == [
        *("evaluate_1/loss", "evaluate_1/mae", "evaluate_2/loss", "evaluate_2/mape"),
        *("evaluate_4/loss", "evaluate_4/mae"),
    ]


OWN_STRATEGY = """
import keras
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy(["CPU:0"])
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((32, 3), "float32")
model.fit(x, x[:, 0])
"""


def test_an_own_strategy_is_kept_or_refused_with_its_line(record: Callable[..., list[Event]]) -> None:
    kept = record(OWN_STRATEGY)
    assert events_end(kept) == "FINISHED"
    assert any("line 6: the script creates its own strategy" in event.text for event in find(kept, Note))
    refused = record(OWN_STRATEGY, "strategy=mirrored")[-1]
    assert isinstance(refused, RunRefused)
    assert refused.message == (
        "strategy=mirrored: the script creates its own tf.distribute.MirroredStrategy in line 6; remove it from the "
        "script, or leave strategy out of the command"
    )


def events_end(events: Sequence[Event]) -> str:
    end = events[-1]
    assert isinstance(end, RunEnded)
    return end.status


PRECISION = "import keras\nkeras.mixed_precision.set_global_policy('mixed_float16')\n"


def test_a_typed_precision_and_a_typed_seed_win_over_the_script(record: Callable[..., list[Event]]) -> None:
    refused = record(PRECISION, "precision=mixed_bfloat16")[-1]
    assert isinstance(refused, RunRefused)
    assert "precision=mixed_bfloat16: the script sets its own dtype policy in line 2" in refused.message
    assert events_end(record(PRECISION)) == "FINISHED"
    seeds = "import keras\nkeras.utils.set_random_seed(7)\nimport random\nprint('drawn', random.random())\n"
    runs = [record(seeds, *words) for words in ([], ["seed=1"], ["seed=1"], ["seed=2"])]
    outputs = [read_output(events) for events in runs]
    assert outputs[1] == outputs[2]
    assert len(set(outputs)) == 3
    notes = [event.text for event in find(runs[1], Note)]
    assert notes.count("seed=1 of the command replaces the seeds of the script") == 1


ENDLESS = """
import keras
import numpy as np
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((32, 3), "float32")
try:
    model.fit(x, x[:, 0], epochs=10_000_000)
except Exception:
    print("caught")
print("went on")
"""


def test_a_stop_ends_the_script(record: Callable[..., list[Event]]) -> None:
    events = record(ENDLESS, stops_after=3.0)
    assert events_end(events) == "KILLED"
    assert "caught" not in read_output(events)
    assert "went on" not in read_output(events)
    assert not find(events, ModelExported)


#: Gets Ctrl-C in a fit, which it catches, and then in code of its own.
INTERRUPTED = """
import os
import signal
import time

import keras
import numpy as np

class Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            os.kill(os.getpid(), signal.SIGINT)

model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((32, 3), "float32")
IN_FIT = True
try:
    if IN_FIT:
        model.fit(x, x[:, 0], epochs=10_000_000, callbacks=[Interrupt()])
    else:
        model.fit(x, x[:, 0])
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)
except KeyboardInterrupt:
    print("caught")
    model.save("model.keras")
print("went on")
"""


@pytest.mark.parametrize("in_fit", ["true", "false"])
def test_a_script_may_catch_ctrl_c_and_save_its_model(
    record: Callable[..., list[Event]], tmp_path: Path, in_fit: str
) -> None:
    events = record(INTERRUPTED, f"script.IN_FIT={in_fit}")
    assert read_output(events) == "caught\nwent on"
    assert (tmp_path / "model.keras").is_file()
    assert events_end(events) == "KILLED"


def test_a_script_without_fit_runs_and_says_what_is_missing(record: Callable[..., list[Event]]) -> None:
    events = record("import mlflow\nmlflow.log_param('a', 1)\nprint('done', end='')\n")
    assert read_output(events) == "done"
    assert read_params(events)["a"] == "1"
    assert any("never called model.fit" in event.text for event in find(events, Note))
    assert events_end(events) == "FINISHED"


def test_variables_that_a_script_sets_too_late_are_named(record: Callable[..., list[Event]]) -> None:
    setting = "import os\nos.environ['TF_ENABLE_ONEDNN_OPTS'] = 'maybe'\nos.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\n"
    events = record(setting + ENDLESS.replace("10_000_000", "1"))
    (note,) = [event.text for event in find(events, Note) if "the script sets" in event.text]
    assert "the script sets TF_ENABLE_ONEDNN_OPTS after TensorFlow is imported" in note


def test_another_backend_than_tensorflow_is_refused(record: Callable[..., list[Event]]) -> None:
    events = record("import os\nos.environ['KERAS_BACKEND'] = 'jax'\n" + ENDLESS)
    assert isinstance(events[-1], RunRefused)
    assert "KERAS_BACKEND=jax: the script sets it" in events[-1].message


#: Reads its data from a generator, clips the gradients, and reads a count of the optimizer.
GENERATOR = """
import keras
import numpy as np

def batches():
    for number in range(8):
        x = np.linspace(number, number + 1, 32, dtype="float32").reshape(8, 4) / 8
        print("batch", number)
        yield x, 50 * x.sum(1, keepdims=True)

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
model.compile(keras.optimizers.SGD(0.1, clipnorm=1.0), "mse")
model.fit(batches(), steps_per_epoch=4, epochs=2)
print("updates", int(model.optimizer.iterations))
"""


def test_two_replicas_read_each_batch_of_a_generator_and_clip_as_one_device(
    record: Callable[..., list[Event]],
) -> None:
    one = record(GENERATOR)
    two = record(GENERATOR, "strategy=mirrored", "hardware.logical_devices=2")
    first = read_points(one)["train/loss"]
    second = read_points(two)["train/loss"]
    assert [step for step, _ in second] == [4, 8]
    assert [value for _, value in second] == pytest.approx([value for _, value in first], rel=1e-5)
    assert read_output(two).count("batch ") == 8
    assert "updates 8" in read_output(two)


def test_params_of_other_runs_do_not_name_scripts(isolated: Callable[..., Any], tmp_path: Path) -> None:
    params = isolated(list_default_params, str(tmp_path))
    assert "model" in params
    assert not [name for name in params if name.startswith("script")]


def list_default_params(folder: str) -> list[str]:
    """The names of the params of a run without a script."""
    from types import SimpleNamespace

    from scaleflow.config.compose import compose_config
    from scaleflow.launcher.prepare import make_plan
    from scaleflow.worker.ready import list_params

    setup: Any = SimpleNamespace(facts=SimpleNamespace(resolved={}, counts={}))
    return list(list_params(make_plan(compose_config(["tracking=none", f"hydra.run.dir={folder}"])), setup))


#: Trains with a loss that is the sum over the examples.
SUM = """
import keras
import numpy as np
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
model.compile(keras.optimizers.SGD(1e-3), keras.losses.MeanSquaredError(reduction="sum"))
x = np.linspace(0, 1, 256, dtype="float32").reshape(64, 4)
model.fit(x, 3 * x.sum(1, keepdims=True), batch_size=16, epochs=3, shuffle=False)
"""


def test_a_sum_over_the_examples_is_a_sum_over_the_replicas(record: Callable[..., list[Event]]) -> None:
    one = read_points(record(SUM))["train/loss"]
    two = read_points(record(SUM, "strategy=mirrored", "hardware.logical_devices=2"))["train/loss"]
    assert [value for _, value in two] == pytest.approx([value for _, value in one], rel=1e-5)


def test_an_own_loss_on_replicas_has_a_note(record: Callable[..., list[Event]]) -> None:
    events = record(OWN_STEP, "strategy=mirrored", "hardware.logical_devices=2")
    assert any("counts as a mean over the examples" in event.text for event in find(events, Note))
    assert not any("counts as a mean" in event.text for event in find(record(OWN_STEP), Note))


CHILDREN = """
import multiprocessing
import threading
import time

import mlflow

def work():
    mlflow.log_metric("child", 1)
    time.sleep(600)

context = multiprocessing.get_context("fork")
child = context.Process(target=work)
child.start()
time.sleep(0.5)
child.terminate()
child.join(60)
print("ended with", child.exitcode)
threading.Thread(target=lambda: (time.sleep(0.5), print("thread", flush=True))).start()
"""


def test_processes_and_threads_of_a_script_end_as_in_plain_python(record: Callable[..., list[Event]]) -> None:
    events = record(CHILDREN)
    output = read_output(events)
    assert "ended with -15" in output
    assert "thread" in output
    assert "child" not in read_points(events), "a forked process records nothing"
    assert events_end(events) == "FINISHED"


#: Prints with other means than `print`.
OTHER_OUTPUT = """
import multiprocessing
import os
import subprocess
import sys

import tensorflow as tf

print("first")
subprocess.run(["echo", "from a program"])
print("second")
os.system("printf unended")
print()
sys.stdout.buffer.write(b"bytes\\n")
subprocess.run(["echo", "into stdout"], stdout=sys.stdout)
child = multiprocessing.get_context("fork").Process(target=print, args=("from a child",), kwargs={"flush": True})
child.start()
child.join()

@tf.function
def show(x):
    tf.print("from TensorFlow", x)

show(tf.constant(7))
subprocess.run(["sh", "-c", "yes | head -100000 | tr -d '\\n'"])
print("last")
"""


def test_output_of_programs_and_children_is_shown_in_order(record: Callable[..., list[Event]]) -> None:
    lines = read_output(record(OTHER_OUTPUT)).splitlines()
    assert lines[:4] == ["first", "from a program", "second", "unended"]
    assert lines[4:8] == ["bytes", "into stdout", "from a child", "from TensorFlow 7"]
    assert len(lines) == 9
    assert lines[8].count("y") == 100_000, "more than a pipe holds"
    assert lines[8].endswith("ylast")


def test_code_of_a_notebook_can_be_compiled_by_tensorflow(isolated: Callable[..., Any], tmp_path: Path) -> None:
    code = (
        "import tensorflow as tf\n@tf.function\ndef count(n):\n    total = 0\n    for i in tf.range(n):\n"
        "        if i > 1:\n            total += i\n    return total\nprint('total', int(count(4)))\n"
    )
    cell = {"cell_type": "code", "source": code.splitlines(keepends=True)}
    (tmp_path / "train.ipynb").write_text(json.dumps({"cells": [cell]}))
    events = isolated(record_script, ["train.ipynb"], str(tmp_path), None)
    assert "total 5" in read_output(events)


def test_words_after_the_dashes_reach_the_script_as_typed(record: Callable[..., list[Event]]) -> None:
    events = record("import sys\nprint(sys.argv[1:])\n", "--", "${oc.env:HOME}", "${foo}", "a,b=[c]", "")
    assert read_output(events) == "['${oc.env:HOME}', '${foo}', 'a,b=[c]', '']"


def test_the_client_of_mlflow_is_refused_in_words(record: Callable[..., list[Event]]) -> None:
    events = record("import mlflow\nmlflow.MlflowClient()\n")
    assert "a script has no connection to the store while it runs" in events[-1].message
