"""Sources of a user's own objects: each kind gives the same examples, and what is none is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Inputs, Outputs
from tests.dataset.files import examples, holds, prepared

COUNT = 30
CLASSES = Outputs("classification", (3,))


class Rows:
    """As torch's datasets are."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return np.full((2,), index, np.float64), index % 3


def rows() -> Iterator[Any]:
    return (Rows()[index] for index in range(COUNT))


def all_kinds() -> Any:
    import tensorflow as tf

    from scaleflow.dataset import make_source

    dataset = tf.data.Dataset.range(COUNT).map(lambda n: (tf.fill([2], tf.cast(n, tf.float64)), n % 3))
    kinds: dict[str, Any] = {
        "map": Rows(),
        "list": list(rows()),
        "function": rows,
        "dataset": dataset,
        "unknown length": dataset.filter(lambda *_: True),
    }
    sources = {name: make_source({"train": split, "test": split}, CLASSES) for name, split in kinds.items()}
    whole = {
        name: (source.inputs, tuple(source.splits), *examples(source, "train")) for name, source in sources.items()
    }
    return whole, {name: prepared(lambda source=source: source) for name, source in sources.items()}  # type: ignore[misc]


def test_each_kind_gives_the_same_examples(isolated: Callable[..., Any]) -> None:
    found, counts = isolated(all_kinds)
    assert len(found) == 5
    for name, (inputs, splits, values, targets) in found.items():
        assert (inputs.shape, inputs.dtype, splits) == ((2,), "float32", ("train", "test")), name
        assert [value.tolist() for value in values] == [[n, n] for n in range(COUNT)], name
        assert [(int(target), target.dtype) for target in targets] == [(n % 3, np.int32) for n in range(COUNT)], name
        assert counts[name] == ({"train": COUNT, "test": COUNT}, []), name


def structures() -> Any:
    from scaleflow.dataset import make_source

    example = {"name": "a b", "photo": np.zeros((2, 2, 3), np.uint8), "count": 3}
    targets = {"kind": np.int64(1), "price": 2.5}
    outputs = {"kind": CLASSES, "price": Outputs("regression", (1,))}
    found = []
    for split in ([(example, targets, 0.5)] * 4, lambda: iter([(example, targets, 0.5)] * 4)):
        source: Any = make_source({"train": split}, outputs)
        stream = source.load("train")
        from scaleflow.dataset.batches.records import decode_records

        found.append((source.inputs, len(stream), next(decode_records(stream).as_numpy_iterator())))
    return found


def test_examples_may_be_dicts_with_weights(isolated: Callable[..., Any]) -> None:
    for inputs, length, (values, targets, weight) in isolated(structures):
        assert {name: (each.shape, each.dtype, each.scale) for name, each in inputs.items()} == {
            "name": ((), "string", None),
            "photo": ((2, 2, 3), "uint8", 1 / 255),
            "count": ((), "int32", None),
        }
        assert length == 4
        assert (values["name"], values["count"], weight) == (b"a b", 3, 0.5)
        assert (targets["kind"], targets["price"].tolist()) == (1, [2.5])


def words() -> tuple[list[list[int]], Any]:
    """The numbers of the words of two texts, and what the model is built for."""
    from scaleflow.dataset import Text, make_source, prepare_splits
    from tests.dataset.files import options

    texts = [("up up down", 0), ("up left", 1)]
    source = make_source({"train": texts}, CLASSES, preprocessing=Text(vocabulary=10, tokens=4))
    splits = prepare_splits(source, options(cache="memory"), 0)
    return np.asarray(splits.train.inputs).tolist(), splits.inputs


def test_texts_become_numbers_in_a_line(isolated: Callable[..., Any]) -> None:
    numbers, inputs = isolated(words)
    (up, again, down, nothing), (_, left, *_) = numbers
    assert (up, again, nothing) == (2, 2, 0)  # the most frequent word is the first after padding and unknown words
    assert {down, left} == {3, 4}
    assert (inputs.shape, inputs.vocabulary) == ((4,), 5)


def endless() -> Iterator[Any]:
    while True:
        yield from rows()


def batches() -> Iterator[Any]:
    return ((np.zeros((5, 2)), np.arange(5) % 3) for _ in range(4))


def texts() -> list[Any]:
    return [(x, "abc"[target]) for x, target in rows()]


