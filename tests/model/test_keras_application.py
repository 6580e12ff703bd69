from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs

THREE = Outputs("classification", (3,))

#: A network of each way to preprocess, with its module in `keras.applications`.
MODULES = {
    "ResNet50": "resnet",
    "VGG16": "vgg16",
    "DenseNet121": "densenet",
    "MobileNetV2": "mobilenet_v2",
    "ResNet50V2": "resnet_v2",
    "InceptionV3": "inception_v3",
    "EfficientNetB0": "efficientnet",
    "ConvNeXtTiny": "convnext",
    "MobileNetV3Small": "mobilenet_v3",
}


def compare_preprocessing() -> dict[str, float]:
    """The largest difference of the model's preprocessing to Keras's own, of each network."""
    import keras
    import numpy as np
    import tensorflow as tf

    from scaleflow.model.keras_application import preprocess

    pixels = tf.constant(np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3)), tf.float32)
    return {
        name: float(
            np.abs(
                getattr(keras.applications, module).preprocess_input(pixels) - preprocess(pixels, name, has_factor=True)
            ).max()
        )
        for name, module in MODULES.items()
    }


def test_pixels_are_preprocessed_as_keras_does_for_each_network(isolated: Callable[..., Any]) -> None:
    found = isolated(compare_preprocessing)
    assert set(found) == set(MODULES)
    assert max(found.values()) < 1e-5, found


def differ_without_factor() -> float:
    """How far EfficientNet's standardised pixels are from those times the factor that Keras adds to its own weights."""
    import keras
    import numpy as np

    from scaleflow.model.keras_application import TORCH_DEVIATION, TORCH_MEAN, preprocess

    pixels = keras.ops.convert_to_tensor(np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3)), "float32")
    variance = [deviation**2 for deviation in TORCH_DEVIATION]
    standardise = keras.layers.Normalization(mean=TORCH_MEAN, variance=variance)
    wanted = standardise(pixels / 255) / np.sqrt(TORCH_DEVIATION)
    found = standardise(preprocess(pixels, "EfficientNetB0", has_factor=False) / 255)
    return float(np.abs(np.asarray(wanted - found)).max())


def test_efficientnets_weights_from_a_file_get_the_pixels_of_those_that_keras_downloads(
    isolated: Callable[..., Any],
) -> None:
    assert isolated(differ_without_factor) < 1e-4


def inspect_network(folder: str) -> dict[str, Any]:
    import keras
    import numpy as np

    from scaleflow.model import make_model
    from scaleflow.model.keras_application import build

    grey = Inputs((32, 32, 1), "uint8", 1 / 255)
    weights = f"{folder}/notop.weights.h5"
    source = keras.applications.MobileNet(include_top=False, weights=None, input_shape=(32, 32, 3), pooling="avg")
    source.save_weights(weights)
    net = make_model(lambda i, o: build(i, o, name="MobileNet", weights=weights, dropout=0.1), grey, THREE)
    (network,) = [layer for layer in net.layers if isinstance(layer, keras.Model)]
    norms = [layer for layer in network.layers if isinstance(layer, keras.layers.BatchNormalization)]
    batch = np.full((1, 32, 32, 1), 255, np.uint8)
    return {
        "shape": net.output_shape,
        "loaded": all(np.array_equal(a, b) for a, b in zip(network.get_weights(), source.get_weights(), strict=True)),
        "synchronized": all(layer.synchronized for layer in norms),
        "finite": bool(np.isfinite(np.asarray(net(batch))).all()),
        "name": network.name.split("_")[0],
        "refusals": [refusal(inputs, **arguments) for inputs, arguments in refused(folder)],
    }


def refused(folder: str) -> list[tuple[Inputs, dict[str, Any]]]:
    image = Inputs((32, 32, 3))
    Path(folder, "text.h5").write_text("no weights")
    return [
        (image, {"name": "ResNet5"}),
        (image, {"weights": f"{folder}/nothing.h5"}),
        (image, {"weights": f"{folder}/text.h5", "name": "MobileNet"}),
        (image, {"name": "InceptionV3"}),
        (Inputs((32, 32, 4)), {}),
        (Inputs((4,)), {}),
    ]


def refusal(inputs: Inputs, **arguments: Any) -> str:
    from scaleflow.model.keras_application import build

    try:
        build(inputs, THREE, **arguments)
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


def test_a_network_takes_weights_of_a_file_and_grey_images(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(inspect_network, str(tmp_path))
    refusals = found.pop("refusals")
    assert found == {"shape": (None, 3), "loaded": True, "synchronized": True, "finite": True, "name": "mobilenet"}
    expected = [
        "model.name=ResNet5: expected one of ConvNeXtBase",
        "there is no such file",
        "this is not a file with the weights of MobileNet without its top",
        "cannot be built for images of 32 x 32 pixels",
        "needs images with 1 or 3 channels",
        "needs images of shape (height, width, channels)",
    ]
    for part, message in zip(expected, refusals, strict=True):
        assert part in message
        assert "Error" not in message
