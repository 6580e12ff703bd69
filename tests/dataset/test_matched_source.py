"""Classes of new data among those that an earlier run knows: by their names, in every kind of source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, EarlierState, Inputs, LearnedState, Outputs, name_class
from scaleflow.serving.cells import match_names

X = np.zeros((6, 2), np.float32)


@pytest.mark.parametrize(
    ("names", "known", "expected"),
    [
        (["b", "a", "z"], ["a", "b"], [1, 0, None]),
        (["1.0", "0.0", "-0"], ["0", "1"], [1, 0, 0]),
        (["1", "1.0", "01"], ["1", "1.0"], [0, 1, None]),
        (["TRUE", "false"], ["False", "True"], [1, 0]),
        (["A", "1e0"], ["a", "1"], [None, 1]),
    ],
)
def test_names_match_exactly_or_as_numbers(names: Sequence[str], known: Sequence[str], expected: Any) -> None:
    assert match_names(names, known) == expected


class Own:
    """A user's source, which knows nothing of earlier runs."""

    inputs = Inputs((2,))
    splits = ("train", "test")

    def __init__(self, outputs: Any, targets: Any, is_stream: bool = False) -> None:
        self.outputs, self._targets, self._is_stream = outputs, targets, is_stream

    def load(self, split: str) -> Any:
        import tensorflow as tf

        from scaleflow.interfaces import Stream

        arrays = Arrays(X, self._targets)
        if not self._is_stream:
            return arrays
        dataset = tf.data.Dataset.from_tensor_slices((X, self._targets))
        return Stream(dataset, len(X), lambda x, y: (x, y), at_once=4)


def classes(*names: str, **more: Any) -> Outputs:
    return Outputs("classification", (len(names),), names, **more)


def two(*names: str, **more: Any) -> Outputs:
    return Outputs("binary", (1,), names or None, **more)


def numbers(count: int) -> Outputs:
    return Outputs("classification", (count,))


ABC = classes("a", "b", "c")
INDICES = np.array([0, 1, 2, 2, 1, 0], np.int32)
BITS = np.array([0, 1, 1, 1, 0, 1], np.float32)[:, None]
PIXELS = np.array([[0, 1], [2, 255], [1, 1], [0, 0], [2, 2], [255, 1]], np.uint8)
LABELS = np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1, 2]]

#: (the earlier outputs, what EarlierState says further, the new ones, the new targets) -> outputs and targets
MATCHES: dict[str, tuple[Any, dict[str, Any], Any, Any, Any, Any]] = {
    "another order": (ABC, {}, classes("c", "a", "b"), INDICES, ABC, [2, 0, 1, 1, 0, 2]),
    "fewer classes": (ABC, {}, two("c", "a"), BITS, ABC, [2, 0, 0, 0, 2, 0]),
    "two of several": (two("n", "y"), {}, classes("y", "n", "z"), INDICES % 2, two("n", "y"), [1, 0, 1, 1, 0, 1]),
    "two turned": (two("n", "y"), {}, two("y", "n"), BITS, two("n", "y"), 1 - BITS),
    "numbers": (numbers(5), {}, numbers(3), INDICES, numbers(5), INDICES),
    "names of one": (ABC, {}, numbers(3), INDICES, ABC, INDICES),
    "counted": (
        ABC,
        {"unknown_class": -1},
        classes("z", "a", "b"),
        INDICES,
        classes("a", "b", "c", ignore=-1),
        [-1, 0, 1, 1, 0, -1],
    ),
    "counted of two": (two("n", "y"), {"unknown_class": -1}, two("z", "n"), BITS, two("n", "y", ignore=-1), -1 + BITS),
    "positions": (
        Outputs("classification", (2, 3), ("a", "b", "c"), ignore=255),
        {"unknown_class": -1},
        Outputs("classification", (2, 3), ("c", "b", "a"), ignore=255),
        PIXELS,
        Outputs("classification", (2, 3), ("a", "b", "c"), ignore=255),
        np.where(PIXELS == 255, 255, 2 - PIXELS.astype(int)),
    ),
    "labels": (
        Outputs("multi_label", (4,), ("a", "b", "c", "d")),
        {},
        Outputs("multi_label", (3,), ("d", "a", "b")),
        LABELS,
        Outputs("multi_label", (4,), ("a", "b", "c", "d")),
        np.stack([LABELS[:, 1], LABELS[:, 2], 0 * LABELS[:, 0], LABELS[:, 0]], axis=1),
    ),
    "extended": (
        two("n", "y"),
        {"extends": True},
        classes("z", "y", "n"),
        INDICES,
        classes("n", "y", "z"),
        [2, 1, 0, 0, 1, 2],
    ),
    "another task": (ABC, {"extends": True}, classes("r", "s", "t"), INDICES, classes("r", "s", "t"), INDICES),
    "old scale": (
        Outputs("regression", (1,), scaling=(3.0, 2.0)),
        {},
        Outputs("regression", (1,), scaling=(0.0, 1.0)),
        BITS,
        Outputs("regression", (1,), scaling=(3.0, 2.0)),
        BITS,
    ),
}

