"""`from scaleflow import run, compose`, as scripts, threads, notebooks and other Hydra apps use it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf

import scaleflow
from scaleflow.errors import ConfigError, RunError
from scaleflow.launcher.command_exit import Outcome
from tests.conftest import Command

SHORT = ("dataset.limit=100", "training.epochs=1", "debug=inline", "tracking=none", "hardware=cpu")

#: A script without a guard, its model beside it, called from another folder; the run is started in a thread.
SCRIPT = """
import json, sys, threading
import scaleflow

try:
    scaleflow.run("training.epochs=0")
except scaleflow.ConfigError as refusal:
    refused = str(refusal)

results = []
words = ["model=mine", "dataset.limit=100", "training.epochs=1", "hydra.run.dir=out"]
thread = threading.Thread(target=lambda: results.append(scaleflow.run(*words, config_dir="{conf}")))
thread.start()
thread.join()
(result,) = results
assert "tensorflow" not in sys.modules
told = [refused, result.run_id, result.status, str(result.folder), dict(result.metrics), result.model_uri]
print(json.dumps(told))
"""


@pytest.mark.slow
def test_a_script_without_a_guard_trains_and_gets_the_result(command: Command) -> None:
    own = command.folder / "scripts"
    (own / "conf" / "model").mkdir(parents=True)
    (own / "conf" / "model" / "mine.yaml").write_text("_target_: own_net.build\n_partial_: true\n")
    (own / "own_net.py").write_text(
        "from scaleflow.model import mlp\n\n\ndef build(inputs, outputs):\n    return mlp.build(inputs, outputs, [8])\n"
    )
    (own / "train.py").write_text(SCRIPT.replace("{conf}", str(own / "conf")))
    ended = command.python("scripts/train.py")
    assert ended.returncode == 0, ended.stderr + ended.stdout
    refused, run_id, status, folder, metrics, model_uri = json.loads(ended.stdout.splitlines()[-1])
    assert refused == "training.epochs=0: expected an integer, at least 1 or by_size"
    assert (status, folder) == ("FINISHED", str(command.folder / "out"))
    from mlflow import MlflowClient

    run = MlflowClient(f"sqlite:///{command.folder}/mlflow.db").get_run(run_id)
    assert [f"models:/{output.model_id}" for output in run.outputs.model_outputs] == [model_uri]
    assert run.data.metrics["test/accuracy"] == metrics["test/accuracy"]
    assert run.data.tags["mlflow.source.name"] == "scripts/train.py"
    assert run.data.tags["scaleflow.command"] == "python scripts/train.py"
    assert {"scaleflow.host", "scaleflow.version.tensorflow", "mlflow.user"} <= set(run.data.tags)
    assert run.data.params["model"] == "mine"


def runs_in_this_process(folder: str) -> dict[str, Any]:
    """What comes of a config that was changed, run in a thread; of a run that fails; of resuming."""
    os.chdir(folder)
    found: dict[str, Any] = {}
    config = scaleflow.compose("model=cnn", *SHORT)
    config.model = scaleflow.compose("model=linear").model
    config.seed = 5

    def in_a_thread() -> None:
        found["run"] = scaleflow.run(config, folder="thread")

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    try:
        scaleflow.run(*SHORT, "optimizer=sgd", "optimizer.learning_rate=1e30", "hydra.run.dir=bad")
    except scaleflow.RunFailed as failed:
        found["failed"] = (str(failed), failed.result)
    found["over"] = scaleflow.run("resume=thread")
    found["further"] = scaleflow.run("resume=thread", "training.epochs=2")
    return found


@pytest.mark.slow
def test_runs_in_this_process(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(runs_in_this_process, str(tmp_path), timeout=240)
    first = found["run"]
    assert (first.status, first.run_id, first.folder) == ("FINISHED", None, tmp_path / "thread")
    assert first.model_uri is None
    assert {name: points[max(points)] for name, points in first.history.items()} == first.metrics
    assert {"train/loss", "val/accuracy", "test/accuracy"} <= set(first.metrics)
    kept = OmegaConf.load(first.folder / "config.yaml")
    assert (kept.seed, kept.model._target_) == (5, "scaleflow.model.linear.build")
    message, failed = found["failed"]
    assert "not finite" in message
    assert (failed.status, failed.folder) == ("FAILED", tmp_path / "bad")
    assert "not finite" in failed.error
    assert found["over"] == first
    assert found["further"].folder == first.folder
    further = found["further"]
    assert further.metrics["val/loss"] != first.metrics["val/loss"]
    assert len(further.history["val/loss"]) == 2
    assert further.history["val/loss"].items() > first.history["val/loss"].items()
    table = pandas.DataFrame(further.history).sort_index()
    assert list(table["val/loss"].dropna()) == list(further.history["val/loss"].values())
    assert table.index[-1] == max(further.history["val/loss"])


def test_hydras_state_is_left_as_it_was() -> None:
    with initialize_config_module("scaleflow.conf", version_base="1.2"):
        app, version = GlobalHydra.instance().hydra, VersionBase.instance().getbase()
        assert scaleflow.compose("model=cnn").model._target_ == "scaleflow.model.cnn.build"
        with pytest.raises(scaleflow.ConfigError):
            scaleflow.compose("model=cnnn")
        assert (GlobalHydra.instance().hydra, VersionBase.instance().getbase()) == (app, version)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("model=cnnn",), "model=cnnn: there is no such option; did you mean cnn?"),
        (("training.epoch=3",), "training.epoch: there is no such key; did you mean training.epochs"),
        (("seed=1,2",), "seed: several values make a sweep"),
        (("-m", "seed=1"), "-m: expected an override KEY=VALUE, not a flag"),
        (("experiment=strategy_benchmark",), "experiment=strategy_benchmark: this recipe is a sweep"),
        (("sweep.repeat=2",), "sweep.repeat=2: applies only to the jobs of a sweep"),
        (("nonsense",), "nonsense: cannot be read as KEY=VALUE"),
        (("dataset=csv", "tracking=none"), "dataset.data_dir, dataset.target: have no default"),
        (("model._target_=__main__.build", "tracking=none"), "the worker is a separate process"),
        (("resume=nowhere",), "resume=nowhere: expected the folder of a run"),
        (({"seed": 3, "modle": {}},), "modle: there is no such key"),
        ((3,), "run(int): expected overrides KEY=VALUE, or one config"),
        (("dataset=digits model=mlp",), 'write run("dataset=digits", "model=mlp")'),
        (("seed=1", {"seed": 3}), "run(..., dict): expected overrides KEY=VALUE, or one config alone"),
    ],
)
def test_refusals_are_raised(
    words: tuple[Any, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    if isinstance(words[0], dict):
        words = ({**OmegaConf.to_container(scaleflow.compose("tracking=none")), **words[0]},)  # type: ignore[dict-item]
    with pytest.raises(scaleflow.ConfigError) as refused:
        scaleflow.run(*words)
    assert expected in str(refused.value)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_a_config_dir_that_is_none_is_refused() -> None:
    with pytest.raises(scaleflow.ConfigError, match="--config-dir nowhere: there is no such folder"):
        scaleflow.compose(config_dir="nowhere")


def test_compose_gives_a_config_that_can_be_changed() -> None:
    config = scaleflow.compose("model=cnn", "training.epochs=3", "dataset=synthetic", "seed=4")
    assert isinstance(config, DictConfig)
    assert "hydra" not in config
    assert config.training.epochs == 3
    assert config.dataset.seed == 4
    config.seed = 5
    assert config.dataset.seed == 5


def test_a_run_that_failed_is_a_run_error() -> None:
    assert issubclass(scaleflow.RunFailed, RunError)
    assert scaleflow.ConfigError is not scaleflow.RunFailed
    assert {"run", "compose"} <= set(dir(scaleflow))
    with pytest.raises(AttributeError, match="no attribute 'walk'"):
        scaleflow.walk  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(("code", "raised"), [(130, KeyboardInterrupt), (143, SystemExit), (2, ConfigError)])
def test_a_signal_before_the_run_is_ready_is_no_refusal(
    monkeypatch: pytest.MonkeyPatch, code: int, raised: type[BaseException]
) -> None:
    def launch(*_: Any) -> tuple[Outcome, Path]:
        return Outcome(code, error="stopped by a signal"), Path()

    monkeypatch.setattr("scaleflow.api.launch_prepared", launch)
    with pytest.raises(raised):
        scaleflow.run("tracking=none")


def test_a_key_as_an_argument_is_refused_with_the_override_to_write() -> None:
    with pytest.raises(scaleflow.ConfigError) as refused:
        scaleflow.run("model=mlp", epochs=3)
    assert str(refused.value) == 'run(epochs=...): write config keys as text: run("training.epochs=3")'
    with pytest.raises(scaleflow.ConfigError, match=r"run\(colour=...\): there is no such argument"):
        scaleflow.run(colour=3)
    with pytest.raises(scaleflow.ConfigError, match=r'write run\("model=mlp", "training.epochs=3"\)'):
        scaleflow.run({"model": "mlp", "epochs": 3})
    assert scaleflow.compose("model=mlp", "training.epochs=3").training.epochs == 3
