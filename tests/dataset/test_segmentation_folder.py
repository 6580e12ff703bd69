from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dataset.files import examples, picture, prepared, refused
from tests.strategy.test_structures import train_all

RED, GREEN = (255, 0, 0), (0, 255, 0)


def write_pair(base: Path, name: str, classes: Any, suffix: str = ".png", **options: Any) -> None:
    """A mask, and an image whose red is the class x 100."""
    classes = np.asarray(classes)
    image = np.zeros((*classes.shape, 3))
    image[..., 0] = np.minimum(classes * 100, 255)
    picture(base / "images" / f"{name}{suffix}", image, **options)
    picture(base / "masks" / f"{name}.png", classes)


def halves(height: int, width: int, left: int = 0, right: int = 1) -> Any:
    """The left half is of one class, the right one of another."""
    return np.repeat([[left] * (width // 2) + [right] * (width - width // 2)], height, axis=0)


def read(base: Path) -> Any:
    from scaleflow.dataset.segmentation_folder import SegmentationFolder

    found = {}
    for how in ("stretch", "pad", "crop"):
        source = SegmentationFolder(str(base), 2, [8, 8], how, test=0)
        found[how] = examples(source, "train")
    return found, source.inputs, source.outputs, tuple(source.splits)


def test_images_and_masks_are_resized_alike(isolated: Callable[..., Any], tmp_path: Path) -> None:
    write_pair(tmp_path, "deep/er/wide", halves(16, 32), ".jpg", quality=95)
    write_pair(tmp_path, "same", halves(8, 8, 1, 255))
    found, inputs, outputs, splits = isolated(read, tmp_path)
    assert (inputs.shape, inputs.dtype, inputs.scale) == ((8, 8, 3), "uint8", 1 / 255)
    assert (outputs.kind, outputs.shape, outputs.ignore) == ("classification", (8, 8, 2), 255)
    assert splits == ("train",)
    for how, (images, masks) in found.items():
        assert {mask.dtype for mask in masks} == {np.dtype(np.uint8)}
        for image, mask in zip(images, masks, strict=True):
            is_wide = mask.max() <= 1 or how == "pad"
            for number in (0, 1):
                chosen = mask == number
                if chosen.any():
                    assert abs(image[chosen][:, 0].astype(int) - number * 100).max() <= (40 if is_wide else 0), how
    (wide,) = [mask for mask in found["stretch"][1] if mask.max() == 1]
    np.testing.assert_array_equal(wide, halves(8, 8))
    (wide,) = [mask for mask in found["pad"][1] if (mask[0] == 255).all()]
    np.testing.assert_array_equal(wide[2:6], halves(4, 8))  # a border that does not count
    assert (wide[[0, 1, 6, 7]] == 255).all()


def colours(base: Path) -> Any:
    from scaleflow.dataset.segmentation_folder import SegmentationFolder

    values = [[0, 0, 0], list(RED), 255]
    source = SegmentationFolder(str(base), ["no", "red", "white"], [2, 2], values=values, ignore=list(GREEN), test=0)
    return source.outputs.names, examples(source, "train")[1]


def test_masks_may_have_colours_and_a_palette(isolated: Callable[..., Any], tmp_path: Path) -> None:
    from PIL import Image

    mask = np.array([[(0, 0, 0), RED], [(255, 255, 255), GREEN]], np.uint8)
    for name in ("rgb", "palette"):
        picture(tmp_path / "images" / f"{name}.png", np.zeros((2, 2, 3)))
    picture(tmp_path / "masks" / "rgb.png", mask)
    Image.fromarray(mask).quantize(4).save(tmp_path / "masks" / "palette.png")
    names, masks = isolated(colours, tmp_path)
    assert names == ("no", "red", "white")
    for found in masks:
        assert found.tolist() == [[0, 1], [2, 255]]


BAD = ("size", "value", "palette", "bits")


def bad(base: Path) -> list[Any]:
    from scaleflow.dataset.segmentation_folder import SegmentationFolder

    found = []
    for name in BAD:
        make = functools.partial(SegmentationFolder, str(base / name), 2, [4, 4], test=0)
        found.append(prepared(make, cache="memory"))
    make = functools.partial(SegmentationFolder, str(base / "value"), 2, [4, 4], test=0, ignore=None)
    found.append(prepared(make, on_bad_example="skip", cache="memory"))
    return found


@pytest.mark.slow
def test_a_pair_that_does_not_fit_is_named_or_left_out(isolated: Callable[..., Any], tmp_path: Path) -> None:
    from PIL import Image

    for name in BAD:
        for number in range(3):
            write_pair(tmp_path / name, f"good{number}", halves(4, 4))
        picture(tmp_path / name / "images/bad.png", np.zeros((4, 4, 3)))
    picture(tmp_path / "size/masks/bad.png", halves(4, 6))
    picture(tmp_path / "value/masks/bad.png", halves(4, 4, 0, 7))
    Image.fromarray(halves(4, 4).astype(np.uint8), "L").convert("P").save(tmp_path / "palette/masks/bad.png")
    Image.fromarray(halves(4, 4).astype(bool)).save(tmp_path / "bits/masks/bad.png")
    size, value, palette, bits, (counts, (note,)) = isolated(bad, tmp_path)
    for name, message in {"size": size, "value": value, "palette": palette, "bits": bits}.items():
        assert str(tmp_path / name / "masks/bad.png") in message, message
        assert str(tmp_path / name / "images/bad.png") in message, message
    assert "the image is 4 x 4 pixels, its mask 4 x 6" in size
    assert "the mask has a pixel of the value 7 which is no class" in value
    assert "the mask has 1 bits, expected 8" in bits
    assert "the mask has a palette; list the colours of the classes in dataset.values" in palette
    assert counts == {"train": 3}
    assert "1 of the 4 examples" in note


def refusals(base: Path) -> list[str]:
    from scaleflow.dataset.segmentation_folder import SegmentationFolder

    whole, make = str(base / "whole"), functools.partial(SegmentationFolder, classes=2, size=[4, 4])
    return refused(
        [
            functools.partial(make, str(base / "none")),
            functools.partial(make, str(base / "empty")),
            functools.partial(make, str(base / "missing")),
            functools.partial(make, whole, classes=1),
            functools.partial(make, whole, values=[0, 1, 2]),
            functools.partial(make, whole, values=[0, 300]),
            functools.partial(make, whole, ignore=1),
            functools.partial(make, whole, values=[5, 5]),
            functools.partial(make, whole, channels=4),
            functools.partial(make, whole, test=0.01),
        ]
    )


def test_missing_or_wrong_files_are_refused(isolated: Callable[..., Any], tmp_path: Path) -> None:
    write_pair(tmp_path / "whole", "a", halves(4, 4))
    (tmp_path / "empty/images").mkdir(parents=True)
    (tmp_path / "empty/masks").mkdir()
    (tmp_path / "none").mkdir()
    write_pair(tmp_path / "missing", "a", halves(4, 4))
    lonely = picture(tmp_path / "missing/images/b.png", np.zeros((4, 4, 3)))
    found = isolated(refusals, tmp_path)
    wanted = [
        f"there is no folder {tmp_path / 'none/images'}",
        f"{tmp_path / 'empty/images'} has no file that ends in .jpg",
        f"{lonely} has no mask; expected {tmp_path / 'missing/masks/b.png'}",
        "dataset.classes=1: expected an integer, at least 2",
        "dataset.values=[0, 1, 2]: expected a number from 0 to 255, or a colour",
        "dataset.values=[0, 300]: expected a number from 0 to 255, or a colour",
        "dataset.ignore=1: is the value of another class",
        "dataset.values=[5, 5]: is the value of another class",
        "dataset.channels=4: expected 3",
        "dataset.test=0.01: leaves no image to test on",
    ]
    for message, words in zip(found, wanted, strict=True):
        assert words in message


@pytest.mark.slow
def test_a_unet_trains_on_folders_with_augmentation(
    isolated: Callable[..., Any], plan: Callable[..., Any], tmp_path: Path
) -> None:
    for split, count in (("train", 12), ("test", 4)):
        for number in range(count):
            write_pair(tmp_path / "shapes" / split, str(number), halves(20, 16 + number))
    chosen = plan(
        "experiment=segmentation", "dataset=segmentation_folder", f"dataset.data_dir={tmp_path / 'shapes'}",
        "dataset.classes=[left,right]", "dataset.size=[16,16]", "dataset.resize=pad", "model.filters=[2,4]",
        "dataset.augment={flip: true, crop: 2, resized_crop: 0.5, color_jitter: 0.3, erase: 0.5}",
        "training.batch_size=4", "training.epochs=2", "tracking=none", "training.steps_per_loop=1",
    )  # fmt: skip
    (found,) = isolated(train_all, [chosen])
    assert np.isfinite(list(found.values())).all()
    assert {"train/loss", "train/mean_iou", "val/mean_iou", "test/mean_iou"} <= {name for _, name in found}
