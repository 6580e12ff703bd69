"""What a Keras model is compiled with: the same loss trains, another one is refused, and a note names the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Outputs, Plan
from scaleflow.worker.compiled import check_compiled, read_optimizer

KINDS = {
    "classes": Outputs("classification", (3,)),
    "binary": Outputs("binary", (1,)),
    "values": Outputs("regression", (1,)),
    "two": {"a": Outputs("regression", (1,)), "b": Outputs("binary", (1,))},
}
HUBER = {"class_name": "Huber", "config": {"name": "huber_loss", "delta": 2.0, "reduction": "sum_over_batch_size"}}
SMOOTHED = {"class_name": "CategoricalCrossentropy", "config": {"from_logits": False, "label_smoothing": 0.1}}
OWN = {"class_name": "function", "config": "own_loss", "module": "mine"}


@pytest.mark.parametrize(
    ("kind", "loss", "words", "refused"),
    [
        ("classes", "sparse_categorical_crossentropy", (), ""),
        ("classes", SMOOTHED, ("objective.label_smoothing=0.1",), ""),
        ("classes", SMOOTHED, (), "CategoricalCrossentropy(label_smoothing=0.1)"),
        ("classes", "kld", (), "write objective.loss=KLDivergence"),
        ("binary", "bce", (), ""),
        ("binary", "mse", (), "with the loss MeanSquaredError, and this run would train with BinaryCrossentropy"),
        ("binary", "mse", ("objective.loss=mse",), ""),
        ("values", "mean_squared_error", (), ""),
        ("values", None, (), ""),
        ("values", "mae", (), "write objective.loss=mae to train with the compiled loss, or objective.loss=mse"),
        ("values", HUBER, (), "{_target_: keras.losses.Huber, delta: 2.0}"),
        ("values", HUBER, ("objective.loss={_target_: keras.losses.Huber, delta: 2.0}",), ""),
        ("values", OWN, (), "write objective.loss={_target_: MODULE.own_loss}"),
        ("two", {"a": "mse", "b": "mse"}, (), "would train b with BinaryCrossentropy"),
        ("two", ["mse", "binary_crossentropy"], (), ""),
    ],
)
def test_a_compiled_loss_that_is_not_trained_is_refused(
    plan: Callable[..., Plan], kind: str, loss: Any, words: tuple[str, ...], refused: str
) -> None:
    compiled, outputs = {"loss": loss}, KINDS[kind]
    made = plan("tracking=none", *words)
    if not refused:
        assert check_compiled(compiled, outputs, made) is None  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError) as refusal:
        check_compiled(compiled, outputs, made)  # type: ignore[arg-type]
    assert refused in str(refusal.value)


def test_a_note_names_the_compiled_parts_without_effect(plan: Callable[..., Plan]) -> None:
    made = plan("tracking=none", "objective.metrics=[auc]")
    rate = {"class_name": "Adam", "config": {"learning_rate": 0.0010000000474974513}}
    parts = {"optimizer": rate, "loss": "bce", "metrics": ["accuracy", {"class_name": "AUC", "config": {}}]}
    assert check_compiled(parts, KINDS["binary"], made) is None  # type: ignore[arg-type]
    other = {"optimizer": {"class_name": "SGD", "config": {"learning_rate": 0.1}}, "metrics": [["recall"]]}
    note = check_compiled({"loss": "bce", **other}, KINDS["binary"], made)  # type: ignore[arg-type]
    assert note is not None
    assert "SGD with the learning rate 0.1 (optimizer=sgd optimizer.learning_rate=0.1 trains with it)" in note
    assert "the metrics recall" in note
    typed = plan("tracking=none", "objective.loss=mae")
    assert "the loss Huber(delta=2.0)" in str(check_compiled({"loss": HUBER}, KINDS["values"], typed))  # type: ignore[arg-type]


SGD = {"learning_rate": 0.009999999776482582, "momentum": 0.0, "nesterov": False, "clipnorm": None, "name": "SGD"}


@pytest.mark.parametrize(
    ("config", "words", "noted"),
    [
        ({**SGD, "momentum": 0.9}, (), ""),
        (SGD, ("optimizer.momentum=0",), ""),
        (SGD, (), "(optimizer=sgd optimizer.learning_rate=0.01 optimizer.momentum=0 trains with it)"),
        (SGD, ("optimizer.momentum=0", "optimizer.schedule=cosine"), "the optimizer SGD"),
        ({**SGD, "clipnorm": 1.0}, ("optimizer.momentum=0",), "with the learning rate 0.01 and clipnorm=1"),
        ({**SGD, "learning_rate": {"class_name": "CosineDecay"}}, (), "with the schedule CosineDecay"),
    ],
)
def test_a_note_names_any_option_of_the_compiled_optimizer_that_differs(
    plan: Callable[..., Plan], config: Any, words: tuple[str, ...], noted: str
) -> None:
    made = plan("tracking=none", "optimizer=sgd", *words)
    note = check_compiled({"optimizer": {"class_name": "SGD", "config": config}}, KINDS["binary"], made)  # type: ignore[arg-type]
    assert (noted in str(note)) if noted else note is None


def test_loss_weights_of_several_outputs_must_be_typed(plan: Callable[..., Plan]) -> None:
    compiled = {"loss": None, "loss_weights": [1.0, 2.0]}
    with pytest.raises(ConfigError, match=r"'objective.loss_weights=\{a: 1, b: 2\}'"):
        check_compiled(compiled, KINDS["two"], plan("tracking=none"))  # type: ignore[arg-type]
    assert check_compiled(compiled, KINDS["two"], plan("tracking=none", "objective.loss_weights={a: 1, b: 2}")) is None  # type: ignore[arg-type]


def read_saved(folder: str) -> Any:
    import keras

    from scaleflow.model import find_compile_config, read_compile_config

    network = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    network.save(f"{folder}/plain.keras")
    before = find_compile_config(network)
    network.compile("sgd", "mae")
    for suffix in ("keras", "h5"):
        network.save(f"{folder}/compiled.{suffix}")
    found = [read_compile_config(f"{folder}/{name}") for name in ("plain.keras", "compiled.keras", "compiled.h5")]
    names = [read_optimizer(each) for each in ("sgd", "AdamW")]
    options = [(each[0], each[1].get("momentum")) for each in names if each is not None]
    losses = [None if each is None else str(each["loss"]) for each in (find_compile_config(network), *found)]
    return before, losses, options


def test_files_of_keras_say_what_a_model_is_compiled_with(isolated: Callable[..., Any], tmp_path: Path) -> None:
    before, losses, options = isolated(read_saved, str(tmp_path))
    assert before is None
    assert losses == ["mae", None, "mae", "mae"]
    assert options == [("SGD", 0.0), ("AdamW", None)]