REFUSALS: dict[str, tuple[Any, Any, Any, str]] = {
    "unknown": (
        ABC,
        classes("vip", "a", "b"),
        INDICES,
        "targets of 'train' have vip (example 0, example 5), expected a class of the training split (a, b, c)",
    ),
    "kinds": (ABC, Outputs("regression", (1,)), BITS, "targets are regression of shape (1,), and those of the earlier"),
    "names of one": (ABC, numbers(4), INDICES, "have 4 classes, and the earlier run knows 3; they can be told apart"),
    "more numbers": (numbers(2), numbers(3), INDICES, "targets of 'train' have 2 (example 2, example 3), expected"),
    "labels": (
        Outputs("multi_label", (2,), ("a", "b")),
        Outputs("multi_label", (3,), ("a", "b", "z")),
        LABELS,
        "targets of 'train' have z (example 2, example 5), expected a class of the training split (a, b)",
    ),
}


def earlier_state(outputs: Any, **more: Any) -> EarlierState:
    return EarlierState(LearnedState(Inputs((2,)), outputs), **more)


def match_all() -> tuple[dict[str, Any], dict[str, Any]]:
    """What comes of each case, in memory and as a stream; and of each refusal."""
    from scaleflow.dataset import match_source
    from scaleflow.dataset.batches.records import decode_records

    found: dict[str, Any] = {}
    for name, (known, more, given, targets, *_) in MATCHES.items():
        sources = [match_source(Own(given, targets, is_stream), earlier_state(known, **more)) for is_stream in (0, 1)]
        stream = decode_records(sources[1].load("train"))
        found[name] = (
            sources[0].outputs,
            sources[0].load("train").targets,
            np.array([y for _, y in stream.as_numpy_iterator()]),
            getattr(sources[0], "notes", ()),
        )
    refused: dict[str, Any] = {}
    for name, (known, given, targets, _) in REFUSALS.items():
        for is_stream in (False, True):
            try:
                match_source(Own(given, targets, is_stream), earlier_state(known)).load("train")
            except ConfigError as error:
                refused.setdefault(name, []).append(str(error))
    return found, refused


def test_targets_are_matched_by_the_names_of_their_classes(isolated: Callable[..., Any]) -> None:
    found, refused = isolated(match_all)
    for name, (*_, outputs, targets) in MATCHES.items():
        described, in_memory, streamed, notes = found[name]
        assert described == outputs, name
        expected = np.reshape(targets, (6, *outputs.target_shape))
        np.testing.assert_array_equal(in_memory, expected, err_msg=name)
        np.testing.assert_array_equal(streamed, expected, err_msg=name)
        assert ["do not have c, which" in note for note in notes] == [True] * (name == "labels"), name
    for name, (*_, message) in REFUSALS.items():
        assert len(refused[name]) == 2, name
        assert all(message in each for each in refused[name]), refused[name]


