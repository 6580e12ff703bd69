from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from tests.dataset.files import examples, holds, names, picture, plain, prepared, refused, write

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def every_format(base: Path) -> None:
    """train has each format in class a, and a folder inside class b; val and test have a picture to each class."""
    rows = np.random.default_rng(0).integers(0, 256, (4, 6, 3))
    picture(base / "train/a/1.png", rows)
    picture(base / "train/a/2.png", rows[..., 0])  # grey
    picture(base / "train/a/3.png", np.concatenate([rows, rows[..., :1]], axis=-1))  # with alpha
    picture(base / "train/a/4.bmp", rows)
    picture(base / "train/a/5.jpg", plain(RED), quality=95)
    picture(base / "train/a/6.JPEG", plain(RED), format="JPEG", quality=95)
    write(base / "train/a/notes.md", "no picture")
    write(base / "train/a/.hidden.png", "no picture")
    from PIL import Image

    second = Image.fromarray(plain(GREEN)).convert("P")
    picture(base / "train/b/deep/er/7.gif", plain(BLUE), save_all=True, append_images=[second])
    for split, colour in (("val", RED), ("test", BLUE)):
        for name in "ab":
            picture(base / split / name / "8.png", plain(colour))
    assert rows.shape == (4, 6, 3)


def formats(base: Path) -> Any:
    from scaleflow.dataset.image_folder import ImageFolder

    source = ImageFolder(str(base), size=[4, 6])
    pictures = dict(zip(names(source, "train"), zip(*examples(source, "train"), strict=True), strict=True))
    grey = ImageFolder(str(base), size=[4, 6], channels=1, kind="classification", classes=["b", "a"])
    return (
        (source.inputs, source.outputs, tuple(source.splits)),
        {Path(path).name: (image, target) for path, (image, target) in pictures.items()},
        examples(source, "validation"),
        (grey.inputs, grey.outputs, examples(grey, "test")),
    )


def test_pictures_of_every_format_become_arrays_of_one_size(isolated: Callable[..., Any], tmp_path: Path) -> None:
    every_format(tmp_path)
    described, train, validation, (grey_inputs, grey_outputs, grey) = isolated(formats, tmp_path)
    inputs, outputs, splits = described
    assert (inputs.shape, inputs.dtype, inputs.scale) == ((4, 6, 3), "uint8", 1 / 255)
    assert (outputs.kind, outputs.shape, outputs.names) == ("binary", (1,), ("a", "b"))
    assert splits == ("train", "validation", "test")
    assert sorted(train) == ["1.png", "2.png", "3.png", "4.bmp", "5.jpg", "6.JPEG", "7.gif"]
    rows = np.random.default_rng(0).integers(0, 256, (4, 6, 3))
    wanted = {"1.png": rows, "3.png": rows, "4.bmp": rows, "2.png": np.repeat(rows[..., :1], 3, axis=-1)}
    wanted |= {"5.jpg": plain(RED), "6.JPEG": plain(RED), "7.gif": plain(BLUE)}
    for name, (image, target) in train.items():
        assert (image.shape, image.dtype) == ((4, 6, 3), np.uint8)
        assert np.abs(image.astype(int) - wanted[name]).max() <= (2 if name[0] in "56" else 0), name
        assert (target.tolist(), target.dtype) == ([float(name == "7.gif")], np.float32)
    assert [image[0, 0].tolist() for image in validation[0]] == [list(RED)] * 2
    assert sorted(target.tolist() for target in validation[1]) == [[0.0], [1.0]]
    assert (grey_inputs.shape, grey_outputs.kind, grey_outputs.shape) == ((4, 6, 1), "classification", (2,))
    assert grey_outputs.names == ("b", "a")
    assert [image[0, 0].tolist() for image in grey[0]] == [[29]] * 2  # 0.114 x 255 of blue
    assert sorted(target.tolist() for target in grey[1]) == [0, 1]


def resized(path: Path) -> dict[str, Any]:
    import tensorflow as tf

    from scaleflow.dataset.reading.images import Resize, make_image_decoder

    encoded = tf.io.read_file(str(path))
    wide = {how: make_image_decoder([4, 4], how)(encoded).numpy() for how in get_args(Resize)}
    return wide | {
        "tall": make_image_decoder([8, 2], "crop")(encoded).numpy(),
        "same": make_image_decoder([4, 8], "pad")(encoded).numpy(),
    }


