from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Batching, Dataset, Inputs, Outputs, Stream, Target
from tests.dataset.reading import as_stream, numbered

NOWHERE = Target("dataset", "nowhere")


class Numbered:
    """Ten examples to train on, four to test on, three more in a split of another name."""

    def __init__(self, **changes: Any) -> None:
        self.inputs: Any = Inputs((2,))
        self.outputs: Any = Outputs("classification", (17,))
        self.splits: Any = ("train", "test", "held")
        self.counts = {"train": 10, "test": 4, "held": 3}
        self.given: Any = None
        vars(self).update(changes)

    def load(self, split: str) -> Any:
        return numbered(self.counts[split]) if self.given is None else self.given


def options(**changes: Any) -> Dataset:
    return Dataset(NOWHERE, **changes)


def numbers(examples: Any) -> list[int] | None:
    if examples is None:
        return None
    if isinstance(examples, Stream):
        found = [int(y) for _, y in examples.dataset.as_numpy_iterator()]
        assert len(found) == len(examples)
        return found
    assert examples.inputs[:, 0].tolist() == examples.targets.tolist()
    return [int(y) for y in examples.targets]


def prepared(source: Any, changes: dict[str, Any], seed: int = 0) -> tuple[Any, ...]:
    from scaleflow.dataset import prepare_splits

    splits = prepare_splits(source, options(**changes), seed)
    named = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    assert splits.counts() == {name: len(examples) for name, examples in named.items() if examples is not None}
    return tuple(numbers(examples) for examples in named.values())


def many_prepared(cases: list[tuple[dict[str, Any], dict[str, Any], int]]) -> list[tuple[Any, ...]]:
    return [prepared(Numbered(**source), changes, seed) for source, changes, seed in cases]


def test_validation_is_a_fraction_a_split_or_nothing(isolated: Callable[..., Any]) -> None:
    none, zero, fraction, again, other, named, limited, both, untested = isolated(
        many_prepared,
        [
            ({}, {"validation": None}, 0),
            ({}, {"validation": 0.0}, 0),
            ({}, {"validation": 0.3}, 0),
            ({}, {"validation": 0.3}, 0),
            ({}, {"validation": 0.3}, 1),
            ({}, {"validation": "held"}, 0),
            ({}, {"validation": "held", "limit": 2}, 0),
            ({}, {"validation": 0.5, "limit": 6}, 0),
            ({"splits": ["train"]}, {"validation": None}, 0),
        ],
    )
    assert none == zero == (list(range(10)), None, list(range(4)))
    train, validation, _ = fraction
    assert (len(train), len(validation)) == (7, 3)
    assert sorted(train + validation) == list(range(10))
    assert again == fraction != other
    assert named == (list(range(10)), list(range(3)), list(range(4)))
    assert limited == ([0, 1], [0, 1], [0, 1])
    train, validation, test = both
    assert (sorted(train + validation), len(validation), test) == (list(range(6)), 3, list(range(4)))
    assert untested[2] is None


def refuse_ids() -> list[str]:
    from scaleflow.dataset import prepare_splits

    ids = np.array([[0, 1], [2, 3], [3, 9]] * 5, np.int32)
    targets = np.zeros(15, np.int32)
    kinds: dict[str, Any] = {
        "arrays": Arrays({"ids": ids}, targets),
        "negative": Arrays({"ids": ids - 7}, targets),
        "cached stream": Stream(as_stream(Arrays({"ids": ids}, targets)), 15),
        "stream": Stream(as_stream(Arrays({"ids": ids}, targets)), 15),
    }
    found = []
    for kind, given in kinds.items():
        source = Numbered(given=given, splits=["train"], inputs={"ids": Inputs((2,), "int32", vocabulary=9)})
        with pytest.raises(ConfigError) as refusal:
            prepare_splits(source, options(validation=None, cache="none" if kind == "stream" else "auto"), 0)
        found.append(str(refusal.value))
    return found


def test_numbers_beyond_the_vocabulary_are_refused(isolated: Callable[..., Any]) -> None:
    high, low, cached, stream = isolated(refuse_ids)
    assert high == (
        "dataset: inputs['ids'] of 'train' range from 0 to 9, expected 0 to 8, because their vocabulary is 9"
    )
    assert "range from -7 to 2, expected 0 to 8" in low
    assert cached == stream == high


