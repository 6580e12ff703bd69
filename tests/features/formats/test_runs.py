"""Runs and commands that export: each format is equal in its own runtime, or refused before the training."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.features.formats.formats import check_formats, list_formats
from tests.conftest import Command

BERT = (
    "{vocabulary_size: 50, num_layers: 1, num_heads: 2, hidden_dim: 8, intermediate_dim: 16, max_sequence_length: 16}"
)

#: Every model of the group, with data that it takes.
MODELS = {
    "mlp": ("dataset=digits",),
    "linear": ("dataset=digits",),
    "cnn": ("dataset=synthetic", "dataset.examples=100"),
    "resnet": ("dataset=synthetic", "dataset.examples=100"),
    "keras_application": ("dataset=synthetic", "dataset.examples=100"),
    "unet": ("dataset=shapes", "dataset.examples=100"),
    "dlrm": ("dataset=tickets", "dataset.examples=200"),
    "text": ("dataset=text_folder", "dataset.data_dir=texts", "dataset.tokens=8"),
    "transformer": ("dataset=text_folder", "dataset.data_dir=texts", "dataset.tokens=8", "model.width=8"),
    "gpt": ("dataset=tokens", "dataset.data_dir=corpus", "dataset.tokens=8", "model.width=8", "model.blocks=1"),
    "keras_hub": (
        *("dataset=text_folder", "dataset.data_dir=texts", "dataset.tokens=8"),
        *("model.backbone=BertBackbone", f"model.config={BERT}"),
    ),
}


def write_texts(folder: Path) -> None:
    for n, words in enumerate(("good nice great fine", "bad poor awful sad")):
        (folder / "texts" / f"class{n}").mkdir(parents=True)
        for k in range(20):
            picked = np.random.default_rng([n, k]).choice(words.split(), 6)
            (folder / "texts" / f"class{n}" / f"{k}.txt").write_text(" ".join(picked))
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("to be or not to be that is the question " * 60)


def list_installed() -> list[str]:
    found = []
    for name in list_formats():
        try:
            check_formats([name])
        except ConfigError:
            continue
        found.append(name)
    return found


def read_store(folder: Path, run_id: str) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    run = client.get_run(run_id)
    table = json.loads(Path(client.download_artifacts(run_id, "export/formats.json", str(folder))).read_text())
    (model,) = client.search_logged_models([run.info.experiment_id])
    files = sorted(path.relative_to(data).as_posix() for data in [find_data(model)] for path in data.rglob("model.*"))
    return run.data.metrics, table, files, run.data.tags


def find_data(model: Any) -> Path:
    return Path(model.artifact_location.removeprefix("file://")) / "data"


def check_equal(values: dict[str, float], name: str) -> None:
    if name == "litert_int8":
        assert values["accuracy"] >= values["reference"] - 0.01
    else:
        assert values["difference"] <= 1e-4
        assert values["accuracy"] == pytest.approx(values["reference"], abs=1e-6)
    assert values["mb"] > 0
    assert values["ms"] > 0


@pytest.mark.parametrize(
    "formats", [["litert", "onnx", "openvino"], pytest.param(None, marks=pytest.mark.slow)], ids=["three", "all"]
)
def test_a_run_exports_formats_that_answer_alike_and_convert_adds_more(
    command: Command, isolated: Any, formats: list[str] | None
) -> None:
    installed = [name for name in list_installed() if formats is None or name in formats]
    first = [name for name in installed if name != "onnx"]
    done = command("--json", "dataset=digits", "training.epochs=2", f"export.formats=[{','.join(first)}]")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    for name in first:
        assert re.search(
            rf"^{name} +test accuracy [\d.]+, [\d.e-]+ MB, [\d.e-]+ ms an example, largest diff", done.stdout, re.M
        )
    if "onnx" in installed:
        converted = command.python("-m", "scaleflow", "convert", answer["run_id"], "--json", "export.formats=[onnx]")
        assert converted.returncode == 0, converted.stderr
        (onnx,) = json.loads(converted.stdout.splitlines()[-1])["formats"]
        assert (onnx["name"], onnx["split"], onnx["examples"], onnx["error"]) == ("onnx", "test", 359, "")
    metrics, table, files, tags = isolated(read_store, command.folder, answer["run_id"])
    for name in installed:
        found = {key.rpartition("/")[2]: value for key, value in metrics.items() if key.startswith(f"export/{name}/")}
        check_equal({**found, "reference": metrics["test/accuracy"]}, name)
    assert table["columns"][:2] == ["format", "result"]
    assert {row[0]: row[1] for row in table["data"]} == dict.fromkeys(installed, "good")
    litert = [f"{name}/model.tflite" for name in ("litert", "litert_int8") if name in installed]
    assert {"model.keras", *litert} <= set(files)
    if "onnx" in installed:
        assert "onnx/model.onnx" in files
        assert tags["scaleflow.export.onnx"] == "good"
    refused = command.python("-m", "scaleflow", "convert", answer["run_id"], "export.formats=[onx]")
    assert (refused.returncode, "there is no format onx; did you mean onnx?" in refused.stderr) == (2, True)


def export_all(command: Command, words: Sequence[str]) -> tuple[list[str], str]:
    """Trains with all formats, or with those that the refusal leaves; returns these, and the output."""
    formats = list_installed()
    while True:
        done = command("training.max_steps=2", "tracking=none", f"export.formats=[{','.join(formats)}]", *words)
        if done.returncode == 0:
            return formats, done.stdout
        assert done.returncode == 2, done.stderr
        found = re.search(r"export\.formats: (\w+): .+; use export\.formats=\[(.+)\]\s*$", done.stderr)
        assert found is not None, done.stderr
        assert not re.search(r"Error:|Traceback|Exception", done.stderr), done.stderr
        assert not list(command.folder.glob("outputs/*/*/events.jsonl"))
        left = found[2].split(", ")
        assert set(left) < set(formats)
        formats = left


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_each_model_is_exported_and_equal_or_refused_before_the_training(command: Command, model: str) -> None:
    if model == "keras_hub":
        pytest.importorskip("keras_hub", reason="the extra hub is not installed")
    write_texts(command.folder)
    formats, output = export_all(command, (f"model={model}", *MODELS[model]))
    for name in formats:
        assert re.search(rf"^{name} +test .*largest difference", output, re.M), output