def open_with(path: Path, make: str, earlier: EarlierState, **options: Any) -> Any:
    """What a source of scaleflow's says of its outputs and gives as targets, or the words of its refusal."""
    import importlib

    from scaleflow.dataset import match_source
    from tests.dataset.files import examples

    module, _, name = make.partition(":")
    source_class = getattr(importlib.import_module(f"scaleflow.dataset.{module}"), name)
    try:
        source = match_source(source_class(data_dir=str(path), **options, earlier=earlier), earlier)
        return source.outputs, np.concatenate([np.asarray(y).reshape(-1) for y in examples(source, "train")[1]])
    except ConfigError as error:
        return str(error)


def open_arrays_and_rows(folder: Path) -> list[Any]:
    import datasets

    def save(name: str, y: Any) -> Path:
        np.savez(folder / f"{name}.npz", x=X, y=np.asarray(y))
        return folder / f"{name}.npz"

    def save_rows(name: str, y: Any) -> Path:
        datasets.Dataset.from_dict({"x": [0.5] * len(y), "y": y}).save_to_disk(str(folder / name))
        return folder / name

    binary, several = earlier_state(two()), earlier_state(numbers(4))
    rows = {"input": "x", "target": "y", "test": 0.0}
    make = "npz:Npz", "huggingface:HuggingFace"
    return [
        open_with(save("floats", [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]), make[0], binary, test=0.0),
        open_with(save("few", [1, 0, 1, 1, 0, 1]), make[0], several, test=0.0),
        open_with(save("more", [1, 0, 2, 1, 0, 1]), make[0], binary, test=0.0),
        open_with(save("whole", [1, 0, 2, 1, 0, 1]), make[0], earlier_state(Outputs("regression", (1,))), test=0.0),
        open_with(save_rows("words", ["c", "a", "a"]), make[1], earlier_state(ABC), **rows),
        open_with(save_rows("one", ["b", "b"]), make[1], earlier_state(ABC), **rows),
        open_with(save_rows("quantities", [1.0, 0.0]), make[1], earlier_state(two("0", "1")), **rows),
        open_with(save_rows("vip", ["vip", "a"]), make[1], earlier_state(ABC), **rows),
    ]


@pytest.mark.skipif(find_spec("datasets") is None, reason="the extra datasets is not installed")
def test_kinds_and_classes_are_not_inferred_again(isolated: Callable[..., Any], tmp_path: Path) -> None:
    floats, few, more, whole, words, one, quantities, vip = isolated(open_arrays_and_rows, tmp_path)
    for (outputs, targets), described, expected in (
        (floats, two(), [1, 0, 1, 1, 0, 1]),
        (few, numbers(4), [1, 0, 1, 1, 0, 1]),
        (whole, Outputs("regression", (1,)), [1, 0, 2, 1, 0, 1]),
        (words, ABC, [2, 0, 0]),
        (one, ABC, [1, 1]),
        (quantities, two("0", "1"), [1, 0]),
    ):
        assert (outputs, targets.tolist()) == (described, expected)
    assert "targets of 'train' have 2 (example 2), expected a class of the training split (0, 1)" in more
    assert "row 0), expected a class of the training split (a, b, c)" in vip


def read_tables(folder: Path) -> list[Any]:
    """Tables with categories and classes that are written in another way than an earlier run knows them."""
    import pyarrow
    import pyarrow.parquet

    from scaleflow.dataset.table import Table
    from scaleflow.interfaces import LearnedPreprocessing
    from tests.dataset.files import examples

    (folder / "new.csv").write_text("extra,y,zone\n7,1.0,2.0\n7,0.0,x\n7,1.0,1\n")
    columns = {"zone": [2.0, None, 1.0], "y": [True, False, True]}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "new.parquet")
    learned = LearnedPreprocessing("scaleflow.dataset.tables.columns.Category", {}, ["", "1", "2"])
    found: list[Any] = []
    for name, classes_of in (("new.csv", ("0", "1")), ("new.parquet", ("False", "True"))):
        reading = {"columns": {"zone": "categories"}, "target": "y"}
        state = LearnedState(
            {"zone": Inputs((), "string")},
            two(*classes_of),
            {"zone": learned},
            "scaleflow.dataset.table.Table",
            reading,
        )
        source = Table(str(folder / name), "y", test=0.0, cache_dir=str(folder), earlier=EarlierState(state))
        inputs, targets = examples(source, "train")
        found.append((source.outputs.names, [each["zone"] for each in inputs], [float(y[0]) for y in targets]))
    return found


