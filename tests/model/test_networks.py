"""The models for images and text: what they are made of, what they refuse, and that they save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs

WORDS = Inputs((9,), "int32", vocabulary=50)
STRINGS = Inputs((), "string")
COLOUR = Inputs((32, 32, 3), "uint8", scale=1 / 255)
GREY = Inputs((8, 8, 1), scale=1 / 16)
TEN = Outputs("classification", (10,))
ONE = Outputs("binary", (1,))


def built() -> dict[str, Any]:
    """Of each model its number of trained parameters, and how far it is from itself once it was saved and loaded."""
    import keras

    from scaleflow.model import linear, make_model, resnet, text, transformer

    cases: dict[str, tuple[Any, Inputs, Outputs]] = {
        "linear": (lambda i, o: linear.build(i, o, l2=0.1), GREY, TEN),
        "text": (text.build, WORDS, ONE),
        "text of two": (lambda i, o: text.build(i, o, 8, [7, 5], 0.5, ignore_padding=False), WORDS, TEN),
        "transformer": (lambda i, o: transformer.build(i, o, 8, 2, 2, 6, 0.5), WORDS, ONE),
        "resnet20": (resnet.build, COLOUR, TEN),
        "resnet32": (lambda i, o: resnet.build(i, o, depth=32), GREY, TEN),
    }
    found = {}
    for name, (factory, inputs, outputs) in cases.items():
        net = make_model(factory, inputs, outputs)
        batch = (np.random.default_rng(0).uniform(0, 50, (3, *inputs.shape))).astype(inputs.dtype)
        again = keras.Model.from_config(net.get_config())
        again.set_weights(net.get_weights())
        parameters = sum(int(np.prod(v.shape)) for v in net.trainable_variables)
        found[name] = parameters, float(np.abs(net(batch) - again(batch)).max())
    return found


@pytest.mark.slow
def test_the_networks_are_of_the_size_that_their_sources_say(isolated: Callable[..., Any]) -> None:
    found = isolated(built)
    assert {name: parameters for name, (parameters, _) in found.items()} == {
        "linear": 64 * 10 + 10,
        "text": 50 * 16 + 16 * 16 + 16 + 16 + 1,
        "text of two": 50 * 8 + 8 * 7 + 7 + 7 * 5 + 5 + 5 * 10 + 10,
        # embeddings; two blocks of attention, two norms, feed-forward; the head
        "transformer": 59 * 8 + 2 * (4 * (8 * 8 + 8) + 2 * 16 + (8 * 6 + 6) + (6 * 8 + 8)) + 9,
        "resnet20": 269_722,  # the paper's table 6: 0.27 M
        "resnet32": 463_866,  # 0.46 M
    }
    assert {name for name, (_, far) in found.items() if far > 1e-6} == set()


def padded() -> dict[str, tuple[bool, bool]]:
    """Of each text model whether more padding changes nothing, and whether no word at all gives a number."""
    from scaleflow.model import make_model, text, transformer

    short = np.array([[3, 4, 5, 6, 0, 0, 0, 0, 0]], np.int32)
    of_both = {
        "text": text.build,
        "transformer": transformer.build,
        "counted": lambda i, o: text.build(i, o, ignore_padding=False),
    }
    found = {}
    for name, factory in of_both.items():
        net = make_model(factory, WORDS, ONE)
        before = np.asarray(net(short))
        for variable in net.variables:
            if variable.path.startswith("words"):  # what the padding is described by
                variable.assign(np.concatenate([np.full((1, variable.shape[1]), 9.0), np.asarray(variable)[1:]]))
        same = bool(np.allclose(before, np.asarray(net(short)), atol=1e-5))
        found[name] = same, bool(np.isfinite(np.asarray(net(np.zeros((1, 9), np.int32)))).all())
    return found


def test_padding_counts_for_nothing(isolated: Callable[..., Any]) -> None:
    assert isolated(padded) == {"text": (True, True), "transformer": (True, True), "counted": (False, True)}


def refusals() -> list[str]:
    from scaleflow.model import cnn, linear, mlp, resnet, text, transformer

    cases: list[Any] = [
        lambda: mlp.build(STRINGS, ONE),
        lambda: linear.build(WORDS, ONE),
        lambda: cnn.build(WORDS, ONE),
        lambda: resnet.build(Inputs((4,)), TEN),
        lambda: text.build(STRINGS, ONE),
        lambda: text.build(COLOUR, ONE),
        lambda: transformer.build(Inputs((4,)), ONE),
        lambda: linear.build(GREY, TEN, l2=-1),
        lambda: text.build(WORDS, ONE, embedding=0),
        lambda: text.build(WORDS, ONE, ignore_padding="no"),  # type: ignore[arg-type]
        lambda: transformer.build(WORDS, ONE, width=30),
        lambda: transformer.build(WORDS, ONE, blocks=1.5),  # type: ignore[arg-type]
        lambda: resnet.build(COLOUR, TEN, depth=18),
        lambda: resnet.build(GREY, TEN, depth=50),
        lambda: resnet.build(COLOUR, TEN, weights="w.h5"),
        lambda: resnet.build(Inputs((32, 32, 1)), TEN, depth=50, weights="w.h5"),
        lambda: resnet.build(COLOUR, TEN, depth=50, weights="w.h5"),
    ]
    found = []
    for case in cases:
        with pytest.raises(ConfigError) as refusal:
            case()
        found.append(str(refusal.value))
    return found


def test_input_unfit_for_a_model_is_refused_with_what_works(isolated: Callable[..., Any]) -> None:
    wanted = [
        ("model=mlp", "text", "preprocessing", "Inputs.vocabulary", "model=text"),
        ("model=linear", "words, as numbers below 50", "use model=text or model=transformer"),
        ("model=cnn", "words, as numbers below 50", "use model=text"),
        ("model=resnet", "(height, width, channels)", "(4,)", "use model=mlp"),
        ("model=text", "has strings", "preprocessing"),
        ("model=text", "uint8 of shape (32, 32, 3)", "use model=cnn or model=resnet"),
        ("model=transformer", "float32 of shape (4,)", "use model=mlp or model=linear"),
        ("model.l2=-1: expected a number, at least 0",),
        ("model.embedding=0: expected an integer, at least 1",),
        ("model.ignore_padding=no: expected true or false",),
        ("model.width=30 with model.heads=4", "use model.width=28"),
        ("model.blocks=1.5: expected an integer, at least 1",),
        ("model.depth=18: expected one of 20, 32, 44, 56, 110", "50"),
        ("model.depth=50", "32 x 32", "8 x 8", "use model.depth=20"),
        ("model.weights=w.h5", "use it, or model.init_from"),
        ("model.weights=w.h5", "3 channels", "have 1"),
        ("model.weights=w.h5: there is no such file",),
    ]
    for words, message in zip(wanted, isolated(refusals), strict=True):
        for word in words:
            assert word in message, message


def weighted(folder: Path) -> dict[str, Any]:
    """ResNet50 with the weights of a file, and with those of one that holds something else."""
    import keras

    from scaleflow.model import make_model, resnet

    origin = keras.applications.ResNet50(include_top=False, weights=None, pooling="avg")
    origin.save_weights(folder / "resnet.weights.h5")
    (folder / "damaged.h5").write_bytes(b"no weights")
    net = make_model(lambda i, o: resnet.build(i, o, 50, str(folder / "resnet.weights.h5")), COLOUR, TEN)
    image = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3)).astype(np.uint8)
    inside = keras.Model(net.inputs, net.layers[-1].input)
    expected = origin(keras.applications.resnet.preprocess_input(image.astype(np.float32)))
    norms = [layer for layer in net._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    with pytest.raises(ConfigError) as refusal:
        resnet.build(COLOUR, TEN, 50, str(folder / "damaged.h5"))
    return {
        "far": float(np.abs(inside(image) - expected).max() / np.abs(expected).max()),
        "synchronized": len(norms) == 53 and all(norm.synchronized for norm in norms),
        "refusal": str(refusal.value),
    }


@pytest.mark.slow
def test_resnet50_takes_the_weights_of_a_file_and_images_as_those_expect_them(
    isolated: Callable[..., Any], tmp_path: Path
) -> None:
    found = isolated(weighted, tmp_path)
    assert found["far"] < 1e-3
    assert found["synchronized"]
    assert "damaged.h5: this is not a file with the weights of ResNet50" in found["refusal"]
