from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from tests.dataset.files import holds, refused, write

IMAGES = np.arange(10 * 4, dtype=np.uint8).reshape(10, 2, 2)
CLASSES = np.arange(10) % 3


def loaded(path: Path, **changes: Any) -> Any:
    from scaleflow.dataset.npz import Npz

    source = Npz(str(path), **changes)
    return source.inputs, source.outputs, {split: source.load(split) for split in source.splits}


def many(cases: list[tuple[Path, dict[str, Any]]]) -> list[Any]:
    return [loaded(path, **changes) for path, changes in cases]


def saved(folder: Path, name: str, **arrays: Any) -> Path:
    path = folder / f"{name}.npz"
    (np.savez_compressed if name == "compressed" else np.savez)(path, **arrays)
    return path


def test_arrays_are_splits_by_their_names(isolated: Callable[..., Any], tmp_path: Path) -> None:
    arrays = {"x_train": IMAGES, "y_train": CLASSES, "x_val": IMAGES[:2], "y_val": CLASSES[:2]}
    arrays |= {"x_test": IMAGES[4:7], "y_test": CLASSES[4:7, None]}
    renamed = {"a_train": IMAGES.astype(np.float64), "b_train": CLASSES}
    cases: list[tuple[Path, dict[str, Any]]] = [
        (saved(tmp_path, "plain", **arrays), {}),
        (saved(tmp_path, "compressed", **arrays), {}),
        (saved(tmp_path, "renamed", **renamed), {"inputs": "a", "targets": "b"}),
    ]
    found, compressed, (inputs, _, train) = isolated(many, cases)
    for described, outputs, splits in (found, compressed):
        assert (described.shape, described.dtype, described.scale) == ((2, 2), "uint8", 1 / 255)
        assert (outputs.kind, outputs.shape) == ("classification", (3,))
        assert list(splits) == ["train", "validation", "test"]
        np.testing.assert_array_equal(splits["train"].inputs, IMAGES)
        np.testing.assert_array_equal(splits["test"].inputs, IMAGES[4:7])
        np.testing.assert_array_equal(splits["test"].targets, CLASSES[4:7])
        assert splits["validation"].targets.dtype == np.int32
    assert (inputs.dtype, inputs.scale, train["train"].inputs.dtype) == ("float32", None, np.float32)


TARGETS: dict[str, tuple[Any, str, tuple[int, ...], str]] = {
    "floats": (CLASSES / 2, "regression", (1,), "auto"),
    "rows of floats": (np.ones((10, 4)) / 2, "regression", (4,), "auto"),
    "two classes": (CLASSES % 2, "binary", (1,), "auto"),
    "booleans": (CLASSES > 1, "binary", (1,), "auto"),
    "labels": (np.tile([[0, 1, 1]], (10, 1)), "multi_label", (3,), "auto"),
    "one-hot": (np.eye(3, dtype=int)[CLASSES], "classification", (3,), "classification"),
    "years": (CLASSES + 1990, "regression", (1,), "regression"),
}


def test_the_kind_follows_from_the_targets(isolated: Callable[..., Any], tmp_path: Path) -> None:
    cases: list[tuple[Path, dict[str, Any]]] = [
        (saved(tmp_path, name, x=IMAGES, y=y), {"kind": kind, "test": 0.2}) for name, (y, _, _, kind) in TARGETS.items()
    ]
    for (_, outputs, splits), (name, (y, kind, shape, _)) in zip(isolated(many, cases), TARGETS.items(), strict=True):
        assert (outputs.kind, outputs.shape) == (kind, shape), name
        assert (len(splits["train"]), len(splits["test"])) == (8, 2), name
        wanted = CLASSES if name == "one-hot" else y.reshape(10, *shape) if kind != "classification" else y
        both = np.concatenate([splits["train"].targets, splits["test"].targets])
        images = np.concatenate([splits["train"].inputs, splits["test"].inputs])
        order = images[:, 0, 0] // 4
        np.testing.assert_allclose(both, np.asarray(wanted, both.dtype)[order], err_msg=name)


def test_uncompressed_arrays_are_mapped(isolated: Callable[..., Any], tmp_path: Path) -> None:
    order = np.asfortranarray(IMAGES.astype(np.float32))
    path = saved(tmp_path, "plain", x_train=order, y_train=CLASSES, x_test=IMAGES.astype(np.float32), y_test=CLASSES)
    assert isolated(mapped, path) == {"x_train": True, "y_train": True, "x_test": True, "y_test": True}
    _, _, splits = isolated(loaded, path)
    np.testing.assert_array_equal(splits["train"].inputs, splits["test"].inputs)


