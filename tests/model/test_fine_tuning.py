"""Frozen layers, LoRA, and patterns of layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.interfaces import Lora, Model, Target
from scaleflow.interfaces.events import Note
from tests.conftest import Command
from tests.training.fake_engine import ignore

BASE = ("hardware=cpu", "tracking=none", "model.units=[8, 6]", "training.batch_size=64", "strategy=one_device")
MINE = """
import keras

def build(inputs, outputs):
    backbone = keras.Sequential(
        [
            keras.Input(inputs.shape),
            keras.layers.Flatten(),
            keras.layers.Dense(8, name="first"),
            keras.layers.BatchNormalization(name="norm"),
        ],
        name="backbone",
    )
    raw = keras.Input(inputs.shape)
    return keras.Model(raw, keras.layers.Dense(outputs.shape[0], name="outputs")(backbone(raw)))
"""


def nested() -> Any:
    """A model with a model and a layer of layers in it."""
    import keras

    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="a"), keras.layers.ReLU()], name="backbone")
    raw = keras.Input((4,))
    x = keras.layers.Reshape((1, 4))(inner(raw))
    x = keras.layers.MultiHeadAttention(1, 2, name="attention")(x, x)
    x = keras.layers.Embedding(10, 4, name="words")(keras.ops.cast(keras.layers.Flatten()(x), "int32"))
    x = keras.layers.Conv1D(3, 2, name="conv")(x)
    return keras.Model(raw, keras.layers.Dense(2, name="head")(keras.layers.Flatten()(x)))


def trained_after(**options: Any) -> list[str] | str:
    """The paths of what is trained, or why it is refused."""
    from scaleflow.errors import ConfigError
    from scaleflow.model import fine_tune

    model = nested()
    try:
        fine_tune(model, Model(Target("model", "nested"), **options))
    except ConfigError as error:
        return str(error)
    return [variable.path for variable in model.trainable_variables]


def all_trained() -> list[list[str] | str]:
    return [
        trained_after(freeze=["backbone", "attention/query", "words"]),
        trained_after(freeze=["attention/*", "c*", "a", "words"]),
        trained_after(freeze=["*", "!conv", "!attention/v*"]),
        trained_after(freeze=["head", "bacbone"]),
        trained_after(freeze=["*"]),
        trained_after(freeze=["*"], lora=Lora(["attention", "words"], 1)),
        trained_after(lora=Lora(["head"], 2)),
        trained_after(lora=Lora(["norm*"], 2)),
    ]


def test_patterns_match_names_and_paths_at_any_depth(isolated: Callable[..., Any]) -> None:
    by_path, by_name, kept, unknown, nothing, small, head, none = isolated(all_trained)
    assert by_path == [
        *(f"attention/{name}/{part}" for name in ("key", "value", "attention_output") for part in ("kernel", "bias")),
        *("conv/kernel", "conv/bias", "head/kernel", "head/bias"),
    ]
    assert by_name == ["head/kernel", "head/bias"]
    assert kept == ["attention/value/kernel", "attention/value/bias", "conv/kernel", "conv/bias"]
    attention = ", ".join(f"attention/{name}" for name in ("query", "key", "value", "attention_output"))
    layers = f"backbone (contains 1), attention (contains 4), words, conv, head, backbone/a, {attention}"
    assert unknown == (
        "model.freeze=[head, bacbone]: bacbone matches no layer with weights; did you mean backbone?; the model has "
        f"{layers}"
    )
    assert nothing == f"model.freeze=[*]: no layer is left to train; the model has {layers}"
    assert small == [
        *(f"attention/{n}/lora_kernel_{m}" for n in ("query", "key", "value", "attention_output") for m in "ab"),
        *("words/lora_embeddings_a", "words/lora_embeddings_b"),
    ]
    assert head[-3:] == ["head/bias", "head/lora_kernel_a", "head/lora_kernel_b"]
    assert "head/kernel" not in head
    assert none.startswith("model.lora.layers=[norm*]: norm* matches no layer with weights")


def notes_of_builds(plans: list[Any]) -> list[list[str]]:
    from scaleflow.worker.build import build_training

    found: list[list[str]] = []
    for plan in plans:
        notes: list[Any] = []
        build_training(plan, notes.append)
        found.append([note.text for note in notes if isinstance(note, Note) and note.text.startswith("model")])
    return found


def test_run_without_saved_weights_notes_what_it_cannot_learn(
    isolated: Callable[..., Any], plan: Callable[..., Any]
) -> None:
    words = ("model=cnn", "model.batch_norm=true", "hardware=cpu", "tracking=none", "strategy=one_device")
    short, long = plan(*words, "training.max_steps=28", "model.freeze=[conv2d]"), plan(*words, "training.epochs=9")
    (frozen, norm), nothing = isolated(notes_of_builds, [short, long])
    assert frozen == ("model.freeze=[conv2d]: the weights of conv2d are random and stay so; set model.init_from")
    assert norm == (
        "model: 75% of the moving averages of batch_normalization and 2 more is still what they begin with after the "
        "run's 28 steps, so evaluations can be far worse than training; train for about 299 steps, or lower the "
        "momentum of BatchNormalization"
    )
    assert nothing == []


def freeze_network() -> list[str]:
    """The refusal of a name that Keras gives no network, and the warning about the real name."""
    from scaleflow.errors import ConfigError
    from scaleflow.interfaces import Inputs, Outputs
    from scaleflow.model import find_freeze_warning, fine_tune
    from scaleflow.model.keras_application import build

    found = []
    target = Target("model", "scaleflow.model.keras_application.build", {"weights": None})
    model = build(Inputs((32, 32, 3)), Outputs("classification", (3,)))
    for name in ("MobileNetV2", "mobilenetv2_*"):
        options = Model(target, freeze=[name])
        try:
            fine_tune(model, options)
        except ConfigError as error:
            found.append(str(error))
    return [*found, find_freeze_warning(model, options) or ""]


def test_a_ready_made_network_is_named_and_not_its_layers(isolated: Callable[..., Any]) -> None:
    assert isolated(freeze_network) == [
        "model.freeze=[MobileNetV2]: MobileNetV2 matches no layer with weights; did you mean mobilenetv2_1.00_32?; the "
        "model has mobilenetv2_1.00_32 (contains 104), outputs and 104 more",
        "model.freeze=[mobilenetv2_*]: the weights of mobilenetv2_1.00_32 are random and stay so; set model.init_from "
        "or model.weights",
    ]


def which_load() -> list[bool]:
    from scaleflow.model import loads_weights

    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({}, {"init_from": "a.keras"}),
        ({"weights": None}, {}),
        ({"weights": "imagenet"}, {}),
        ({"weights": True, "preset": None}, {}),
        ({"weights": True, "preset": "resnet_18_imagenet"}, {}),
        ({"weights": False, "preset": "resnet_18_imagenet"}, {}),
    ]
    return [loads_weights(Model(Target("model", "a.b", arguments), **config)) for arguments, config in cases]


def test_saved_weights_are_those_that_the_config_names(isolated: Callable[..., Any]) -> None:
    assert isolated(which_load) == [False, True, False, True, False, True, False]


def names_of_two() -> list[list[str]]:
    """The names of the layers that are trained of a model that is made twice in one process."""
    import keras

    from scaleflow.model import keep_names

    keras.layers.Dense(1)
    make = keep_names(lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)]))
    return [[layer.name for layer in make().layers] for _ in range(2)]


def test_a_second_model_has_the_names_of_the_first(isolated: Callable[..., Any]) -> None:
    assert isolated(names_of_two) == [["dense_1", "dense_2"]] * 2


def merged() -> tuple[float, list[str], list[str]]:
    """How far the outputs are, relative to the largest, after LoRA is merged, and the weights before LoRA and after."""
    import keras

    from scaleflow.model import fine_tune, merge_lora

    keras.utils.set_random_seed(0)
    model = nested()
    before = [variable.path for variable in model.weights]
    fine_tune(model, Model(Target("model", "nested"), lora=Lora(["*"], 2)))
    random = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(random.normal(size=variable.shape))
    x = random.normal(size=(5, 4)).astype("float32")
    wanted = np.asarray(model(x))
    found = np.asarray(merge_lora(model)(x))
    return (
        float(np.abs(found - wanted).max() / np.abs(wanted).max()),
        before,
        [variable.path for variable in model.weights],
    )


def test_lora_is_merged_into_dense_einsum_embedding_and_convolution(isolated: Callable[..., Any]) -> None:
    difference, before, after = isolated(merged)
    assert difference < 1e-5
    assert before == after


def changed(plan: Any, steps: int = 3) -> dict[str, bool]:
    """Which variables, and statistics, a few steps change."""
    from scaleflow.worker.build import build_training

    built = build_training(plan, ignore)
    model = built.engine.model
    before = {variable.path: np.array(variable) for variable in model.variables}
    built.engine.train(built.feeds.train, built.feeds.train.open(0, 0), 0, 0, steps, 0)
    return {v.path: bool((np.array(v) != before[v.path]).any()) for v in model.variables} | {
        "resolved": built.facts.resolved["trainable_parameters"] < built.facts.resolved["parameters"]
    }


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=one_device", "precision=mixed_float16", "training.accumulate=2"),
        pytest.param(("strategy=mirrored", "hardware.logical_devices=2"), marks=pytest.mark.slow),
        ("strategy=pipeline", "hardware.logical_devices=2"),
    ],
    ids=lambda words: words[0],
)
def test_frozen_layers_do_not_change(
    isolated: Callable[..., Any],
    plan: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    chosen = ("model._target_=mine.build", "~model.units", "~model.dropout", "~model.batch_norm")
    made = plan(*BASE[:2], *BASE[3:], *chosen, "model.freeze=[backbone]", *words)
    found = isolated(changed, type(made)(**{**vars(made), "search": [str(tmp_path)]}))
    assert found.pop("resolved")
    moved = {path for path, is_changed in found.items() if is_changed}
    assert {path.rpartition("/")[0].rpartition("/")[2] for path in moved} == {"outputs"}
    assert any("moving_mean" in path for path in found)  # frozen BatchNorm uses its statistics and leaves them


@pytest.mark.slow
def test_a_head_is_trained_then_everything_from_that_run(command: Command) -> None:
    head = command(*BASE, "training.max_steps=3", "model.freeze=[dense*]", "hydra.run.dir=head")
    assert head.returncode == 0, head.stderr
    words = ("resume=head", "model.freeze=null", "training.max_steps=6")
    refused = command(*words)
    assert refused.returncode == 2
    assert "model.freeze=null: the run was begun with model.freeze=['dense*']; what is trained" in refused.stderr
    assert "start a new run with model.init_from=" in refused.stderr
    further = command(*BASE, "training.max_steps=3", "model.init_from=head", "hydra.run.dir=all")
    assert further.returncode == 0, further.stderr
    assert "loaded the weights of 3 of 3 layers" in further.stdout


def exported(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    import keras

    model = keras.models.load_model(folder / "model" / "model.keras")
    return {variable.path: np.array(variable) for variable in model.variables}


def exported_by(folders: list[Path]) -> list[dict[str, np.ndarray[Any, Any]]]:
    return [exported(folder) for folder in folders]


TUNED = (
    ("strategy=mirrored", "hardware.logical_devices=2", "precision=mixed_float16"),
    ("strategy=parameter_server", "cluster.workers=1"),
    ("strategy=pipeline", "hardware.logical_devices=2"),
)


@pytest.mark.slow
def test_lora_trains_on_a_saved_model_and_is_merged_at_the_export(
    command: Command, isolated: Callable[..., Any]
) -> None:
    assert command(*BASE, "training.max_steps=2", "hydra.run.dir=first").returncode == 0
    lora = ("model.init_from=first", "model.freeze=['*']", "model.lora={layers: [dense*], rank: 2}")
    for words in TUNED:
        ended = command(*BASE, *words, *lora, "training.max_steps=8", f"hydra.run.dir={words[0].partition('=')[2]}")
        assert ended.returncode == 0, ended.stderr
    folders = ["first", *(words[0].partition("=")[2] for words in TUNED)]
    before, *others = isolated(exported_by, [command.folder / name for name in folders])
    for after in others:
        assert before.keys() == after.keys()
        moved = {path for path in before if (before[path] != after[path]).any()}
        assert {path.rpartition("/")[2] for path in moved} == {"kernel"}
        assert len(moved) == 2
        for path in moved:
            assert np.linalg.matrix_rank(after[path] - before[path], tol=1e-5) == 2
