"""Chains of runs, each of which begins with the weights and the words of the one before."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, LearnedState, Outputs
from scaleflow.runs.learned_state import write_learned_state
from scaleflow.worker.earlier import find_changes, find_earlier
from tests.chains.oracle import compute_outputs
from tests.conftest import Command

TOWNS = ("Ulm", "Bonn", "Rom")
STILL = ("training.max_steps=1", "optimizer.learning_rate=1e-12")
NET = """
import keras


def build(inputs, outputs):
    raw = {name: keras.Input(each.shape, dtype=each.dtype) for name, each in inputs.items()}
    x = keras.layers.Dense(4, name="one")(keras.layers.Concatenate()(list(raw.values())))
    return keras.Model(raw, keras.layers.Dense(outputs.shape[0], name="last")(x))
"""


def write(folder: Path, name: str, *more: str) -> str:
    rows = [f"{20 + n % 60},{TOWNS[n % 3]},{('no', 'yes')[(n % 3 == 0) ^ (n % 60 > 30)]}" for n in range(240)]
    (folder / name).write_text("\n".join(["age,town,answer", *more * 6, *rows, ""]))
    return f"dataset.data_dir={name}"


def run(command: Command, folder: str, *words: str) -> str:
    base = ("dataset=table", "dataset.target=answer", "model=mlp", "model.units=[8]", "hardware=cpu", "tracking=none")
    base += ("evaluation=none",)
    ended = command(*base, *words, f"hydra.run.dir={folder}")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def answer(isolated: Callable[..., Any], folder: Path) -> Any:
    """What the first run's rows get from a run's model: logits of the two first classes."""
    values = {"age": [20.0 + n % 60 for n in range(60)], "town": [TOWNS[n % 3] for n in range(60)]}
    outputs = isolated(compute_outputs, str(folder / "model" / "saved_model"), values)
    return np.concatenate([0 * outputs, outputs], axis=1) if outputs.shape[1] == 1 else outputs


@pytest.mark.slow  # model/test_weight_mapping.py keeps weights without a run
def test_old_rows_get_their_old_answers_though_words_and_classes_are_added(
    command: Command, isolated: Callable[..., Any]
) -> None:
    run(command, "first", write(command.folder, "first.csv"), "training.epochs=20", "optimizer.learning_rate=0.05")
    said = run(command, "second", write(command.folder, "second.csv", "30,Aix,later"), "model.init_from=first", *STILL)
    assert "note: model.init_from=first: town: 1 new category (Aix); answer: 1 new class (later)" in said
    old, new = (answer(isolated, command.folder / name) for name in ("first", "second"))
    np.testing.assert_allclose(new[:, 1] - new[:, 0], old[:, 1] - old[:, 0], atol=1e-3)
    assert (new.argmax(axis=1) == old.argmax(axis=1)).all()
    assert len(set(old.argmax(axis=1))) == 2


@pytest.mark.slow
def test_a_chain_keeps_the_answers_with_every_strategy_and_precision(
    command: Command, isolated: Callable[..., Any]
) -> None:
    run(command, "first", write(command.folder, "first.csv"), "training.epochs=20", "optimizer.learning_rate=0.05")
    more = write(command.folder, "more.csv", "30,Aix,later"), "model.init_from=first", *STILL
    ways = {
        "mirrored": ("strategy=mirrored", "hardware.logical_devices=2", "precision=mixed"),
        "served": ("strategy=parameter_server", "cluster.workers=1"),
        "embedded": ("model.freeze=['*','!outputs']", "model.lora={layers: [dense*], rank: 2}"),
    }
    old = answer(isolated, command.folder / "first")
    for name, words in ways.items():
        run(command, name, *more, *words)
        assert (answer(isolated, command.folder / name).argmax(axis=1) == old.argmax(axis=1)).all(), name
    third = write(command.folder, "third.csv", "31,Ems,never"), "model.init_from=mirrored", *STILL
    assert "town: 1 new category (Ems); answer: 1 new class (never)" in run(command, "third", *third)
    new = answer(isolated, command.folder / "third")
    assert (new.argmax(axis=1) == old.argmax(axis=1)).all()
    assert new.shape[1] == 4
    resumed = command("resume=third", "training.max_steps=2")
    assert resumed.returncode == 0, resumed.stderr
    record = json.loads((command.folder / "third" / "model" / "learned_state.json").read_text())
    assert record["outputs"][0]["names"] == ["no", "yes", "later", "never"]
    assert record["preprocessing"]["town"]["learned"] == ["Bonn", "Rom", "Ulm", "Aix", "Ems"]


@pytest.mark.slow
def test_a_model_of_the_users_own_keeps_its_words(command: Command) -> None:
    (command.folder / "conf" / "model").mkdir(parents=True)
    (command.folder / "conf" / "my_net.py").write_text(NET)
    (command.folder / "conf" / "model" / "mine.yaml").write_text("_target_: my_net.build\n")
    base = ("--config-dir", "conf", "dataset=table", "dataset.target=answer", "tracking=none", "model=mine", *STILL)
    first = command(*base, write(command.folder, "first.csv"), "hydra.run.dir=first")
    assert first.returncode == 0, first.stderr
    words = command(*base, write(command.folder, "words.csv", "30,Aix,no"), "model.init_from=first")
    assert words.returncode == 0, words.stderr
    assert "learn of inputs['town']: 1 new category (Aix), taken as unknown ones" in words.stdout
    assert "loaded the weights of 2 of 2 layers" in words.stdout
    new = (write(command.folder, "classes.csv", "30,Aix,later"), "model.init_from=first")
    refused = command(*base, *new)
    assert refused.returncode == 2
    assert "answer: 1 new class (later)" in refused.stderr
    assert "model.init_from_preprocessing=new" in refused.stderr
    anew = command(*base, *new, "model.init_from_preprocessing=new")
    assert anew.returncode == 2  # no layer is left that could be taken
    assert "all layers take or give that" in anew.stderr


def test_weights_are_taken_as_the_key_and_the_model_say(plan: Callable[..., Any], tmp_path: Path) -> None:
    def located(*words: str) -> Any:
        return replace(plan(*words), weights=str(tmp_path / "model.keras"))

    first = LearnedState(Inputs((2,)), Outputs("binary", (1,), ("no", "yes")))
    (tmp_path / "model.keras").touch()
    origin, key = f"model.init_from={tmp_path}/model.keras", "model.init_from_preprocessing"
    notes: list[Any] = []
    assert find_earlier(located(origin), None, None) is None  # type: ignore[arg-type]
    assert find_changes(located(origin), first, notes.append) is None
    assert "nothing is known about the preprocessing" in notes.pop().text
    with pytest.raises(ConfigError, match=f"{key}=old: .* has no learned_state.json beside it"):
        find_earlier(located(origin, f"{key}=old"), None, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{key}=old with model.init_from=null: there is no earlier run"):
        plan(f"{key}=old")
    with pytest.raises(ConfigError, match=f"{key}=wider: expected one of extend, old, new"):
        plan(origin, f"{key}=wider")

    write_learned_state(tmp_path, first)
    mine = "model._target_=mine.build"
    wanted = {(): (True, False), ("old",): (False, True), ("new",): None}
    for mode, fields in wanted.items():
        found = find_earlier(located(origin, *(f"{key}={each}" for each in mode)), None, None)  # type: ignore[arg-type]
        assert (found and (found.extends, found.counts_words)) == fields
    user = find_earlier(located(origin, mine), None, None)  # type: ignore[arg-type]
    assert user is not None
    assert (user.extends, user.counts_words) == (True, True)
    vip = LearnedState(Inputs((2,)), Outputs("classification", (3,), ("no", "yes", "vip")))
    for words in ((mine,), (f"{key}=old",)):
        with pytest.raises(ConfigError, match=r"outputs: 1 new class \(vip\)"):
            find_changes(located(origin, *words), vip, notes.append)