def test_a_list_of_names_makes_a_dict(isolated: Callable[..., Any], tmp_path: Path) -> None:
    arrays = {"image": IMAGES, "age": np.arange(10.0), "sold": CLASSES > 0, "price": CLASSES + 1, "w": np.arange(10)}
    path = saved(tmp_path, "plain", **{f"{name}_train": array for name, array in arrays.items()})
    chosen = {"inputs": ["image", "age"], "targets": ["sold", "price"], "kind": {"price": "regression"}}
    inputs, outputs, splits = isolated(loaded, path, weights="w", **chosen)
    assert {name: (each.shape, each.dtype) for name, each in inputs.items()} == {
        "image": ((2, 2), "uint8"),
        "age": ((), "float32"),
    }
    assert {name: each.kind for name, each in outputs.items()} == {"sold": "binary", "price": "regression"}
    train = splits["train"]
    np.testing.assert_array_equal(train.inputs["image"], IMAGES)
    np.testing.assert_array_equal(train.targets["price"], CLASSES[:, None] + 1)
    np.testing.assert_array_equal(train.weights, np.arange(10))


def kept(path: Path) -> dict[str, bool]:
    """Whether the training split is still mapped, by what `dataset.cache` says."""
    from scaleflow import dataset
    from scaleflow.dataset.npz import Npz
    from scaleflow.interfaces import Dataset, Target

    def train(cache: Any, validation: Any) -> Any:
        options = Dataset(Target("dataset", "none"), cache=cache, validation=validation)
        return dataset.prepare_splits(Npz(str(path)), options, 0).train.inputs

    found = {cache: isinstance(train(cache, None), np.memmap) for cache in ("auto", "memory", "none", "file")}
    return {**found, "held out": isinstance(train("none", 0.2), np.memmap)}


def test_it_stays_mapped_unless_it_is_small_or_a_part_is_held_out(isolated: Callable[..., Any], tmp_path: Path) -> None:
    path = saved(tmp_path, "plain", x_train=IMAGES, y_train=CLASSES)
    wanted = {"auto": False, "memory": False, "none": True, "file": True, "held out": False}
    assert isolated(kept, path) == wanted


def mapped(path: Path) -> dict[str, bool]:
    from scaleflow.dataset.npz import open_arrays

    return {name: isinstance(array, np.memmap) for name, array in open_arrays(str(path)).items()}


