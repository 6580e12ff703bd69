"""What people type out of the habits of other tools: each refusal says what to type, and that composes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from scaleflow.cli import main
from scaleflow.commands.table import list_commands, list_other_names
from scaleflow.config.synonyms import (
    OPTIONS,
    OTHER_COMMANDS,
    READERS,
    close_brackets,
    list_option_names,
    translate_key,
    translate_option,
)
from scaleflow.interfaces.features import list_option_files

#: What is typed, and what the refusal says to type instead.
TYPED = {
    "lr=0.01": "optimizer.learning_rate=0.01",
    "optimizer.lr=0.01": "optimizer.learning_rate=0.01",
    "trainer.max_epochs=3": "training.epochs=3",
    "batch=64": "training.batch_size=64",
    "per_device_train_batch_size=8": "training.batch_size=8",
    "gradient_accumulation_steps=4": "training.accumulate=4",
    "training.max_grad_norm=1": "training.clip_norm=1",
    "patience=3": "'training.early_stopping={patience: 3}'",
    "weight_decay=0.1": "optimizer=adamw optimizer.weight_decay=0.1",
    "gpus=2": "strategy=mirrored 'hardware.devices=[0,1]'",
    "strategy.gpus=1": "strategy=one_device",
    "devices=auto": "strategy=mirrored",
    "gpus=0": "hardware=cpu",
    "metrics=auc": "'objective.metrics=[auc]'",
    "num_workers=4": "dataset.threads=4",
    "num_nodes=4": "strategy=multi_worker cluster.workers=4",
    "hardware.gpus=2": "strategy=mirrored 'hardware.devices=[0,1]'",
    "hardware.gpu=0": "'hardware.devices=[0]'",
    "trainer.precision=bf16": "precision=mixed_bfloat16",
    "checkpoint.save_best_only=true": "checkpoint=best",
    "--model cnn": "model=cnn",
    "random_state=7": "seed=7",
    "output_dir=here": "hydra.run.dir=here",
    "mlflow_tracking_uri=http://a:1": "tracking.uri=http://a:1",
    "units=64": "model.units=64",
    "epochs=5": "training.epochs=5",
    "training.epoch=5": "training.epochs=5",
    "fp16=true": "precision=mixed",
    "--epochs 5": "training.epochs=5",
    "-e 5": "training.epochs=5",
    "--lr=0.1 --batch-size 64": "optimizer.learning_rate=0.1 training.batch_size=64",
    "--gpus 2 model=cnn": "strategy=mirrored 'hardware.devices=[0,1]'",
    "--fp16": "precision=mixed",
    "precision=fp16": "precision=mixed_float16",
    "precision=bf16": "precision=mixed_bfloat16",
    "precision=16-mixed": "precision=mixed_float16",
    "precision=amp": "precision=mixed",
    "strategy=ddp": "strategy=mirrored",
    "strategy=multi_gpu": "strategy=mirrored",
    "strategy=fsdp": "strategy=pipeline",
    "strategy=tpu_pod": "strategy=tpu",
    "model=resnet50": "model=keras_application model.name=ResNet50",
    "model=efficientnet_b0": "model=keras_application model.name=EfficientNetB0",
    "model=xgboost": "model=tabular",
    "model.units=[64,64": "'model.units=[64,64]'",
    "model.units=[64, 32]": "'model.units=[64,32]'",
    "'model.units=(64,32)'": "'model.units=[64,32]'",
    "model=cnn, optimizer=sgd": "type model=cnn",
    "tracking.run_name=my first run": "'tracking.run_name=my first run'",
    "dataset=my.csv": "dataset=table dataset.data_dir=my.csv dataset.target=price",
    "dataset=photos/": "dataset=image_folder dataset.data_dir=photos/",
    "my.csv": "dataset=table dataset.data_dir=my.csv dataset.target=price",
    "train": "scaleflow KEY=VALUE ...",
    "ui": "mlflow ui",
    "help predict": "scaleflow predict --help",
    "training.validation_split=0.2": "dataset.validation=0.2",
    "callbacks=early_stopping": "'training.early_stopping={patience: 5}'",
    "callbacks=[EarlyStopping]": "'training.early_stopping={patience: 5}'",
    "device=cuda": "hardware=gpu",
    "device=cuda:1": "'hardware.devices=[1]'",
    "device=cpu": "hardware=cpu",
    "train my.csv": "scaleflow dataset=table dataset.data_dir=my.csv dataset.target=price",
    "model.units = 64": "model.units=64",
    "model.units= 64": "model.units=64",
    "model.units =64": "model.units=64",
    "tracking=null": "tracking=none",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my.csv").write_text("a,price,b\n1,2.5,3\n")
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / "1.jpg").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("typed", TYPED)
def test_a_refusal_says_what_to_type_and_that_composes(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*shlex.split(typed), "--cfg", "job"]) == 2
    said = capsys.readouterr().err.strip()
    assert TYPED[typed] in said, said
    if not {"scaleflow", "mlflow"} & set(TYPED[typed].split()):
        words = shlex.split(TYPED[typed].removeprefix("type "))
        assert main([*words, "--cfg", "job"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("dataset.groups=customer", "type 'dataset.split={by: group, column: customer}'"),
        ("dataset.weights=w", "dataset=table, huggingface"),
        ("optimizer.decay=1e-6", "optimizer.schedule=cosine"),
        ("verbose=1", "each epoch has a line"),
        ("training.validate=0.2", "did you mean training.validate_every? It does not take the value 0.2"),
        ("~optimizer", "a run needs an option of optimizer, such as optimizer=adam"),
    ],
)
def test_a_refusal_says_what_there_is_in_place_of_what_is_absent(
    word: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word, "--cfg", "job"]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_a_file_with_its_target_is_a_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["my.csv", "--target", "price", "training.epochs=3", "--cfg", "job"]) == 0
    shown = capsys.readouterr().out
    assert "data_dir: my.csv" in shown
    assert "target: price" in shown
    assert main(["photos", "model=cnn", "--cfg", "job"]) == 0
    assert "data_dir: photos" in capsys.readouterr().out


def test_an_option_is_no_synonym_and_what_is_meant_exists() -> None:
    for group in {*OPTIONS, "cluster"}:
        table = list_option_names(group)
        options = {path.stem for path in list_option_files(group)}
        assert {meant.partition("=")[2] for meant in table.values()} <= options
        assert not {*table} & options
    assert set(READERS.values()) <= {path.stem for path in list_option_files("dataset")}
    assert not {*list_other_names()} & {*list_commands()}
    named = [name for command in list_commands().values() for name in command.other_names]
    assert len(list_other_names()) == len(OTHER_COMMANDS) + len(named)  # no name means two commands


def test_what_means_nothing_is_not_translated() -> None:
    assert translate_key("training.xyzzy", "1") == ""
    assert translate_key("training.epochs", "1") == ""  # it exists
    assert translate_option("model", "mlpp") == ""
    assert close_brackets("a=[1]") == ""


@pytest.mark.parametrize("name", ["predict", "promote", "evaluate"])
def test_a_command_names_all_that_it_lacks(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert "RUN_ID" in capsys.readouterr().err


def test_an_option_of_the_users_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my_conf" / "model").mkdir(parents=True)
    (folder / "my_conf" / "model" / "mine.yaml").write_text("_target_: nets.build\n")
    (folder / "nets.py").touch()
    assert main(["model=mine", "--cfg", "job"]) == 2
    assert "type --config-dir my_conf model=mine" in capsys.readouterr().err
    assert main(["model=nets.py", "--cfg", "job"]) == 2
    assert "DIR/model/NAME.yaml has the line _target_: nets.FUNCTION" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("evaluate --run-id 3", "evaluate RUN_ID"),
        ("evaluate RUN --dataset new.csv", "type dataset.data_dir=FILE"),
        ("predict RUN --input x --ouput y", "--ouput: there is no such flag; did you mean --output?"),
        ("rerun", "are required: RUN_ID; type "),
        ("evaluate RUN --xyzzy", "--xyzzy: there is no such flag (--json"),
        ("check --run abc", "check --against RUN_ID"),
    ],
)
def test_a_flag_that_a_command_lacks_says_what_it_has(
    typed: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed.split()) == 2
    assert expected in capsys.readouterr().err
