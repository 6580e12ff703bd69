"""Runs with losses, metrics and class weights of a config: watched, evaluated, resumed, on every strategy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from scaleflow.interfaces import Arrays, Stream
from scaleflow.interfaces.formatting import format_number
from tests.conftest import Command
from tests.features.compare.test_rerun import INLINE, said
from tests.strategy.test_structures import Values, select_values, train_all

SHORT = (
    *("dataset.limit=300", "model.units=8", "training.global_batch_size=64", "tracking.system_metrics=false"),
    "evaluation=none",
)

WATCHED = (
    "objective.metrics=[{_target_: keras.metrics.AUC}, {_target_: keras.metrics.F1Score, average: macro}]",
    "objective.loss={_target_: keras.losses.CategoricalFocalCrossentropy}",
    "objective.class_weight=balanced",
    "objective.label_smoothing=0.1",
)


def watched_run(folder: str, is_broad: bool) -> dict[str, Any]:
    """A run that watches metrics of its config, and what comes of it; then one of before there was an objective."""
    import scaleflow
    from scaleflow import evaluate
    from scaleflow.features.compare import rerun

    os.chdir(folder)
    found: dict[str, Any] = {}
    first = scaleflow.run(
        *WATCHED,
        "training.epochs=3",
        "training.early_stopping={monitor: val/auc, patience: 1}",
        "checkpoint.best={monitor: val/f1_score}",
        "checkpoint.export=best",
        "training.callbacks=[{_target_: keras.callbacks.ReduceLROnPlateau, monitor: val_auc, mode: max}]",
        *SHORT,
        *INLINE,
    )
    assert first.run_id is not None
    found["first"] = first
    found["evaluated"] = said(evaluate.main, first.run_id, *INLINE)
    if not is_broad:
        return found
    found["differently"] = said(evaluate.main, first.run_id, *INLINE, "objective=auto", "--split", "validation")
    found["again"] = said(rerun.main, first.run_id, "training.epochs=1", "hydra.run.dir=again")
    old = scaleflow.run("training.epochs=2", "training.max_steps=5", "hydra.run.dir=old", *SHORT, *INLINE)
    saved = OmegaConf.load("old/config.yaml")
    del saved["objective"]
    OmegaConf.save(saved, "old/config.yaml")
    found["old"] = (old, scaleflow.run("resume=old", "training.max_steps=8", *INLINE))
    try:
        scaleflow.run("resume=old", "objective.label_smoothing=0.1", *INLINE)
    except scaleflow.ConfigError as error:
        found["changed"] = str(error)
    return found


@pytest.mark.parametrize("is_broad", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_watches_metrics_of_its_config(isolated: Callable[..., Any], tmp_path: Path, is_broad: bool) -> None:
    found = isolated(watched_run, str(tmp_path), is_broad)
    metrics = found["first"].metrics
    names = ("loss", "accuracy", "auc", "f1_score")
    assert {f"{split}/{name}" for split in ("train", "val", "test") for name in names} <= set(metrics)
    assert not any(name.startswith("baseline/") and name.endswith("loss") for name in metrics)  # of another loss
    code, text = found["evaluated"]
    assert code == 0, text
    for name in names:
        assert f"evaluate/digits/{name}" in text
        assert format_number(metrics[f"test/{name}"]) in text.partition(f"evaluate/digits/{name} ")[2].split("\n")[0]
    if not is_broad:
        return
    code, text = found["differently"]
    assert code == 0, text
    assert "auc" not in text
    code, text = found["again"]
    assert code == 0, text
    assert "test auc" in text
    old, resumed = found["old"]
    assert (old.status, resumed.status) == ("FINISHED", "FINISHED")
    assert found["changed"].startswith("objective")


#: Words that make the same run in another way, and are trained in one process.
OTHERS: Mapping[str, Sequence[str]] = {
    "mirrored": ("strategy=mirrored", "training.accumulate=2"),
    "pipeline": ("strategy=pipeline", "strategy.micro_batches=2"),
    "xla": ("strategy=one_device", "hardware.xla=true"),
}
#: In a process of its own, as `fit` is in a run.
FIT = ("strategy=mirrored", "training.engine=fit")
COMMANDS: Mapping[str, Sequence[str]] = {
    "multi_worker": ("strategy=multi_worker",),
    "parameter_server": ("strategy=parameter_server", "cluster.workers=1"),
}

SAME = (
    *(*SHORT, *WATCHED, "training.max_steps=3", "training.epochs=1", "training.steps_per_loop=1"),
    *("hardware=cpu", "tracking=none"),
)


def values_of_command(folder: Path, *words: str) -> Values:
    folder.mkdir()
    command = Command(folder)
    ended = command(*SAME, "checkpoint=none", *words)
    assert ended.returncode == 0, ended.stderr
    found: Values = {}
    for event in command.events():
        if event["event"] == "metrics":
            found |= select_values(event["step"], event["values"])
    return found


@pytest.mark.slow
def test_the_metrics_are_the_same_on_every_strategy(
    tmp_path: Path, isolated: Callable[..., Any], plan: Callable[..., Any]
) -> None:
    def make(*words: str) -> Any:
        return plan(*SAME, "hardware.logical_devices=2", *words)

    first, *others = isolated(train_all, [make("strategy=one_device"), *(make(*words) for words in OTHERS.values())])
    found = dict(zip(OTHERS, others, strict=True))
    (found["fit"],) = isolated(train_all, [make(*FIT)])
    found |= {name: values_of_command(tmp_path / name, *words) for name, words in COMMANDS.items()}
    assert {"train/auc", "val/auc", "test/f1_score"} <= {name for _, name in first}
    without_norm = {key: value for key, value in first.items() if key[1] != "train/gradient_norm"}  # as `fit` is
    for name, values in found.items():
        assert values == pytest.approx(without_norm if name == "fit" else first, abs=1e-5), name


# The targets that class weights are counted from ------------------------------------------------


def read_all_forms() -> list[list[int]]:
    """The targets of arrays, of a stream of examples, and of records that are decoded one by one and in batches."""
    import tensorflow as tf

    from scaleflow.dataset import read_targets
    from scaleflow.dataset.batches.rows import to_rows

    inputs, targets = np.arange(10, dtype=np.float32)[:, None], np.arange(10, dtype=np.int32) % 3
    examples = tf.data.Dataset.from_tensor_slices((inputs, targets))
    records = tf.data.Dataset.from_tensor_slices((targets,))

    def decode(target: Any) -> Any:
        return tf.zeros([tf.size(target), 1]), target

    forms = [
        Arrays(inputs, targets),
        Stream(examples, 8),
        Stream(records, 8, decode),
        Stream(records, 8, decode, at_once=3),
    ]
    batches = [list(read_targets("train", to_rows(form))) for form in forms]
    return [np.concatenate([np.ravel(targets) for (targets,) in each]).tolist() for each in batches]


def test_targets_are_read_of_every_form(isolated: Callable[..., Any]) -> None:
    whole = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert isolated(read_all_forms) == [whole, whole[:8], whole[:8], whole[:8]]


def masked_notes() -> list[str | None]:
    """The notes on outputs with a Keras mask: of positions, of positions of which some are ignored, of whole texts."""
    import keras

    from scaleflow.interfaces import Outputs
    from scaleflow.objective import find_mask_note

    words = keras.Input((5,), dtype="int32")
    embedded = keras.layers.Embedding(10, 4, mask_zero=True)(words)
    each, whole = (
        keras.layers.Dense(3)(embedded),
        keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(embedded)),
    )
    positions = Outputs("classification", (5, 3))
    cases = [
        (each, positions),
        (each, Outputs("classification", (5, 3), ignore=0)),
        (whole, Outputs("classification", (3,))),
    ]
    return [find_mask_note(keras.Model(words, outputs), described) for outputs, described in cases]


def test_a_keras_mask_of_positions_is_noted(isolated: Callable[..., Any]) -> None:
    note, *others = isolated(masked_notes)
    assert note is not None
    assert "Outputs.ignore" in note
    assert others == [None, None]
