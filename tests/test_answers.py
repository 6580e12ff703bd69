"""Typical questions: the commands and snippets that answer them in docs/ work as they are written there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Command
from tests.processes import ROOT

MODELS = (ROOT / "docs" / "models.md").read_text()

SHORT = ("training.max_steps=3", "dataset.limit=64", "checkpoint=none", "evaluation=none")


def section(page: str, title: str) -> str:
    """The text of a section, without its title."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def commands(text: str) -> list[list[str]]:
    """The words of each scaleflow command, without comments."""
    return [shlex.split(line, comments=True) for line in re.findall(r"^    (?:python -m )?scaleflow (.*)$", text, re.M)]


def python_code(text: str) -> str:
    """The first block of Python."""
    code, *_ = re.findall(r"```python\n(.*?)```", text, re.S)
    return str(code)


def write_blocks(folder: Path) -> None:
    """Writes the files that the page about models shows."""
    for name, text in re.findall(r"<!-- test: (\S+) -->\n```\w+\n(.*?)```", MODELS, re.S):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def train(command: Command, *words: str) -> str:
    """Runs a command; returns the id of its run in MLflow."""
    ended = command(*words, *SHORT)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return str(re.findall(r"^run .*\((\w+)\)$", ended.stdout, re.M)[-1])


def run_code(command: Command, code: str) -> str:
    """What a Python program prints in the test's folder, in an interpreter of its own."""
    (command.folder / "answer.py").write_text(code)
    ended = command.cold("answer.py")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def read_weights(path: str) -> dict[str, np.ndarray[Any, Any]]:
    import keras

    return {weight.path: weight.numpy() for weight in keras.models.load_model(path).weights}


def test_every_block_of_code_about_models_is_tried() -> None:
    assert MODELS.count("<!-- test: ") == len(re.findall(r"^```(?:python|yaml)$", MODELS, re.M))


@pytest.mark.slow  # test_readme.py trains one
def test_my_own_keras_model_trains(command: Command) -> None:
    write_blocks(command.folder)
    (words,) = commands(section("models", "Use your own Keras model"))
    ended = command(*words, *SHORT, "tracking=none")
    assert ended.returncode == 0, ended.stderr
    assert "digits-small-" in ended.stdout


@pytest.mark.slow  # three runs
def test_a_frozen_backbone_keeps_its_weights(command: Command, isolated: Callable[..., Any]) -> None:
    run_id, weights = "", []
    text = "\n".join(section("fine-tuning", title) for title in ("Train the head only", "Then unfreeze"))
    for seed, words in enumerate(commands(text)):
        typed = [word.replace("RUN_ID", run_id) for word in words]
        run_id = train(command, *typed, f"seed={seed}", f"hydra.run.dir=runs/{seed}")
        weights.append(isolated(read_weights, str(command.folder / f"runs/{seed}/model/model.keras")))
    assert len(weights) == 3
    for name in weights[0]:
        first, frozen, last = (each[name] for each in weights)
        assert np.array_equal(first, frozen) == (not name.startswith("outputs"))
        assert not np.array_equal(frozen, last)


@pytest.mark.slow  # objective/test_runs.py records one
def test_an_auc_is_recorded(command: Command) -> None:
    (words,) = commands(section("models", "Metrics such as AUC or F1"))
    run_id = train(command, *words)
    from mlflow import MlflowClient

    metrics = MlflowClient(f"sqlite:///{command.folder}/mlflow.db").get_run(run_id).data.metrics
    assert all(0 <= metrics[f"{split}/auc"] <= 1 for split in ("train", "val", "test"))


@pytest.mark.slow  # a run, and a model that is loaded
def test_a_registered_model_is_loaded_in_another_program(command: Command) -> None:
    text = section("tracking", "Load the model in another service").replace("http://HOST:5000", "sqlite:///mlflow.db")
    (words,) = commands(text)
    train(command, *words)
    code = "import numpy as np\n\nbatch = np.zeros([3, 8, 8, 1], 'float32')\n" + python_code(text)
    assert run_code(command, code + "print(len(rows), *rows.columns[:3])") == "3 prediction probability probability_0\n"


@pytest.mark.slow  # a run, and a model that is loaded
def test_a_model_of_own_text_writes(command: Command) -> None:
    (command.folder / "my_texts").mkdir()
    (command.folder / "my_texts" / "fox.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 200)
    words, _ = commands(section("language-models", "Train a GPT on your own text"))
    small = ("dataset.tokens=128", "model.width=8", "model.heads=2", "model.blocks=1", "training.batch_size=4")
    ended = command(*words, *small, *SHORT)
    assert ended.returncode == 0, ended.stderr
    assert "val/bits_per_byte" in {key for event in command.events() for key in event.get("values", {})}
    (model,) = re.findall(r"^model +(models:/\S+)$", ended.stdout, re.M)
    code = python_code(section("language-models", "Let the model write")).replace("RUN_ID", model)
    code = code.replace("tokens=300", "tokens=20")
    printed = run_code(command, code + "print(0 < len(text) <= 20)")
    assert printed.endswith("True\n")


@pytest.mark.slow  # predict/test_command.py trains on one
def test_a_parquet_file_trains(command: Command) -> None:
    import pandas as pd

    random = np.random.default_rng(0)
    table = pd.DataFrame({"rooms": random.integers(1, 9, 64), "price": random.normal(size=64)})
    table.to_parquet(command.folder / "house.parquet")
    words, *_ = commands(section("data", "Train on a table"))
    ended = command(*words, *SHORT, "tracking=none")
    assert ended.returncode == 0, ended.stderr
    assert "test mae" in ended.stdout