def test_a_table_takes_words_however_they_are_written(isolated: Callable[..., Any], tmp_path: Path) -> None:
    assert isolated(read_tables, tmp_path) == [
        (("0", "1"), [b"2", b"x", b"1"], [1, 0, 1]),
        (("False", "True"), [b"2", b"", b"1"], [1, 0, 1]),
    ]


def read_corpora(folder: Path) -> list[Any]:
    """The words and the token ids of new text: learned anew, known, extended."""
    from scaleflow.dataset.tokens import Tokens

    (folder / "old.txt").write_text("a a a b b c\n" * 9)
    (folder / "new.txt").write_text("d d d a\n" * 9)

    def make(name: str, earlier: EarlierState | None) -> Any:
        options = {"tokenizer": "words", "tokens": 3, "test": 0.0, "cache_dir": str(folder / "cache")}
        return Tokens(str(folder / name), earlier=earlier, **options)

    old = make("old.txt", None)
    state = LearnedState(old.inputs, old.outputs, source=name_class(old), reading=old.reading)
    sources = [
        old,
        make("new.txt", None),
        *(make("new.txt", EarlierState(state, extends)) for extends in (False, True)),
    ]
    return [(each.reading["learned"], each.outputs.shape, each.load("train").inputs[:2].tolist()) for each in sources]


def test_a_corpus_is_read_with_the_words_of_the_earlier_run(isolated: Callable[..., Any], tmp_path: Path) -> None:
    old, anew, known, extended = isolated(read_corpora, tmp_path)
    assert old[0] == known[0] == ["a", "b", "c"]
    assert (anew[0], extended[0]) == (["d", "a"], ["a", "b", "c", "d"])
    assert (old[1], known[1], extended[1]) == ((3, 5), (3, 5), (3, 6))
    assert known[2] == [[1, 1, 1], [2, 1, 1]]
    assert extended[2] == [[5, 5, 5], [2, 5, 5]]


def join_splits(weights: Any) -> list[Any]:
    """All examples of a source as one split, in memory and as a stream."""
    from scaleflow.dataset import WholeSource
    from tests.dataset.files import examples

    class Divided(Own):
        splits = ("train", "validation", "test")

        def load(self, split: str) -> Any:
            first = 2 * self.splits.index(split)
            arrays = Arrays(X[:2] + first, INDICES[first : first + 2], weights if split == "test" else None)
            if not self._is_stream:
                return arrays
            import tensorflow as tf

            from scaleflow.interfaces import Stream

            return Stream(tf.data.Dataset.from_tensor_slices(arrays.parts), 2)

    found = []
    for is_stream in (False, True):
        source = WholeSource(Divided(ABC, INDICES, is_stream))
        whole = source.load("train")
        if weights is None:
            found.append((tuple(source.splits), len(whole), [int(y) for y in examples(source, "train")[1]]))
        elif isinstance(whole, Arrays):
            found.append(whole.weights.tolist())
        else:
            found.append([float(w) for *_, w in whole.dataset.as_numpy_iterator()])
    return found


def join_both() -> list[Any]:
    return [join_splits(None), join_splits(np.array([2.0, 3.0], np.float32))]


def test_all_examples_of_all_splits_are_joined(isolated: Callable[..., Any]) -> None:
    plain, weighted = isolated(join_both)
    assert plain == 2 * [(("train",), 6, INDICES.tolist())]
    assert weighted == 2 * [[1, 1, 1, 1, 2, 3]]