def refusals(base: Path) -> list[str]:
    from scaleflow.dataset.npz import Npz

    def of(name: str, **changes: Any) -> Callable[[], Any]:
        return functools.partial(Npz, str(base / f"{name}.npz"), **changes)

    return refused(
        [
            of("nowhere"),
            of("no_zip"),
            of("cut"),
            of("objects"),
            of("text"),
            of("good", inputs="images"),
            of("good", targets="labels"),
            of("lengths"),
            of("shapes"),
            of("empty"),
            of("one_hot"),
            of("negative"),
            of("one_hot_wrong", kind="classification"),
            of("good", kind="ranking"),
            of("good", kind={"z": "binary"}),
            of("good", inputs=["x", "x"]),
            of("good", inputs=["x", "z"]),
            of("floats", kind="classification"),
            of("negative", kind="classification"),
            of("gaps"),
        ]
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_arrays_that_do_not_fit_are_refused(isolated: Callable[..., Any], tmp_path: Path) -> None:
    good = saved(tmp_path, "good", x=IMAGES, y=CLASSES)
    write(tmp_path / "no_zip.npz", "hello")
    write(tmp_path / "cut.npz", good.read_bytes()[:-30])
    saved(tmp_path, "objects", x=np.array([{}] * 10), y=CLASSES)
    saved(tmp_path, "text", x=np.array(["a"] * 10), y=CLASSES)
    saved(tmp_path, "lengths", x=IMAGES, y=CLASSES[:9])
    saved(tmp_path, "shapes", x_train=IMAGES, y_train=CLASSES, x_test=IMAGES[:, 0], y_test=CLASSES)
    saved(tmp_path, "empty", x=IMAGES[:0], y=CLASSES[:0])
    one_hot = np.eye(3, dtype=int)[CLASSES]
    saved(tmp_path, "one_hot", x=IMAGES, y=one_hot)
    saved(tmp_path, "one_hot_wrong", x=IMAGES, y=np.concatenate([one_hot[:9], [[1, 1, 0]]]))
    saved(tmp_path, "negative", x=IMAGES, y=CLASSES - 1)
    saved(tmp_path, "floats", x=IMAGES, y=CLASSES / 2)
    saved(tmp_path, "gaps", x=IMAGES, y=np.where(np.arange(10) > 7, np.nan, CLASSES))
    holds(
        isolated(refusals, tmp_path),
        [
            ["nowhere.npz: there is no such file"],
            ["no_zip.npz: is not a complete .npz file"],
            ["cut.npz: is not a complete .npz file"],
            ["the array x contains Python objects"],
            ["the array x is <U1", "expected numbers"],
            ["there is no array images_train or images; the arrays are x, y", "dataset.inputs"],
            ["there is no array labels; the arrays are x, y"],
            ["x has 10 examples, but y has 9"],
            ["the array x differs between the splits: uint8 (2, 2) in train, uint8 (2,) in test"],
            ["x is empty"],
            ["dataset.kind=auto", "single 1", "dataset.kind=classification", "multi_label"],
            ["dataset.kind=auto: the targets are integers from -1 to 1", "dataset.kind"],
            ["row 9 of the targets does not have exactly one 1"],
            ["dataset.kind=ranking: expected one of"],
            ["dataset.kind.z: there is no such target; the targets are y"],
            ["dataset.inputs=['x', 'x']: expected the name of an array, or a list of different names"],
            ["there is no array z; the arrays are x, y"],
            ["dataset.kind=classification: the targets are floats"],
            ["classification targets of 'train' range from -1 to 1, expected 0 to 1"],
            ["targets 'y' are NaN or infinite in 2 of 10 rows, the first of which is row 8 (from 0)"],
        ],
    )


@pytest.mark.parametrize(
    ("targets", "kind"),
    [
        ([0.0, 1.0, 1.0], "binary"),
        ([[0.0], [1.0], [1.0]], "binary"),
        ([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]], "multi_label"),
        ([0.0, 1.0, 0.5], "regression"),
        ([0.0, 0.0, 0.0], "regression"),
        ([0.0, 1.0, float("nan")], "regression"),
        ([-1.0, 1.0, 1.0], "all targets are -1 or 1"),
        ([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]], "dataset.kind=regression for amounts"),
    ],
)
def test_floats_that_mark_classes_are_not_read_as_amounts(targets: Any, kind: str) -> None:
    from scaleflow.dataset.npz import resolve_kind

    arrays = {"train": np.array(targets, "float32"), "test": np.array(targets, "float64")}
    if " " not in kind:
        assert resolve_kind("auto", arrays) == kind
        return
    with pytest.raises(ConfigError, match=kind):
        resolve_kind("auto", arrays)
    assert resolve_kind("regression", arrays) == "regression"


@pytest.mark.parametrize(
    ("targets", "last"),
    [
        ([[0, 1, 2, 9, 3, 4, 5, 6, 7, 8], [3, 3]], 9),
        ([[0, 1, 2]], 2),
        ([[0, 1]], None),  # two classes are recognised
        ([[0, 1, 2.5]], None),
        ([[1, 2, 3]], None),
        ([[0, 1, 2, 40]], None),
        ([list(range(200))], None),
        ([[0, 1, 2, float("nan")]], None),
    ],
)
def test_whole_floats_that_may_be_classes_are_named_in_a_note(targets: Any, last: int | None) -> None:
    from scaleflow.dataset.npz import describe_whole_floats

    note = describe_whole_floats("y", [np.array(each, "float64") for each in targets])
    assert note == (
        ""
        if last is None
        else f"dataset.kind=auto: the targets y are floats that are all whole numbers from 0 to {last}, and train as "
        "amounts; set dataset.kind=classification if they are classes"
    )
    assert describe_whole_floats("y", [np.array([[0, 1], [2, 3]], "float32")]) == ""
    assert describe_whole_floats("y", [np.array([0, 1, 2])]) == ""


def read_notes(path: Path) -> Any:
    from scaleflow.dataset.npz import Npz

    return Npz(str(path)).notes, Npz(str(path), kind="regression").notes


def test_a_source_has_the_note_unless_the_kind_is_typed(isolated: Callable[..., Any], tmp_path: Path) -> None:
    noted, silent = isolated(read_notes, saved(tmp_path, "floats", x=IMAGES, y=CLASSES.astype("float32")))
    assert len(noted) == 1
    assert silent == ()