def refuse_infinite_targets() -> tuple[str, str]:
    """The refusals of a stream with a NaN, and of a generator that fails, of which the validation split is drawn."""
    from scaleflow.dataset import make_source, prepare_splits

    examples = [(np.zeros(2), 2**33 * (n == 9)) for n in range(10)]
    failing = make_source({"train": lambda: iter(examples)}, Outputs("classification", (2,)))
    with pytest.raises(ConfigError) as wrapped:
        prepare_splits(failing, options(validation=0.2), 0)
    stream = Stream(as_stream(Arrays(np.zeros((3, 2), np.float32), np.array([[1.0], [np.nan], [2.0]], np.float32))), 3)
    source = Numbered(given=stream, splits=["train"], outputs=Outputs("regression", (1,)))
    with pytest.raises(ConfigError) as refusal:
        prepare_splits(source, options(validation=None), 0)
    return str(refusal.value), str(wrapped.value)


def test_targets_of_a_stream_that_cannot_be_trained_on_are_refused(isolated: Callable[..., Any]) -> None:
    infinite, wrapped = isolated(refuse_infinite_targets)
    assert "targets of 'train' are NaN or infinite in 1 of 3 rows" in infinite
    assert "example 9: its target has a value that int32 does not have: 8589934592" in wrapped


def of_stream(width: int) -> list[Any]:
    """A stream's splits with each of two seeds, the first one twice, and whether there is a note on them."""
    from scaleflow.dataset import prepare_splits

    arrays = numbered(50)
    inputs = np.repeat(arrays.inputs[:, :1], width, axis=1)
    stream = Stream(as_stream(Arrays(inputs, arrays.targets)), 50)
    source = Numbered(given=stream, inputs=Inputs((width,)), outputs=Outputs("classification", (50,)))
    found: list[Any] = []
    for seed in (0, 0, 1):
        notes: list[str] = []
        wanted = options(validation=0.3, limit=40, cache="none")
        splits = prepare_splits(source, wanted, seed, emit=lambda event, notes=notes: notes.append(event.text))
        found.append((numbers(splits.train), numbers(splits.validation), notes))
    return found


@pytest.mark.parametrize("width", [2, 5000])
def test_of_a_stream_the_validation_split_is_drawn(isolated: Callable[..., Any], width: int) -> None:
    first, again, other = isolated(of_stream, width)
    train, validation, notes = first
    assert len(validation) == 12
    assert sorted(train + validation) == list(range(40))
    assert (train, validation) == (sorted(train), sorted(validation))
    assert min(validation) < 13 < 27 < max(validation)
    assert again == first != other
    if width == 2:
        assert not notes
    else:
        (note,) = notes
        assert note.startswith("dataset.validation=0.3: each validation reads all 40 records of the stream")


def refusals() -> list[str | None]:
    import tensorflow as tf

    good = numbered(10)
    cases: list[tuple[Any, dict[str, Any]]] = [
        (object(), {}),
        (Numbered(outputs=(10,)), {}),
        (Numbered(splits=("test",)), {}),
        (Numbered(load=None), {}),
        (Numbered(outputs=Outputs("ranking", (17,))), {}),  # type: ignore[arg-type]
        (Numbered(inputs=Inputs((2,), kind="dates")), {}),
        (Numbered(), {"validation": "dev"}),
        (Numbered(given=(good.inputs, good.targets)), {}),
        (Numbered(given=numbered(0)), {}),
        (Numbered(inputs=Inputs((3,))), {}),
        (Numbered(outputs=Outputs("regression", (1,))), {}),
        (Numbered(inputs=Inputs((2,), "uint8")), {}),
        (Numbered(given=Arrays(good.inputs, good.targets[:9])), {}),
        (Numbered(), {"validation": 0.96}),
        (Numbered(given=Stream(tf.data.Dataset.range(10), 10)), {}),
        (Numbered(given=Stream(as_stream(good).batch(2), 5)), {}),
        (Numbered(given=Stream(as_stream(good), 9)), {}),
        (Numbered(outputs=Outputs("classification", (9,))), {}),
        (Numbered(given=Arrays(good.inputs, good.targets / 2)), {}),
        (Numbered(given=Arrays(good.inputs.tolist(), good.targets)), {}),  # type: ignore[arg-type]
        (Numbered(outputs=Outputs("binary", (1,)), given=Arrays(good.inputs, good.targets[:, None])), {}),
        (Numbered(outputs=Outputs("binary", (1,)), given=Arrays(good.inputs, with_bad(good.targets))), {}),
        (
            Numbered(
                outputs={"age": Outputs("regression", (1,), ignore=-1)},
                given=Arrays(good.inputs, {"age": with_bad(good.targets)}),
            ),
            {},
        ),
        (Numbered(given=Arrays(good.inputs, np.array(list("abcdefghij")))), {}),
        (Numbered(given=Arrays(np.array([np.zeros(2 + n % 2) for n in range(10)], object), good.targets)), {}),
    ]
    return [refused(source, changes) for source, changes in cases]