def refusals() -> list[str]:
    import keras
    import tensorflow as tf

    from scaleflow.dataset import make_source, own

    class Sequence(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return np.zeros((1, 2)), np.zeros(1)

    own.MAX_COUNTED = 2 * COUNT
    signature = tf.TensorSpec((2,), tf.float64), tf.TensorSpec((), tf.int32)
    pairs = tf.data.Dataset.from_tensor_slices((np.zeros((4, 2), np.float32), [0, 1, 2, 0]))
    cases: list[Any] = [
        [],
        rows(),
        3,
        Rows,
        [1, 2],
        lambda: iter(()),
        pairs.repeat(),
        pairs.batch(2),
        pairs.map(lambda x, _: x),
        endless,
        pairs.repeat().filter(lambda *_: True),
        tf.data.Dataset.from_generator(endless, output_signature=signature),
        Sequence(),
        list(batches()),
        batches,
        pairs.batch(2, drop_remainder=True),
        texts(),
        lambda: iter(texts()),
        tf.data.Dataset.from_tensor_slices((np.zeros((4, 2)), list("abca"))),
    ]
    found = []
    for split in cases:
        with pytest.raises(ConfigError) as refused:
            make_source({"train": split}, CLASSES)
        found.append(str(refused.value))
    return found


def test_unknown_split_is_refused(isolated: Callable[..., Any]) -> None:
    wanted = [
        "'train' is empty",
        "can be read only once",
        "is of type int, expected an object with __len__",
        "is of type type, expected",
        "is of type int, expected (input, target)",
        "'train' is empty",
        "never ends",
        "yield single examples of one shape",
        "expected (input, target)",
        *["'train' has no length, and no end within 60 examples; set make_source(..., lengths={'train'"] * 3,
        "gives batches, expected single examples; unbatch it",
        *["gives batches of 5, expected single examples"] * 2,
        "gives batches of 2, expected single examples",
        *["the targets of 'train' are texts, expected numbers; give the numbers of the classes"] * 3,
    ]
    for message, words in zip(isolated(refusals), wanted, strict=True):
        assert words in message


def shapes() -> tuple[list[str], int]:
    """What is said of an example of another length, of a one-hot target, and of a stream of several lengths; and how
    many examples an iterator without an end has, if it is told.
    """
    import tensorflow as tf

    from scaleflow.dataset import make_source, own
    from scaleflow.dataset.batches.rows import to_rows
    from scaleflow.interfaces import Stream

    lengths = tf.data.Dataset.from_tensor_slices([3, 4]).map(lambda n: (tf.zeros([n, 2]), n))
    cases: list[Callable[[], Any]] = [
        lambda: own.convert_array(np.zeros((4, 2)), tf.TensorSpec((3, 2), tf.float32, "its input")),
        lambda: own.convert_array(np.eye(3)[1], tf.TensorSpec((), tf.int32, "its target")),
        lambda: to_rows(Stream(lengths, 2)).read_first(2),
    ]
    found = []
    for case in cases:
        with pytest.raises(ConfigError) as refused:
            case()
        found.append(str(refused.value))
    own.MAX_COUNTED = COUNT
    return found, len(make_source({"train": endless}, CLASSES, lengths={"train": 40}).load("train"))


def test_examples_of_several_shapes_are_refused(isolated: Callable[..., Any]) -> None:
    (other, one_hot, stream), counted = isolated(shapes)
    assert other.startswith("its input has the shape (4, 2), expected (3, 2), which all examples must have; pad those")
    assert one_hot == "its target has the shape (3,), expected ()"
    assert "inputs of 'train' have the shapes (3, 2) and (4, 2), expected one shape; pad" in stream
    assert counted == 40


def misfits() -> Any:
    import tensorflow as tf

    from scaleflow.dataset import make_source

    def make(kind: str, numbers: list[Any], targets: list[Any]) -> Any:
        pairs = [({"n": n}, target) for n, target in zip(numbers, targets, strict=True)]
        tensors = tf.data.Dataset.from_tensor_slices(({"n": np.array(numbers)}, np.array(targets)))
        return {"map": pairs, "generator": lambda: iter(pairs), "dataset": tensors}[kind]

    big = [2] * 5 + [3_000_000_000]
    cases = {"input": (big, [1] * 6), "target": ([2] * 6, [1] * 5 + [2**32 + 1]), "part": ([2] * 6, [1.0] * 5 + [1.5])}
    found: dict[Any, Any] = {}
    for kind in ("map", "generator", "dataset"):
        for what, (numbers, targets) in cases.items():
            split = make(kind, numbers, targets)
            found[kind, what] = prepared(lambda split=split: make_source({"train": split}, CLASSES))  # type: ignore[misc]
        source: Any = make_source({"train": make(kind, *cases["input"])}, CLASSES, inputs={"n": Inputs((), "int64")})
        found[kind, "int64"] = [int(x["n"]) for x in examples(source, "train")[0]]
    return found


@pytest.mark.slow
def test_a_value_that_the_dtype_does_not_have_never_wraps(isolated: Callable[..., Any]) -> None:
    words = {
        "input": "its input['n'] has a value that int32 does not have: 3000000000",
        "target": "its target has a value that int32 does not have: 4294967297",
        "part": "its target has a value that int32 does not have: 1.5",
    }
    for (_, what), outcome in isolated(misfits).items():
        if what == "int64":
            assert outcome == [2] * 5 + [3_000_000_000]
        else:
            holds([outcome], [["'train'", "cannot be read", "example 5", words[what]]])


def refuse_tuples() -> dict[str, str]:
    import tensorflow as tf

    from scaleflow.dataset import make_source

    a, b = np.ones(2), np.ones(3)
    dataset = tf.data.Dataset.from_tensors(((a, b), 1))
    splits: dict[str, Any] = {
        "arrays": [((a, b), 1)],
        "equal shapes": [((a, a), 1)],
        "list": [([a, b], 1)],
        "target": [(a, (b, b))],
        "function": lambda: iter([((a, b), 1)]),
        "dataset": dataset,
        "numbers": [((1.0, 2.0), 1), ([1.0, 2.0], 1)],
        "rows": [([[1.0, 2.0], [1.0, 2.0]], 1)],
    }
    found = {}
    for name, split in splits.items():
        try:
            make_source({"train": split}, CLASSES)
            found[name] = ""
        except ConfigError as error:
            found[name] = str(error)
    return found


def test_several_arrays_without_names_are_refused(isolated: Callable[..., Any]) -> None:
    found = isolated(refuse_tuples)
    assert found.pop("numbers") == found.pop("rows") == ""
    for name, text in found.items():
        what, kind = "target" if name == "target" else "input", "list" if name == "list" else "tuple"
        assert text == (
            f"dataset: the {what} of an example of 'train' is a {kind} of 2 arrays; give a dict with a name for each "
            "array, such as {'a': ..., 'b': ...}, or one array"
        )