def test_a_picture_is_stretched_padded_or_cropped(isolated: Callable[..., Any], tmp_path: Path) -> None:
    columns = np.array([50, 50, 100, 100, 150, 150, 200, 200])  # 4 x 8, in pairs of columns
    path = picture(tmp_path / "p.png", np.broadcast_to(columns[None, :, None], (4, 8, 3)))
    found = isolated(resized, path)
    assert {name: image.shape for name, image in found.items()} == {
        **dict.fromkeys(("stretch", "pad", "crop"), (4, 4, 3)),
        "tall": (8, 2, 3),
        "same": (4, 8, 3),
    }
    assert found["stretch"][0, :, 0].tolist() == [50, 100, 150, 200]  # the mean of two pixels each
    assert found["crop"][0, :, 0].tolist() == [100, 100, 150, 150]  # the middle four columns
    assert found["pad"][[0, 3]].max() == 0  # black above and below
    assert found["pad"][1:3].min() > 0
    assert found["tall"][0, 0, 0] == found["tall"][7, 1, 0] == 100  # one column, enlarged
    assert found["same"][0, :, 0].tolist() == columns.tolist()


def sharpness() -> dict[tuple[int, int, int], tuple[float, float]]:
    """By size and how it resizes: the mean difference of a photograph's JPEG from an antialiased resize, ours and
    bilinear's."""
    import tensorflow as tf
    from sklearn.datasets import load_sample_images

    from scaleflow.dataset.reading.images import make_image_decoder

    found = {}
    for number, photo in enumerate(load_sample_images().images):
        for side in (400, 200, 128, 64, 32):
            encoded = tf.io.encode_jpeg(photo, quality=92)
            whole = tf.io.decode_jpeg(encoded)
            wanted = tf.image.resize(whole, [side, side], antialias=True)
            ours = tf.cast(make_image_decoder([side, side])(encoded), tf.float32)
            both = (float(tf.reduce_mean(abs(each - wanted))) for each in (ours, tf.image.resize(whole, [side, side])))
            found[number, *photo.shape[:1], side] = tuple(both)
    return found


def test_a_jpeg_that_is_decoded_smaller_stays_nearer_to_an_antialiased_resize_than_bilinear(
    isolated: Callable[..., Any],
) -> None:
    for size, (ours, bilinear) in isolated(sharpness).items():
        assert ours < 0.9 * bilinear, size
        assert ours < 6, size


def jpegs(base: Path) -> dict[str, Any]:
    from scaleflow.dataset.reading.images import Resize, make_image_decoder

    def decoded(name: str, *options: Any) -> Any:
        return make_image_decoder(*options)((base / name).read_bytes()).numpy()

    shrunk = {how: decoded("wide.jpg", [8, 8], how) for how in get_args(Resize)}
    return shrunk | {
        "grey": decoded("grey.jpg", [8, 8]),
        "one": decoded("wide.jpg", [8, 8], "stretch", 1),
        "large": decoded("grey.jpg", [96, 40]),
    }


def test_jpegs_of_every_shape_become_arrays_of_one_size(isolated: Callable[..., Any], tmp_path: Path) -> None:
    colours = np.repeat(np.array([RED, GREEN, GREEN, BLUE]), 32, axis=0)  # 128 columns
    picture(tmp_path / "wide.jpg", np.broadcast_to(colours, (64, 128, 3)), quality=95)
    picture(tmp_path / "grey.jpg", np.full((64, 128), 77), quality=95)
    found = isolated(jpegs, tmp_path)
    assert {name: image.shape for name, image in found.items()} == {
        **dict.fromkeys(("stretch", "pad", "crop", "grey"), (8, 8, 3)),
        "one": (8, 8, 1),
        "large": (96, 40, 3),
    }
    for name, columns in (("stretch", (0, 3, 7)), ("pad", (0, 3, 7))):
        assert np.abs(found[name][4, columns].astype(int) - [RED, GREEN, BLUE]).max() < 8, name
    assert found["pad"][[0, 1, 6, 7]].max() == 0
    assert found["crop"][..., 1].min() > 240  # the middle is green
    assert np.abs(found["one"][4, [0, 3, 7], 0].astype(int) - [76, 150, 29]).max() < 5
    for name in ("grey", "large"):
        assert np.abs(found[name].astype(int) - 77).max() <= 2


