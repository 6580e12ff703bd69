"""Augmentation: what is drawn depends on (seed, epoch, place) alone, and changes what it should."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.features.augment.feature import Augment
from scaleflow.interfaces import Arrays, Batching, Dataset, Inputs, Outputs, Plan, Stream, Target
from tests.dataset.reading import as_stream, spread_over
from tests.strategy.test_structures import train_all
from tests.training.interrupted import differences
from tests.training.test_callback_state import BASE

EXAMPLES, GLOBAL, SIDE = 53, 12, 4
INPUTS = Inputs((SIDE, SIDE, 1), "uint8", scale=1 / 255)
OUTPUTS = Outputs("classification", (EXAMPLES,))


def pictures() -> Arrays:
    """Number i has the pixels 1 to 16, and its number in the first place."""
    images = np.tile(np.arange(1, 17, dtype=np.uint8).reshape(1, SIDE, SIDE, 1), (EXAMPLES, 1, 1, 1))
    images[:, 0, 0, 0] = np.arange(EXAMPLES) + 100
    return Arrays(images, np.arange(EXAMPLES, dtype=np.int32))


def reader(strategy: Any, feed: Any) -> Callable[..., list[Any]]:
    """`read(epoch, first=0)`: the batches (inputs, targets, mask) of an epoch, as the compiled loop gets them."""
    import tensorflow as tf

    def in_replica(fetched: Any, epoch: tf.Tensor, step: tf.Tensor) -> Any:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        parts = [
            feed.micro_batch(fetched, epoch, step, replica, tf.constant(index, tf.int64))
            for index in range(feed.batching.accumulate)
        ]
        return tuple(tf.concat(each, axis=0) for each in zip(*parts, strict=True))

    @tf.function
    def batch(opened: Any, epoch: tf.Tensor, step: tf.Tensor) -> Any:
        return strategy.run(in_replica, args=(feed.fetch(opened), epoch, step))

    def read(epoch: int, first: int = 0) -> list[Any]:
        opened = feed.open(epoch, first)
        found = []
        for step in range(first, feed.batching.steps(feed.examples)):
            parts = batch(opened, tf.constant(epoch, tf.int64), tf.constant(step, tf.int64))
            found.append(
                tuple(np.concatenate([v.numpy() for v in strategy.experimental_local_results(part)]) for part in parts)
            )
        return found

    return read


MOVED, MIXED, ALL = Augment(flip=True, crop=1), Augment(mixup=0.4), Augment(True, 2, 1.0)
TURNED = Augment(vertical_flip=True, rotation=20, zoom=0.2, translation=0.2, contrast=0.5, randaugment=9)
EVERY = replace(TURNED, flip=True, crop=1, mixup=0.4, cutmix=1.0)


def parts_of(form: str, options: Augment, replicas: int, accumulate: int) -> tuple[Any, Any, Any]:
    """The strategy, the plain feed and the augmented one."""
    import tensorflow as tf

    from scaleflow import dataset
    from scaleflow.features.augment.feed import augment_feed

    strategy = tf.distribute.get_strategy() if replicas == 1 else spread_over(replicas)
    arrays = pictures()
    examples: Any = arrays
    if form != "arrays":
        examples = Stream(as_stream(arrays), EXAMPLES, lambda image, number: (image, number))
    if form == "records":
        unkept = Dataset(Target("dataset", "x"), validation=None, cache="none")
        examples = dataset.prepare_splits(Given(examples), unkept, 0).train
    plain = dataset.make_feed(examples, Batching(GLOBAL // replicas // accumulate, accumulate, replicas), strategy, 5)
    return strategy, plain, augment_feed(plain, options, 5, INPUTS, OUTPUTS)


def course() -> dict[str, Any]:
    """Two epochs, the second also from step 3 on, both as fit has them, and the first one unchanged."""
    found = {}
    for form, options in (
        *(("arrays", MOVED), ("arrays", MIXED), ("arrays", ALL), ("records", ALL), ("stream", ALL)),
        *(("arrays", EVERY), ("stream", EVERY)),
    ):
        strategy, plain, feed = parts_of(form, options, 1, 1)
        fitted = [tuple(t.numpy() for t in batch) for batch in feed.batches(2, feed.batching.steps(EXAMPLES))]
        read = reader(strategy, feed)
        found[form, options] = (read(0), read(1), read(1, 3), fitted, reader(strategy, plain)(0))
    return found


def divided() -> dict[str, Any]:
    """The second epoch on two replicas with two micro-batches each."""
    found = {}
    for form, options in (("arrays", ALL), ("stream", ALL), ("arrays", EVERY), ("stream", EVERY)):
        strategy, _, feed = parts_of(form, options, 2, 2)
        found[form, options] = reader(strategy, feed)(1)
    return found


class Given:
    inputs, outputs, splits = INPUTS, OUTPUTS, ("train",)

    def __init__(self, examples: Any) -> None:
        self._examples = examples

    def load(self, split: str) -> Any:
        return self._examples


def assert_same(found: Any, wanted: Any, name: str) -> None:
    for batch, other in zip(found, wanted, strict=True):
        real = other[2] == 1
        np.testing.assert_array_equal(batch[2], other[2], name)
        np.testing.assert_allclose(batch[0][real], other[0][real], err_msg=name)
        np.testing.assert_allclose(batch[1][real], other[1][real], rtol=1e-6, err_msg=name)


def real(batches: Any) -> tuple[Any, Any]:
    return tuple(np.concatenate([batch[part][batch[2] == 1] for batch in batches]) for part in (0, 1))  # type: ignore


@pytest.mark.slow
def test_draws_are_the_same_on_any_division_and_after_any_start(isolated: Callable[..., Any]) -> None:
    one = isolated(course)
    for (form, options), (first, second, rest, fitted, _) in one.items():
        name = f"{form}, {options}"
        assert_same(rest, second[3:], name)
        assert_same(fitted, [*first, *second], name)
        assert not np.array_equal(first[0][0], second[0][0])
    assert_same(one["records", ALL][0], one["arrays", ALL][0], "one order, in memory or not")
    for key, second in isolated(divided).items():
        assert_same(second, one[key][1], str(key))

    images, numbers = real(one["arrays", MOVED][0])
    plain, same = real(one["arrays", MOVED][4])
    np.testing.assert_array_equal(numbers, same)
    padded = np.pad(plain, [(0, 0), (1, 1), (1, 1), (0, 0)])
    mirrored = np.pad(plain[:, :, ::-1], [(0, 0), (1, 1), (1, 1), (0, 0)])
    seen = set()
    for number, image in enumerate(images):
        fits = [
            (down, across, way)
            for way, whole in (("plain", padded[number]), ("mirrored", mirrored[number]))
            for down in range(3)
            for across in range(3)
            if np.array_equal(whole[down : down + SIDE, across : across + SIDE], image)
        ]
        assert len(fits) == 1
        seen.add(fits[0])
    assert len(seen) > 12  # of 18

    images, shares = real(one["arrays", MIXED][0])
    plain, numbers = real(one["arrays", MIXED][4])
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-6)
    own = shares[np.arange(EXAMPLES), numbers]
    others = shares.copy()
    others[np.arange(EXAMPLES), numbers] = 0
    partners = others.argmax(axis=1)
    expected = own * (numbers + 100) + (1 - own) * (partners + 100)
    np.testing.assert_allclose(images[:, 0, 0, 0], expected, atol=0.51)
    assert 0.3 < own.mean() < 0.7
    assert len(set(partners.tolist())) > EXAMPLES // 2


def refusals() -> list[str]:
    from scaleflow.features.augment.feed import augment_feed

    picture, classes = Inputs((8, 8, 1)), Outputs("classification", (3,))
    cases: list[tuple[Augment, Any, Any]] = [
        (Augment(mixup=0.2), Inputs((250,), "int32", vocabulary=9), classes),
        (Augment(flip=True), Inputs((8,)), classes),
        (Augment(crop=4), Inputs((), "string"), classes),
        (Augment(flip=True), {"a": Inputs((8,)), "b": Inputs((2, 2))}, classes),
        (Augment(flip=True), {"a": picture, "b": picture}, classes),
        (Augment(flip=True), {"a": picture}, {"mask": Outputs("classification", (4, 4, 2)), "b": classes}),
        (Augment(crop=2), picture, Outputs("classification", (8, 8, 2))),
        (Augment(mixup=0.2), {"a": picture, "b": picture}, classes),
        (Augment(mixup=0.2), picture, {"a": classes}),
        (Augment(mixup=0.2), picture, Outputs("classification", (3,), ignore=-1)),
        (Augment(rotation=15), Inputs((8,)), classes),
        (Augment(vertical_flip=True), {"a": picture}, {"mask": Outputs("classification", (4, 4, 2)), "b": classes}),
        (Augment(cutmix=1.0), Inputs((8,)), classes),
        (Augment(cutmix=1.0), picture, Outputs("classification", (8, 8, 2))),
        (Augment(randaugment=9), picture, classes),
        (Augment(word_dropout=0.1), picture, classes),
        (Augment(word_dropout=0.1), Inputs((9,), "int32", vocabulary=9), Outputs("classification", (9, 9))),
    ]
    found = []
    for options, inputs, outputs in cases:
        with pytest.raises(ConfigError) as refused:
            augment_feed(None, options, 0, inputs, outputs)
        found.append(str(refused.value))
    return found


def test_augmentations_that_do_not_fit_the_inputs_are_refused(isolated: Callable[..., Any]) -> None:
    assert isolated(refusals) == [
        "dataset.augment.mixup=0.2: mixes only numbers, and the dataset's inputs are text; remove it",
        "dataset.augment.flip=true: needs images of shape (height, width, channels), and the dataset's inputs have "
        "shape (8,); remove it",
        "dataset.augment.crop=4: needs images of shape (height, width, channels), and the dataset's inputs have "
        "shape (); remove it",
        "dataset.augment.flip=true: needs images of shape (height, width, channels), and the dataset's inputs are a "
        "(8,), b (2, 2); remove it",
        "dataset.augment.flip=true: needs images of shape (height, width, channels), one in each example, and the "
        "dataset's inputs are a (8, 8, 1), b (8, 8, 1); remove it",
        "dataset.augment.flip=true: moves the pixels of images, but not the dataset's targets of shape (4, 4); "
        "augment both in the dataset",
        "dataset.augment.crop=2: adds a border, and the dataset has no target for it (Outputs.ignore); use "
        "dataset.augment.resized_crop",
        "dataset.augment.mixup=0.2: mixes only examples of one tensor, and the dataset's inputs have the keys a, "
        "b; remove it",
        "dataset.augment.mixup=0.2: mixes only examples of one tensor, and the dataset's targets have the key a; "
        "remove it",
        "dataset.augment.mixup=0.2: cannot mix targets of which -1 is ignored (Outputs.ignore); remove it",
        "dataset.augment.rotation=15: needs images of shape (height, width, channels), and the dataset's inputs have "
        "shape (8,); remove it",
        "dataset.augment.vertical_flip=true: moves the pixels of images, but not the dataset's targets of shape "
        "(4, 4); augment both in the dataset",
        "dataset.augment.cutmix=1: needs images of shape (height, width, channels), and the dataset's inputs have "
        "shape (8,); remove it",
        "dataset.augment.cutmix=1: mixes one target of each image, and the dataset's have shape (8, 8); remove it",
        "dataset.augment.randaugment=9: needs images of bytes (uint8) or with Inputs.scale, and the dataset's are "
        "float32; use rotation, translation, contrast or color_jitter, or leave dataset.normalise false",
        "dataset.augment.word_dropout=0.1: needs texts as numbers of words, and the dataset's inputs have shape (8, 8, "
        "1); remove it",
        "dataset.augment.word_dropout=0.1: leaves out words, and the dataset's targets of shape (9,) are for each "
        "word; remove it",
    ]


def coloured(replicas: int, options: Augment, ignore: int | None) -> tuple[Any, Any]:
    """Images whose three channels hold the class of each pixel x 20, and the classes; in the order of an epoch."""
    import tensorflow as tf

    from scaleflow.dataset import make_feed
    from scaleflow.features.augment.feed import augment_feed

    size = (12, 16)
    classes = np.random.default_rng(0).integers(0, 10, (24, 3, 4)).repeat(4, axis=1).repeat(4, axis=2)
    images = np.repeat(classes[..., None] * 20, 3, axis=-1).astype(np.uint8)
    strategy = tf.distribute.get_strategy() if replicas == 1 else spread_over(replicas)
    feed = make_feed(Arrays(images, classes.astype(np.uint8)), Batching(12 // replicas, 1, replicas), strategy, 5)
    outputs = Outputs("classification", (*size, 10), ignore=ignore)
    changed = augment_feed(feed, options, 5, Inputs((*size, 3), "uint8"), outputs)
    read = reader(strategy, changed)
    return real(read(0)), real(read(1))


MOVING = Augment(flip=True, crop=2, resized_crop=0.3)
COLOURED = Augment(flip=True, resized_crop=0.3, color_jitter=0.5, erase=0.7)


def masks() -> Any:
    turned = coloured(1, replace(TURNED, contrast=0.0, randaugment=0.0), None)
    return coloured(1, MOVING, 255), coloured(1, COLOURED, None), coloured(1, Augment(erase=1.0), 255), turned


def masks_divided() -> Any:
    return coloured(3, COLOURED, None)


@pytest.mark.slow
def test_masks_move_with_their_images_on_any_number_of_replicas(isolated: Callable[..., Any]) -> None:
    (moved, later), whole, (erased, _), turned = isolated(masks)
    for images, classes in turned:  # at the borders of fields, bilinear values lie between
        assert np.isclose(images[..., 0], classes * 20.0, atol=1).mean() > 0.5
        assert abs(images[..., 0] - classes * 20.0).mean() < 20
    for images, classes in (moved, later):
        # Between two fields of the image bilinear values lie between theirs; elsewhere they are the class's.
        counts = classes < 255
        same = np.isclose(images[..., 0], classes * 20.0)
        assert same[counts].mean() > 0.6
        assert abs(images[..., 0][counts] - classes[counts] * 20.0).mean() < 15
        assert (images[~counts] == 0).all()  # the border
        assert 0.01 < (~counts).mean() < 0.4
    assert not np.array_equal(moved[0], later[0])
    for parts, others in zip(whole, isolated(masks_divided), strict=True):
        np.testing.assert_array_equal(parts[0], others[0])
        np.testing.assert_array_equal(parts[1], others[1])
    images, classes = whole[0]
    assert classes.max() < 10  # nothing is ignored where the dataset has no such value
    assert len({tuple(image[0, 0]) for image in images}) > 12
    images, classes = erased
    gone = classes == 255
    assert (images[gone] == 0).all()
    assert ((gone.mean(axis=(1, 2)) > 0.01) & (gone.mean(axis=(1, 2)) < 0.45)).all()
    np.testing.assert_array_equal(images[..., 0][~gone], classes[~gone] * 20)


def jittered() -> Any:
    import tensorflow as tf

    from scaleflow.features.augment.image_changes import jitter

    images = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3)).astype(np.uint8)
    cases = {"brightness": (0, 0.25), "contrast": (1, 0.25), "saturation": (2, 0.0)}
    found = {}
    for name, (place, drawn) in cases.items():
        draws = np.full((3, 2), 0.5, np.float32)
        draws[place] = drawn
        found[name] = jitter(tf.constant(images), 1.0, tf.constant(draws)).numpy()
    return images, found, jitter(tf.constant(images[..., :1]), 0.5, tf.zeros([3, 2])).numpy()


def test_colours_change_by_their_factors(isolated: Callable[..., Any]) -> None:
    images, found, grey = isolated(jittered)
    values = images.astype(np.float64)
    light = values @ [0.299, 0.587, 0.114]
    mean = light.mean(axis=(1, 2))[:, None, None, None]
    np.testing.assert_allclose(found["brightness"], values * 0.5, atol=0.51)
    np.testing.assert_allclose(found["contrast"], (values - mean) * 0.5 + mean, atol=0.51)
    np.testing.assert_allclose(found["saturation"], np.repeat(light[..., None], 3, axis=-1), atol=0.51)
    half = values[..., :1] * 0.5
    mean = half.mean(axis=(1, 2, 3), keepdims=True)
    np.testing.assert_allclose(grey, (half - mean) * 0.5 + mean, atol=0.51)


@pytest.mark.slow
def test_both_engines_train_alike_on_what_is_augmented(isolated: Callable[..., Any], plan: Callable[..., Plan]) -> None:
    words = (
        *("dataset.augment={flip: true, crop: 1, mixup: 0.4}", "dataset.normalise=true", "dataset.limit=200"),
        *("hardware=cpu", "hardware.logical_devices=2", "tracking=none"),
        *("training.global_batch_size=48", "training.epochs=2", "training.steps_per_loop=1"),
    )
    loop, fit = isolated(
        train_all, [plan(*words, "strategy=one_device"), plan(*words, "strategy=mirrored", "training.engine=fit")]
    )
    assert {name for _, name in loop} >= {"train/loss", "train/accuracy", "val/loss"}
    assert len({step for step, name in loop if name == "val/loss"}) == 2
    known = {key: value for key, value in loop.items() if key[1] != "train/gradient_norm"}  # Keras's fit has none
    assert fit == pytest.approx(known, rel=1e-3)


def turned(images: Any) -> Any:
    """What the moves by a matrix make of images, for the least and the greatest random numbers."""
    import tensorflow as tf

    from scaleflow.features.augment.changes import MATRICES
    from scaleflow.features.augment.image_changes import shift_and_flip, transform

    found = {}
    for name, strength in (("rotation", 30.0), ("zoom", 0.4), ("translation", 0.25)):
        for number in (0.0, 0.75):
            matrices = MATRICES[name](strength, tf.constant([[number], [0.5]]), images.shape[1:3])
            found[name, number] = transform(tf.constant(images), matrices, is_mask=False).numpy()
    flipped = shift_and_flip(tf.constant(images), 0, None, [tf.constant([True]), None])
    return found, flipped.numpy()


def test_images_are_turned_zoomed_and_shifted_as_by_scipy(isolated: Callable[..., Any]) -> None:
    from scipy import ndimage

    images = np.random.default_rng(0).uniform(0, 1, (1, 12, 17, 1)).astype(np.float32)
    found, flipped = isolated(turned, images)
    np.testing.assert_array_equal(flipped, images[:, ::-1])
    down, across = np.mgrid[:12, :17] - np.array([5.5, 8.0])[:, None, None]
    for (name, number), result in found.items():
        share = 2 * number - 1
        angle, size = np.radians(30 * share) * (name == "rotation"), 1 + 0.4 * share * (name == "zoom")
        x = (across * np.cos(angle) - down * np.sin(angle)) / size
        y = (across * np.sin(angle) + down * np.cos(angle)) / size + 12 * 0.25 * share * (name == "translation")
        wanted = ndimage.map_coordinates(images[0, :, :, 0], [y + 5.5, x + 8], order=1, mode="reflect")
        np.testing.assert_allclose(result[0, :, :, 0], wanted, atol=1e-4, err_msg=name)


def changed_at_random(images: Any, names: list[str]) -> Any:
    """What single operations of `randaugment` make of images, at a strength of 15 of 30."""
    import tensorflow as tf

    from scaleflow.features.augment.image_changes import OPERATIONS, change_at_random

    found = {}
    for name in names:
        place = (OPERATIONS.index(name) + 0.5) / len(OPERATIONS)
        drawn = tf.tile(tf.constant([[place], [0.0], [0.9], [0.9]]), [1, len(images)])  # and identity
        found[name] = change_at_random(tf.constant(images), 15.0, drawn, 255.0).numpy()
        part = change_at_random(tf.constant(images / 16, tf.float32), 15.0, drawn, 255 / 16).numpy()
        np.testing.assert_allclose(part * 16, found[name], atol=0.51)
    return found


def test_operations_of_randaugment_are_those_of_pillow(isolated: Callable[..., Any]) -> None:
    from PIL import Image, ImageEnhance, ImageOps

    enhance = {"brightness": "Brightness", "color": "Color", "contrast": "Contrast", "sharpness": "Sharpness"}
    images = np.random.default_rng(0).integers(20, 200, (2, 12, 9, 3)).astype(np.uint8)
    found = isolated(changed_at_random, images, [*enhance, "posterize", "solarize", "autocontrast"])
    for number, image in enumerate(map(Image.fromarray, images)):
        wanted = {name: getattr(ImageEnhance, kind)(image).enhance(0.55) for name, kind in enhance.items()}
        wanted |= {"posterize": ImageOps.posterize(image, 6), "solarize": ImageOps.solarize(image, 128)}
        wanted["autocontrast"] = ImageOps.autocontrast(image)
        for name, each in wanted.items():
            inner = np.s_[1:-1, 1:-1]  # Pillow does not sharpen the border
            difference = found[name][number][inner].astype(int) - np.asarray(each)[inner]
            assert abs(difference).max() <= 2, name


def cut_and_dropped() -> Any:
    """An epoch of cut images whose pixels hold their number, and of texts of which words are left out."""
    import tensorflow as tf

    from scaleflow.dataset import make_feed
    from scaleflow.features.augment.feed import augment_feed

    numbers = np.arange(EXAMPLES)
    images = np.tile(numbers.astype(np.uint8).reshape(-1, 1, 1, 1), (1, 8, 10, 1))
    words = np.where(np.arange(30) < 5 + numbers[:, None] // 3, 2 + np.arange(30), 0).astype(np.int32)
    words[0, 1:] = 0  # a single word
    strategy, found = tf.distribute.get_strategy(), []
    for inputs, described, options in (
        (images, Inputs((8, 10, 1), "uint8"), Augment(cutmix=1.0)),
        (words, Inputs((30,), "int32", vocabulary=40), Augment(word_dropout=0.3)),
    ):
        arrays = Arrays(inputs, numbers.astype(np.int32))
        feed = augment_feed(make_feed(arrays, Batching(GLOBAL, 1, 1), strategy, 5), options, 5, described, OUTPUTS)
        read = reader(strategy, feed)
        found.append((real(read(0)), real(read(1))))
    return found, words


def test_cutmix_mixes_targets_by_area_and_word_dropout_leaves_padding(isolated: Callable[..., Any]) -> None:
    (cut, dropped), words = isolated(cut_and_dropped)
    own = []
    for images, targets in cut:
        shares = np.stack([(images == number).mean(axis=(1, 2, 3)) for number in range(EXAMPLES)], axis=1)
        np.testing.assert_allclose(targets, shares, atol=1e-6)
        assert (shares > 0).sum(axis=1).max() == 2
        own.append(shares.max(axis=1))
    assert not np.array_equal(own[0], own[1])
    assert 0.6 < np.mean(own) < 0.9  # the larger of two parts, one of which is uniform: 0.75
    (texts, numbers), (later, others) = dropped
    before = words[numbers]
    assert ((texts == before) | (texts == 0)).all()
    assert (texts > 0).any(axis=1).all()
    assert 0.25 < (texts == 0)[before > 0].mean() < 0.35
    order, again = np.argsort(numbers), np.argsort(others)
    assert not np.array_equal(texts[order], later[again])


@pytest.mark.slow
def test_a_resumed_run_sees_the_same_augmented_examples(
    isolated: Callable[..., Any], plan: Callable[..., Plan]
) -> None:
    words = "dataset.augment={rotation: 20, zoom: 0.2, randaugment: 9, cutmix: 1.0, mixup: 0.2, vertical_flip: true}"
    assert isolated(differences, plan(*BASE, words), [3])[0] == []


def sheets() -> Any:
    import tensorflow as tf

    from scaleflow import dataset
    from scaleflow.dataset.batches.rows import to_rows
    from scaleflow.features.augment.feed import augment_feed
    from scaleflow.features.augment.sheet import write_sheet

    strategy, found = tf.distribute.get_strategy(), []
    words = np.tile(np.array([2, 3, 4, 0], np.int32), (20, 1))
    for inputs, described, options in (
        (pictures().inputs[:20], INPUTS, Augment(vertical_flip=True, cutmix=1.0)),
        (words, Inputs((4,), "int32", vocabulary=5), Augment(word_dropout=0.5)),
        (words, Inputs((4,), "int32", vocabulary=5), None),
    ):
        arrays = Arrays(inputs, np.arange(20, dtype=np.int32))
        plain = dataset.make_feed(arrays, Batching(GLOBAL, 1, 1), strategy, 5)
        feed = augment_feed(plain, options, 5, described, OUTPUTS)
        rows = to_rows(arrays)
        with tempfile.TemporaryDirectory() as folder:
            learned = SimpleNamespace(preprocessing={"": SimpleNamespace(learned=["good", "bad", "film"])})
            splits: Any = SimpleNamespace(train=rows, transforms={}, learned=learned)
            paths = write_sheet(feed, splits, Path(folder) / "plots")
            found.append({path.name: path.read_bytes() for path in paths})
    return found


def test_a_sheet_shows_augmented_examples_beside_the_original(isolated: Callable[..., Any]) -> None:
    from PIL import Image

    pictured, texts, nothing = isolated(sheets)
    sheet = np.asarray(Image.open(io.BytesIO(pictured["augmented.png"])))
    assert list(pictured) == ["augmented.png"]
    assert sheet.shape == (8 * 96, 5 * 96, 3)  # 4 pixels become 96
    np.testing.assert_array_equal(sheet[36, 12:96:24, 0], [5, 6, 7, 8])  # the original
    rows = texts["augmented.txt"].decode().strip().split("\n\n")
    assert len(rows) == 8
    assert all(row.split("\n")[0] == "good bad film" and len(row.split("\n")) == 5 for row in rows)
    assert "_" in texts["augmented.txt"].decode()
    assert nothing == {}


def fail_to_show() -> list[str]:
    """Returns the notes about a sheet that cannot be written."""
    from scaleflow.features.augment import sheet
    from scaleflow.features.augment.hook import AugmentExamples

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("broken")

    sheet.write_sheet = fail
    notes: list[Any] = []
    data: Any = SimpleNamespace(splits=None)
    feed: Any = None
    AugmentExamples().report_examples(data, feed, Path(), notes.append)
    return [note.text for note in notes]


def test_a_sheet_that_cannot_be_written_ends_no_run(isolated: Callable[..., Any]) -> None:
    (text,) = isolated(fail_to_show)
    assert text.startswith("the sheet of augmented examples: missing, and the rest goes on (RuntimeError: broken")


def test_augmentation_leaves_no_folds(plan: Callable[..., Plan]) -> None:
    from scaleflow.features.augment.hook import AugmentExamples

    assert AugmentExamples().explain_no_folds(plan()) == "dataset.augment mixes examples of several folds"


def mix_weighted(kind: str, smoothing: float, class_weights: list[float] | None) -> Any:
    """Gradients of a linear model's outputs on one batch of mixed examples, and what they were mixed from."""
    import tensorflow as tf

    from scaleflow import dataset
    from scaleflow.features.augment.feed import augment_feed
    from scaleflow.interfaces import ObjectiveOptions
    from scaleflow.objective import make_objective

    random = np.random.default_rng(0)
    count, width = 24, {"classification": 3, "binary": 1, "regression": 1}[kind]
    outputs = Outputs(kind, (width,))  # type: ignore[arg-type]
    numbers = np.arange(count, dtype=np.float32)
    images = np.zeros((count, 4, 4, 1), np.float32) + numbers[:, None, None, None]
    targets = {
        "classification": random.integers(0, 3, count),
        "binary": random.integers(0, 2, (count, 1)).astype(np.float32),
        "regression": random.normal(size=(count, 1)).astype(np.float32),
    }[kind]
    weights = np.where(numbers % 3 == 0, 0, random.uniform(0.2, 3, count)).astype(np.float32)
    arrays = Arrays(images, targets, weights)
    plain = dataset.make_feed(arrays, Batching(count, 1, 1), tf.distribute.get_strategy(), 5)
    mixed = augment_feed(plain, Augment(mixup=1.0), 5, Inputs((4, 4, 1), "float32"), outputs)
    goal = make_objective(
        outputs,
        ObjectiveOptions(label_smoothing=smoothing),
        class_weights=None if class_weights is None else {"": class_weights},
        is_weighted=True,
    )
    ((inputs, soft, mask, totals),) = mixed.batches(1, 1)
    parts = [next(iter(feed.batches(1, 1))) for feed in mixed._feeds]  # type: ignore[attr-defined]
    predicted = tf.constant(random.normal(size=(count, width)).astype(np.float32))
    gradients = []
    first, second = (part[0].numpy()[:, 0, 0, 0] for part in parts)
    drawn = inputs.numpy()[:, 0, 0, 0]
    same = first == second
    share = np.where(same, 0.5, (drawn - second) / np.where(same, 1, first - second)).astype(np.float32)
    with tf.GradientTape() as tape:
        tape.watch(predicted)
        loss = tf.reduce_sum(goal.loss(soft, predicted) * totals)
    gradients.append(tape.gradient(loss, predicted).numpy())
    with tf.GradientTape() as tape:
        tape.watch(predicted)
        loss = tf.reduce_sum(
            tf.constant(share) * parts[0][3] * goal.loss(parts[0][1], predicted)
            + tf.constant(1 - share) * parts[1][3] * goal.loss(parts[1][1], predicted)
        )
    gradients.append(tape.gradient(loss, predicted).numpy())
    return (
        gradients,
        weights[first.astype(int)],
        weights[second.astype(int)],
        totals.numpy(),
        share,
        bool(mask.numpy().all()),
    )


@pytest.mark.parametrize(
    ("kind", "smoothing", "class_weights"),
    [
        ("classification", 0.0, None),
        ("classification", 0.1, [1.0, 0.0, 3.0]),
        ("binary", 0.1, [0.5, 4.0]),
        ("regression", 0.0, None),
    ],
)
def test_a_mixture_has_the_mixture_of_two_weighted_losses(
    isolated: Callable[..., Any], kind: str, smoothing: float, class_weights: list[float] | None
) -> None:
    gradients, own, others, totals, share, is_whole = isolated(mix_weighted, kind, smoothing, class_weights)
    assert is_whole
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(totals, share * own + (1 - share) * others, rtol=1e-3, atol=1e-4)
    assert (gradients[0][(own == 0) & (others == 0)] == 0).all()