def with_bad(targets: Any) -> Any:
    """Three targets that are not finite in float32."""
    values = targets[:, None].astype(np.float64)
    values[[3, 5, 8]] = [[np.nan], [-np.inf], [1e39]]
    return values


def refused(source: Any, changes: dict[str, Any]) -> str | None:
    from scaleflow.dataset import prepare_splits

    try:
        prepare_splits(source, options(**changes), 0)
    except ConfigError as refusal:
        return str(refusal)
    return None


def test_a_source_that_breaks_its_contract_is_refused_in_words(isolated: Callable[..., Any]) -> None:
    wanted = [
        "dataset: object.inputs must be a scaleflow.interfaces.Inputs",
        "dataset: Numbered.outputs must be a scaleflow.interfaces.Outputs",
        "dataset: Numbered.splits must name the splits, 'train' among them",
        "dataset: Numbered needs a method load(split)",
        "dataset: Numbered.outputs.kind=ranking: expected one of classification, binary, multi_label, regression",
        "dataset: Numbered.inputs.kind=dates: expected one of picture, array, number, category, date, text",
        "dataset.validation=dev: there is no such split; the splits are train, test, held",
        "dataset: load('train') returned a tuple, expected Arrays or a Stream",
        "dataset: the split 'train' is empty",
        "dataset: inputs of 'train' have shape (2,), but the source says (3,)",
        "dataset: targets of 'train' have shape (), but the source says (1,)",
        "dataset: inputs of 'train' are float32, but the source says uint8",
        "dataset: load('train') returned 10 inputs and 9 targets",
        "dataset.validation=0.96: leaves none of the 10 examples to train on",
        "dataset: the stream of 'train' must yield (input, target), or (input, target, weight), but yields",
        "dataset: inputs of 'train' have shape (None, 2), but the source says (2,); it gives batches: unbatch it",
        "dataset: the stream of 'train' holds 10 examples, but the source says 9",
        "dataset: classification targets of 'train' range from 0 to 9, expected 0 to 8",
        "dataset: classification targets of 'train' are float64, expected integers",
        "dataset: inputs of 'train' are a list, expected a numpy array",
        "dataset: binary targets of 'train' range from 0 to 9, expected 0 to 1",
        "dataset: binary targets of 'train' are NaN or infinite in 3 of 10 rows, the first of which is row 3 (from 0)",
        "dataset: regression targets['age'] of 'train' are NaN or infinite in 3 of 10 rows, the first of which is row",
        "dataset: targets of 'train' are texts, expected numbers; give the numbers of the classes",
        "dataset: inputs of 'train' are arrays of several lengths; pad them, as",
    ]
    found = isolated(refusals)
    for words, message in zip(wanted, found, strict=True):
        assert message is not None, words
        assert message.startswith(words), message


@pytest.mark.parametrize(("examples", "steps"), [(96, 2), (97, 3), (1, 1), (48, 1)])
def test_a_partial_batch_is_a_step(examples: int, steps: int) -> None:
    portions = Batching(batch_size=8, accumulate=2, replicas=3)
    assert (portions.share, portions.global_size) == (16, 48)
    assert portions.steps(examples) == steps