def decode_turned(base: Path) -> dict[str, tuple[Any, Any]]:
    """By file: the decoded picture, and its size as a segmentation compares it with the mask."""
    import tensorflow as tf

    from scaleflow.dataset.reading.images import decode_image, image_size, make_image_decoder

    find_size, decode = tf.function(image_size), make_image_decoder([32, 16], "pad")
    found = {}
    for path in base.glob("*.*"):
        encoded = tf.constant(path.read_bytes())
        whole = decode_image(encoded, 3, lambda shape: tf.constant(0))
        found[path.name] = (decode(encoded).numpy(), find_size(encoded, whole).numpy().tolist())
    return found


def test_a_jpeg_is_turned_as_its_camera_says(isolated: Callable[..., Any], tmp_path: Path) -> None:
    from PIL import Image, ImageOps

    pixels = np.zeros((128, 256, 3), np.uint8)  # decoded smaller than it is
    for n, colour in enumerate((RED, GREEN, BLUE, (255, 255, 255))):
        pixels[64 * (n // 2) : 64 * (n // 2 + 1), 128 * (n % 2) : 128 * (n % 2 + 1)] = colour
    for order in "<>":
        for orientation in range(1, 9):
            exif = Image.Exif()
            exif.endian = order
            exif[0x010F], exif[0x0112] = "a camera", orientation
            data = exif.tobytes()
            picture(tmp_path / f"{order}{orientation}.jpg", pixels, quality=95, exif=data)
            picture(tmp_path / f"{order}{orientation} and a density.jpg", pixels, quality=95, exif=data, dpi=(72, 72))
    picture(tmp_path / "turned.png", pixels, exif=data)
    camera = (tmp_path / "<6.jpg").read_bytes()
    for marker, text in ((0xFE, b"a comment"), (0xE1, b"http://ns.adobe.com/xap/1.0/" + bytes(9000))):
        segment = bytes([0xFF, marker]) + (len(text) + 2).to_bytes(2, "big") + text
        write(tmp_path / f"{marker} before.jpg", camera[:2] + segment + camera[2:])
    picture(tmp_path / "plain.jpg", pixels, quality=95)
    write(
        tmp_path / "a word.jpg", (tmp_path / "plain.jpg").read_bytes() + b"Exif" + bytes([0x12, 1, 3, 0, 1, 0, 0, 0, 6])
    )
    for name, (decoded, size) in isolated(decode_turned, tmp_path).items():
        turned = ImageOps.exif_transpose(Image.open(tmp_path / name))
        assert size == [turned.height, turned.width], name
        height, width = (8, 16) if turned.width > turned.height else (32, 16)
        wanted = np.zeros((32, 16, 3))
        top = (32 - height) // 2
        wanted[top : top + height] = np.asarray(turned.resize((width, height), Image.Resampling.BOX), np.float64)
        assert np.abs(decoded - wanted).mean() < 4, name


def read_deep(base: Path) -> list[Any]:
    from scaleflow.dataset.image_folder import ImageFolder

    make = functools.partial(ImageFolder, str(base), size=[4, 6], test=0)
    return [prepared(make, cache="memory"), prepared(make, on_bad_example="skip", cache="memory")]


@pytest.mark.slow
def test_a_png_of_16_bits_is_refused_and_files_that_are_not_read_are_counted(
    isolated: Callable[..., Any], tmp_path: Path
) -> None:
    from PIL import Image

    for name in "ab":
        for n in range(3):
            picture(tmp_path / name / f"{n}.png", plain(RED))
            write(tmp_path / name / f"{n}.webp", b"RIFF")
    write(tmp_path / "b/notes.md", "no picture")
    write(tmp_path / "b/.hidden", "not counted")
    Image.fromarray(np.full((4, 6), 3000, np.uint16)).save(tmp_path / "a/deep.png")
    message, (counts, notes) = isolated(read_deep, tmp_path)
    assert f"{tmp_path}/a/deep.png of 'train' cannot be read: the picture has 16 bits for a value" in message
    assert "convert it to 8 bits" in message
    assert counts == {"train": 6}
    assert notes[0].startswith("dataset.data_dir: 7 files are not used (6 .webp, 1 .md): files that end in .jpg, ")
    assert "deep.png" in notes[1]


def division(base: Path) -> Any:
    from scaleflow.dataset.image_folder import ImageFolder

    def of(**changes: Any) -> tuple[list[str], list[str]]:
        source = ImageFolder(str(base), size=[2, 2], **changes)
        return names(source, "train"), names(source, "test") if "test" in source.splits else []

    return of(), of(), of(split_seed=1), of(test=0), of(classes=["b", "c"])


def test_where_there_are_no_splits_a_part_of_each_class_is_drawn(isolated: Callable[..., Any], tmp_path: Path) -> None:
    files = {str(write(tmp_path / name / f"{n}.png", "")) for name in "abc" for n in range(10)}
    (train, test), again, (_, other), whole, (fewer, _) = isolated(division, tmp_path)
    assert set(train) | set(test) == files
    assert sorted(Path(path).parent.name for path in test) == ["a", "a", "b", "b", "c", "c"]
    assert len(train) == 24
    assert again == (train, test)
    assert set(other) != set(test)
    assert set(whole[0]) == files
    assert not whole[1]
    assert [Path(path).parent.name for path in train[:8]] != ["a"] * 8  # mixed, so that a limit sees every class
    assert {Path(path).parent.name for path in fewer} == {"b", "c"}


def bad_pictures(base: Path) -> list[Any]:
    from scaleflow.dataset.image_folder import ImageFolder

    make = functools.partial(ImageFolder, str(base), size=[4, 6], test=0)
    return [prepared(make, cache="memory"), prepared(make, on_bad_example="skip", cache="memory")]


@pytest.mark.slow
def test_a_corrupt_picture_is_named_or_left_out(isolated: Callable[..., Any], tmp_path: Path) -> None:
    good = [picture(tmp_path / name / f"{n}.png", plain(RED)) for name in "ab" for n in range(4)]
    cut, text = write(tmp_path / "a/cut.png", good[0].read_bytes()[:40]), write(tmp_path / "b/text.jpg", "hello")
    message, skipped = isolated(bad_pictures, tmp_path)
    assert str(cut) in message or str(text) in message
    assert "dataset.on_bad_example=skip" in message
    counts, (note,) = skipped
    assert counts == {"train": 8}
    assert "2 of the 10 examples of 'train'" in note
    assert str(cut) in note
    assert str(text) in note


def refusals(base: Path) -> list[str]:
    from scaleflow.dataset.image_folder import ImageFolder

    def of(folder: str, **changes: Any) -> Callable[[], Any]:
        return functools.partial(ImageFolder, str(base / folder), **changes)

    return refused(
        [
            of("nowhere"),
            of("good/a/1.png"),
            of("empty_class"),
            of("no_train"),
            of("strange_class"),
            of("twice"),
            of("good/a"),
            of("good", classes=["a", "z"]),
            of("good", size=224),
            of("good", resize="zoom"),
            of("good", channels=4),
            of("good", kind="regression"),
            of("good", test=1.0),
            of("good", test=0.01),
            of("good", split_seed=-1),
            of("three", kind="binary"),
            functools.partial(ImageFolder, 3),  # type: ignore[arg-type]
        ]
    )


def test_folders_that_are_not_as_they_should_be_are_refused(isolated: Callable[..., Any], tmp_path: Path) -> None:
    for name in ("good/a", "good/b", "empty_class/a", "no_train/test/a", "no_train/test/b"):
        write(tmp_path / name / "1.png", "")
    for name in ("train/a", "train/b", "test/a", "test/c"):
        write(tmp_path / "strange_class" / name / "1.png", "")
    for name in ("train/a", "train/b", "val/a", "validation/a"):
        write(tmp_path / "twice" / name / "1.png", "")
    for name in "abc":
        write(tmp_path / "three" / name / "1.png", "")
    write(tmp_path / "empty_class/b/readme.md", "")
    found = isolated(refusals, tmp_path)
    holds(
        found,
        [
            ["dataset.data_dir", "nowhere: there is no such folder"],
            ["dataset.data_dir", "1.png: is a file, expected a folder"],
            [f"the class folder {tmp_path / 'empty_class/b'} has no file that ends in .jpg", "dataset.classes"],
            ["found test, but no folder train"],
            [f"{tmp_path / 'strange_class/test/c'} is not a class of the training split (a, b)"],
            ["val and validation are both the validation split"],
            ["has 0 folder(s), expected one folder for each of at least two classes"],
            [f"dataset.classes: there is no folder {tmp_path / 'good/z'}", "a, b"],
            ["dataset.size=224: expected [height, width]"],
            ["dataset.resize=zoom: expected one of stretch, pad, crop"],
            ["dataset.channels=4: expected 3"],
            ["dataset.kind=regression: expected one of auto, classification, binary"],
            ["dataset.test=1.0: expected a number from 0 to less than 1"],
            ["dataset.test=0.01: leaves no file to test on"],
            ["dataset.split_seed=-1"],
            ["dataset.kind=binary: there are 3 classes"],
            ["dataset.data_dir=3: expected a path"],
        ],
    )
