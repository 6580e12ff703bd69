"""Networks of `keras.applications` with a head for the dataset and the preprocessing that their weights need."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import keras
from keras import ops

from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import Inputs, Outputs
from scaleflow.interfaces.options import Fraction, check_options
from scaleflow.model.layers import check_shape, head

#: Mean colour of ImageNet (blue, green, red), subtracted from pixels in [0, 255].
CAFFE_MEAN = (103.939, 116.779, 123.68)

#: Mean and deviation of ImageNet's colours (red, green, blue), for pixels in [0, 1].
TORCH_MEAN = (0.485, 0.456, 0.406)
TORCH_DEVIATION = (0.229, 0.224, 0.225)

#: Prefixes of networks that take pixels in [0, 255] and preprocess them themselves.
OWN_PREPROCESSING = ("EfficientNet", "ConvNeXt", "MobileNetV3")

#: Networks whose weights expect BGR pixels minus `CAFFE_MEAN`. `DenseNet*` expects pixels normalized by `TORCH_MEAN`
#: and `TORCH_DEVIATION`, all other networks pixels in [-1, 1]. Source: `preprocess_input` in `keras.applications`.
CAFFE = ("ResNet50", "ResNet101", "ResNet152", "VGG16", "VGG19")

#: The value of `weights` that downloads Keras's weights for ImageNet.
IMAGENET = "imagenet"


@check_options("model")
def build(
    inputs: Inputs, outputs: Outputs, name: str = "MobileNetV2", weights: str | None = None, dropout: Fraction = 0.0
) -> keras.Model:
    """Builds a network of `keras.applications` without its top, the average over the image, and a dense layer.

    The model converts the dataset's pixels to the range and channels that the network's weights expect. Grey images
    become three equal channels. BatchNorm normalizes over all replicas. The network is one layer of the model. Its
    name comes from Keras, such as `resnet50` or `mobilenetv2_1.00_224`, so `model.freeze=[mobilenetv2*]` freezes it.

    Args:
        inputs: images of shape (height, width, 1 or 3).
        outputs: the outputs that the dataset needs.

    conf/model/keras_application.yaml describes the other arguments.

    Raises:
        ConfigError: if there is no such network, it does not take images of this size, or the weights cannot be loaded.
    """
    check_shape(inputs, "keras_application")
    if inputs.shape[2] not in (1, 3):
        raise ConfigError(
            f"model=keras_application: needs images with 1 or 3 channels, but the dataset's have {inputs.shape[2]}"
        )
    raw = keras.Input(inputs.shape, dtype=inputs.dtype, name="inputs")
    x = keras.layers.Rescaling(255 * (1.0 if inputs.scale is None else inputs.scale))(raw)
    if inputs.shape[2] == 1:
        x = keras.layers.Concatenate()([x, x, x])
    network = make_network(name, (*inputs.shape[:2], 3), weights)
    x = network(preprocess(x, name, has_factor=weights == IMAGENET))
    if dropout:
        x = keras.layers.Dropout(dropout)(x)
    return keras.Model(raw, head(x, outputs), name=f"{name.lower()}_classifier")


def list_networks() -> list[str]:
    """Returns the names of the networks in `keras.applications`."""
    return [name for name, value in vars(keras.applications).items() if inspect.isfunction(value)]


def make_network(name: Any, shape: tuple[int, ...], weights: Any) -> keras.Model:
    """Makes the network: preprocessed pixels [b, *shape] -> features [b, features]."""
    if name not in list_networks():
        raise ConfigError(f"model.name={name}: expected one of {', '.join(sorted(list_networks()))}")
    file = None
    if weights not in (None, IMAGENET):
        file = Path(str(weights)).expanduser()
        if not file.is_file():
            raise ConfigError(
                f"model.weights={weights}: there is no such file; use a local file of weights, imagenet or null"
            )
    try:
        network = getattr(keras.applications, name)(
            include_top=False, weights=weights if file is None else None, input_shape=shape, pooling="avg"
        )
    except Exception as error:  # Keras checks sizes, and its download raises many types
        if weights == IMAGENET:
            advice = "use a file of weights on a machine that cannot download them, or model.weights=null"
            raise ConfigError(f"model.weights=imagenet: {read_reason(error)}; {advice}") from error
        raise ConfigError(
            f"model.name={name}: cannot be built for images of {shape[0]} x {shape[1]} pixels: {read_reason(error)}"
        ) from error
    for layer in network.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
    if file is not None:
        try:
            network.load_weights(file)
        except Exception as error:  # h5py, zipfile and Keras raise many types
            raise ConfigError(
                f"model.weights={weights}: this is not a file with the weights of {name} without its top "
                f"({read_reason(error)}); use such a file, imagenet or null"
            ) from error
    return network


def preprocess(pixels: Any, name: str, has_factor: bool) -> Any:
    """Converts RGB pixels [b, height, width, 3] in [0, 255] to the form that the network's weights expect.

    Args:
        pixels: the pixels.
        name: the name of the network.
        has_factor: whether the network already scales its pixels by 1 / sqrt(deviation). Keras adds this to
            EfficientNetB0 to B7 only if it downloads the weights (`keras.applications.efficientnet`). The same weights
            from a file or another run need the factor as well, so this function adds it.
    """
    if name.startswith("EfficientNetB") and not has_factor:
        factors = [deviation**-0.5 for deviation in TORCH_DEVIATION]
        offsets = [255 * mean * (1 - factor) for mean, factor in zip(TORCH_MEAN, factors, strict=True)]
        return keras.layers.Rescaling(factors, offsets)(pixels)
    if name.startswith(OWN_PREPROCESSING):
        return pixels
    if name in CAFFE:
        return keras.layers.Rescaling(1.0, [-mean for mean in CAFFE_MEAN])(ops.flip(pixels, axis=-1))
    if name.startswith("DenseNet"):
        variance = [deviation**2 for deviation in TORCH_DEVIATION]
        return keras.layers.Normalization(mean=TORCH_MEAN, variance=variance)(keras.layers.Rescaling(1 / 255)(pixels))
    return keras.layers.Rescaling(1 / 127.5, -1.0)(pixels)
