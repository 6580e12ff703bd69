"""Finds what the options of `dataset.augment` change in a dataset's examples, and rejects options that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from scaleflow.errors import ConfigError
from scaleflow.features.augment.changes import MATRICES, Changes
from scaleflow.features.augment.feature import Augment
from scaleflow.interfaces import Inputs, InputStructure, Outputs, OutputStructure, describe_keys, name_leaves

#: Options that move pixels, options that need an image, and options that mix two examples. A message names the first
#: one that does not fit.
MOVES = ("flip", "vertical_flip", "crop", "resized_crop", *MATRICES)
IMAGE_OPTIONS = (*MOVES, "color_jitter", "contrast", "erase", "cutmix")
MIXTURES = ("mixup", "cutmix")


def find_changes(options: Augment, inputs: InputStructure, outputs: OutputStructure) -> Changes:
    """Returns what the options change in a dataset's inputs and targets.

    Raises:
        ConfigError: if an option does not apply to them.
    """
    image = find_only(options, inputs, IMAGE_OPTIONS, "images of shape (height, width, channels)", is_image)
    text = find_only(options, inputs, ("word_dropout",), "texts as numbers of words", is_text_of_words)
    for key in MIXTURES:
        if getattr(options, key):
            check_mixture(key, options, inputs, outputs=outputs)
    check_changed_values(options, inputs, outputs, image=image, text=text)
    white = None if image is None else find_range(name_leaves(inputs)[image])
    masks = find_masks(options, image, inputs, outputs=outputs)
    return Changes(options, image, text, masks=masks, white=white or 1.0)


def is_image(inputs: Inputs) -> bool:
    return len(inputs.shape) == 3 and not is_text(inputs)


def is_text_of_words(inputs: Inputs) -> bool:
    return len(inputs.shape) == 1 and inputs.vocabulary is not None


def is_text(inputs: Inputs) -> bool:
    return inputs.dtype == "string" or inputs.vocabulary is not None


def find_only(
    options: Augment, inputs: InputStructure, keys: Sequence[str], needed: str, fits: Callable[[Inputs], bool]
) -> str | None:
    """Returns the name of the only input that `fits` ("" for a single unnamed input), or None.

    Raises:
        ConfigError: if an option in `keys` is set, but no input fits, or several do.
    """
    leaves = name_leaves(inputs)
    fitting_names = [name for name, described in leaves.items() if fits(described)]
    if len(fitting_names) == 1:
        return fitting_names[0]
    for key in keys:
        if getattr(options, key):
            one = "one in each example, " if fitting_names else ""
            raise ConfigError(
                f"{label_option(options, key)}: needs {needed}, {one}and the dataset's inputs "
                f"{describe_shapes(leaves)}; remove it"
            )
    return None


def describe_shapes(leaves: Mapping[str, Inputs]) -> str:
    if "" in leaves:
        return f"have shape {leaves[''].shape}"
    return f"are {', '.join(f'{name} {described.shape}' for name, described in leaves.items())}"


def check_mixture(option: str, options: Augment, inputs: InputStructure, outputs: OutputStructure) -> None:
    """Raises ConfigError if the examples cannot be mixed."""
    key = label_option(options, option)
    for what, structure in (("inputs", inputs), ("targets", outputs)):
        if isinstance(structure, Mapping):
            raise ConfigError(
                f"{key}: mixes only examples of one tensor, and the dataset's {what} {describe_keys(structure)}; "
                "remove it"
            )
    assert isinstance(inputs, Inputs)
    assert isinstance(outputs, Outputs)
    if is_text(inputs):
        raise ConfigError(f"{key}: mixes only numbers, and the dataset's inputs are text; remove it")
    if outputs.ignore is not None:
        raise ConfigError(f"{key}: cannot mix targets of which {outputs.ignore} is ignored (Outputs.ignore); remove it")
    if option == "cutmix" and len(outputs.shape) > 1:
        raise ConfigError(
            f"{key}: mixes one target of each image, and the dataset's have shape {outputs.target_shape}; remove it"
        )


def check_changed_values(
    options: Augment, inputs: InputStructure, outputs: OutputStructure, image: str | None, text: str | None
) -> None:
    """Raises ConfigError for targets that would have to change with a text's words, and for images of unknown range."""
    named = name_leaves(inputs)
    if options.randaugment and image is not None and find_range(named[image]) is None:
        raise ConfigError(
            f"{label_option(options, 'randaugment')}: needs images of bytes (uint8) or with Inputs.scale, and the "
            f"dataset's are {named[image].dtype}; use rotation, translation, contrast or color_jitter, or leave "
            "dataset.normalise false"
        )
    if options.word_dropout and text is not None:
        for described in name_leaves(outputs).values():
            if described.target_shape[:1] == named[text].shape[:1]:
                raise ConfigError(
                    f"{label_option(options, 'word_dropout')}: leaves out words, and the dataset's targets of shape "
                    f"{described.target_shape} are for each word; remove it"
                )


def find_masks(
    options: Augment, image: str | None, inputs: InputStructure, outputs: OutputStructure
) -> Mapping[str, Outputs]:
    """Returns the outputs with a target for each pixel of the image named `image`, by name.

    Raises:
        ConfigError: if pixels move, and other targets with positions would not move along, or a border would need
            targets.
    """
    moves = [key for key in MOVES if getattr(options, key)]
    if image is None or (not moves and not options.erase):
        return {}
    size = tuple(name_leaves(inputs)[image].shape[:2])
    masks = {}
    for name, described in name_leaves(outputs).items():
        if tuple(described.target_shape[:2]) == size:
            masks[name] = described
    for name, described in name_leaves(outputs).items():
        if moves and name not in masks and len(described.shape) > 2:
            raise ConfigError(
                f"{label_option(options, moves[0])}: moves the pixels of images, but not the dataset's targets of "
                f"shape {described.target_shape}; augment both in the dataset"
            )
        if options.crop and name in masks and described.ignore is None:
            raise ConfigError(
                f"{label_option(options, 'crop')}: adds a border, and the dataset has no target for it "
                "(Outputs.ignore); use dataset.augment.resized_crop"
            )
    return masks


def find_range(inputs: Inputs) -> float | None:
    """Returns the value of white in images where black is 0, or None if it is unknown."""
    if inputs.dtype == "uint8":
        return 255.0
    return None if inputs.scale is None else 1 / inputs.scale


def label_option(options: Augment, key: str) -> str:
    value = getattr(options, key)
    return f"dataset.augment.{key}={'true' if value is True else format(value, 'g')}"
