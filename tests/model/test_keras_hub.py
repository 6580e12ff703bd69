from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs

TEXT = Inputs((8,), "int32", vocabulary=50)
IMAGE = Inputs((16, 16, 3), "uint8", 1 / 255)
THREE = Outputs("classification", (3,))
BERT = {
    "vocabulary_size": 50,
    "num_layers": 1,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
    "max_sequence_length": 8,
}
RESNET = {
    "input_conv_filters": [64],
    "input_conv_kernel_sizes": [3],
    "stackwise_num_filters": [64],
    "stackwise_num_blocks": [1],
    "stackwise_num_strides": [1],
    "block_type": "basic_block",
}


VIT = {
    "image_shape": (16, 16, 3),
    "patch_size": 8,
    "num_layers": 1,
    "num_heads": 1,
    "hidden_dim": 8,
    "mlp_dim": 8,
}


def inspect_backbones(folder: str) -> dict[str, Any]:
    import keras
    import keras_hub
    import numpy as np

    from scaleflow.model import make_model
    from scaleflow.model.keras_hub import build

    def make(inputs: Inputs, outputs: Any, **arguments: Any) -> Any:
        return make_model(lambda i, o: build(i, o, **arguments), inputs, outputs)

    saved = keras_hub.models.BertBackbone(**BERT)
    saved.save_to_preset(f"{folder}/preset")
    loaded = make(TEXT, THREE, preset=f"{folder}/preset")
    (network,) = [layer for layer in loaded.layers if isinstance(layer, keras_hub.models.Backbone)]
    loaded.save(f"{folder}/model.keras")
    batch = np.array([[3, 4, 5, 0, 0, 0, 0, 0]], np.int32)
    again = keras.models.load_model(f"{folder}/model.keras")
    return {
        "shapes": [
            make(TEXT, THREE, backbone="BertBackbone", config=BERT).output_shape,
            make(TEXT, Outputs("classification", (8, 3)), backbone="GPT2Backbone", config=BERT).output_shape,
            make(IMAGE, THREE, backbone="ResNetBackbone", config=RESNET, dropout=0.1).output_shape,
            make(IMAGE, {"a": THREE, "b": THREE}, backbone="ViTBackbone", config=VIT).output_shape,
        ],
        "loaded": all(np.array_equal(a, b) for a, b in zip(network.get_weights(), saved.get_weights(), strict=True)),
        "reloaded": float(np.abs(np.asarray(loaded(batch)) - np.asarray(again(batch))).max()),
        "refusals": [
            refusal(TEXT),
            refusal(TEXT, preset=f"{folder}/nothing"),
            refusal(TEXT, backbone="Bert"),
            refusal(TEXT, backbone="BertBackbone"),
            refusal(TEXT, backbone="BertBackbone", config={**BERT, "vocabulary_size": 10}),
            refusal(TEXT, backbone="ResNetBackbone", config=RESNET),
            refusal(IMAGE, backbone="BertBackbone", config=BERT),
        ],
    }


def refusal(inputs: Inputs, **arguments: Any) -> str:
    from scaleflow.model.keras_hub import build

    try:
        build(inputs, THREE, **arguments)
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


def said_of_words() -> list[str]:
    from scaleflow.interfaces import Target
    from scaleflow.model import check_preset_words

    path, preset = "scaleflow.model.keras_hub.build", {"preset": "bert"}
    raw, ids = Inputs((), "string"), Inputs((8,), "int32", vocabulary=50)
    cases: list[Any] = [
        (path, preset, raw, {}),
        (path, preset, ids, {"tokenizer": "words 100 lower"}),
        (path, preset, ids, {"tokenizer": "bytes"}),
        (path, preset, {"a": raw, "b": ids}, {}),
        (path, preset, ids, {"tokenizer": "keras_hub bert 0123"}),
        (path, preset, ids, {}),
        (path, {**preset, "weights": False}, raw, {}),
        (path, {"preset": None, "backbone": "BertBackbone"}, raw, {}),
        ("scaleflow.model.text.build", {}, raw, {}),
    ]
    found = []
    for name, arguments, inputs, reading in cases:
        try:
            check_preset_words(Target("model", name, arguments), inputs, reading)
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found


def test_words_that_a_preset_numbers_otherwise_are_refused(isolated: Callable[..., Any]) -> None:
    found = isolated(said_of_words)
    assert found[4:] == [""] * 5
    for message in found[:4]:
        assert message.startswith("model.preset=bert: its weights are for the tokens of its own tokenizer")


def scaled_images(folder: str) -> tuple[Any, Any, float]:
    """What a preset's backbone makes of pictures of 0 to 255 with its converter, plainly and here; and without it."""
    import keras
    import keras_hub
    import numpy as np

    from scaleflow.model.keras_hub import build

    backbone = keras_hub.models.ResNetBackbone(**RESNET)
    backbone.save_to_preset(folder)
    plain = build(IMAGE, THREE, preset=folder)
    scale, offset = [0.011, 0.012, 0.013], [-1.0, -2.0, -3.0]
    converter = keras_hub.layers.ResNetImageConverter(scale=scale, offset=offset)
    converter.save_to_preset(folder)
    pictures = np.random.default_rng(0).integers(256, size=(4, 16, 16, 3), dtype=np.uint8)
    wanted = keras.ops.mean(backbone(converter(pictures.astype("float32"))), axis=(1, 2))

    def features(model: Any) -> Any:
        return np.asarray(keras.Model(model.input, model.layers[-1].input)(pictures))

    found, unscaled = features(build(IMAGE, THREE, preset=folder)), features(plain)
    return np.asarray(wanted), found, float(np.abs(unscaled - found).max())


@pytest.mark.slow
def test_images_are_scaled_as_the_preset_scales_them(isolated: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("keras_hub", reason="the extra hub is not installed")
    wanted, found, distance = isolated(scaled_images, str(tmp_path))
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert distance > 1e-2


@pytest.mark.slow
def test_backbones_of_texts_and_images_get_a_head(isolated: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("keras_hub", reason="the extra hub is not installed")
    found = isolated(inspect_backbones, str(tmp_path))
    assert found["shapes"] == [(None, 3), (None, 8, 3), (None, 3), [(None, 3), (None, 3)]]
    assert found["loaded"]
    assert found["reloaded"] < 1e-6
    expected = [
        "set model.preset=NAME, or model.backbone=CLASS",
        "cannot be loaded",
        "model.backbone=Bert: expected one of AlbertBackbone",
        "BertBackbone does not accept these arguments",
        "the backbone has a vocabulary of 10, but the dataset's is 50",
        "needs quantities, but the dataset's inputs are words, as numbers",
        "needs text as numbers",
    ]
    for part, message in zip(expected, found["refusals"], strict=True):
        assert part in message


def test_without_the_extra_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from scaleflow.model.keras_hub import build

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'scaleflow\[hub\]'"):
        build(TEXT, THREE, backbone="BertBackbone")
