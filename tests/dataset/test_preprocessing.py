"""Preprocessing: learned from what is trained on, done to every split, and told to the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Batching, Dataset, Inputs, Outputs, Stream, Target
from tests.dataset.reading import as_stream, spread_over

TEXTS = np.array(["The cat, the dog!", "cat", "a cat sat there and then", "<new> words"] * 4, object)


class Given:
    """A source of what a test gives it: the splits by name."""

    def __init__(self, inputs: Inputs, preprocessing: Any = None, **splits: Any) -> None:
        self.inputs, self.outputs = inputs, Outputs("classification", (100,))
        self.splits = tuple(splits)
        self.given = splits
        self.preprocessing = preprocessing

    def load(self, split: str) -> Any:
        return self.given[split]


def labelled(inputs: np.ndarray[Any, Any]) -> Arrays:
    return Arrays(inputs, np.arange(len(inputs), dtype=np.int32) % 100)


def options(**changes: Any) -> Dataset:
    return Dataset(Target("dataset", "nowhere"), **{"validation": None, **changes})


def texts_in_every_form() -> dict[str, Any]:
    """The features of each split's examples: from arrays, from a stream that is kept, and from one that is not."""
    from scaleflow import dataset
    from scaleflow.dataset.reading.text import Text

    strategy = spread_over(1)
    train, test = labelled(TEXTS), labelled(np.array(["the cow sat", ""], object))
    found: dict[str, Any] = {}
    forms = {"arrays": (train, test), "stream": tuple(Stream(as_stream(each), len(each)) for each in (train, test))}
    for form, cache in (("arrays", "auto"), ("stream", "memory"), ("stream", "none")):
        both = forms[form]
        source = Given(Inputs((), "string"), Text(vocabulary=6, tokens=4), train=both[0], test=both[1])
        splits = dataset.prepare_splits(source, options(cache=cache), 0)  # type: ignore[arg-type]
        rows = []
        for examples in (splits.train, splits.test):
            feed = dataset.make_feed(examples, Batching(3, 1, 1), strategy, transforms=splits.transforms)
            batches = [(x.numpy(), mask.numpy()) for x, _, mask in feed.batches(1, feed.batching.steps(feed.examples))]
            rows.append(np.concatenate([x[mask == 1] for x, mask in batches]))
        front = splits.preprocessing_layers[("",)]()(np.asarray(splits.sample, object)).numpy()
        found[f"{form}, {cache}"] = (splits.inputs, rows, front)
    return found


def test_text_becomes_the_numbers_of_its_words(isolated: Callable[..., Any]) -> None:
    for form, (inputs, (train, test), front) in isolated(texts_in_every_form).items():
        assert inputs == Inputs((4,), "int32", vocabulary=6), form
        assert train.dtype == np.int32
        cat, the = train[1][0], train[0][0]
        assert train[1].tolist() == [cat, 0, 0, 0]
        assert train[0].tolist()[:3] == [the, cat, the]
        assert {cat, the} == {2, 3}  # the most frequent ones, as often each
        assert train[3].tolist() == train[3 + 4].tolist()
        assert (len(train), train.max()) == (16, 5)
        assert test.tolist()[0][0] == the
        assert test.tolist()[0][1] == 1  # no training example has a cow
        assert test.tolist()[1] == [0, 0, 0, 0]
        np.testing.assert_array_equal(front, train[: len(front)])


def normalised() -> Any:
    import keras

    from scaleflow import dataset

    keras.config.set_dtype_policy("mixed_bfloat16")
    images = np.random.default_rng(0).integers(0, 200, (500, 4, 3, 2)).astype(np.uint8)
    images[..., 1] = images[..., 1] // 10 + 100
    given = Given(Inputs((4, 3, 2), "uint8", scale=1 / 255), train=labelled(images), test=labelled(images[:7]))
    splits = dataset.prepare_splits(given, options(normalise=True, validation=0.2, limit=300), 0)  # type: ignore[arg-type]
    return splits.inputs, *(examples.inputs for examples in splits.by_name().values()), images  # type: ignore[union-attr]


def test_each_channel_is_normalised_as_the_training_examples_are(isolated: Callable[..., Any]) -> None:
    inputs, train, validation, test, images = isolated(normalised)
    assert inputs == Inputs((4, 3, 2), "float32")
    assert (len(train), len(validation), len(test)) == (240, 60, 7)
    np.testing.assert_allclose(train.mean(axis=(0, 1, 2)), [0, 0], atol=1e-4)
    np.testing.assert_allclose(train.std(axis=(0, 1, 2)), [1, 1], atol=1e-4)
    assert abs(float(validation.mean())) > 1e-4  # by the training examples' mean, not by its own
    slope, offset = np.polyfit(images[:7, ..., 0].ravel(), test[..., 0].ravel(), 1)
    np.testing.assert_allclose(test[..., 0], images[:7, ..., 0] * slope + offset, atol=1e-4)


@dataclasses.dataclass
class Wrong:
    """Preprocessing that says something else than it does."""

    dtype: str = "float32"

    def learn(self, batches: Any) -> Any:
        return sum(len(batch) for batch in batches)

    def features(self, learned: Any) -> Inputs:
        return Inputs((learned,), self.dtype)

    def layer(self, learned: Any) -> Any:
        import keras

        return keras.layers.Rescaling(2.0)


def refusals() -> list[str]:
    from scaleflow.dataset.reading.text import Text

    numbers, words = labelled(np.zeros((16, 3), np.float32)), labelled(TEXTS)
    cases: list[tuple[Callable[[], Any], dict[str, Any]]] = [
        (lambda: Given(Inputs((), "string"), train=words), {"normalise": True}),
        (lambda: Given(Inputs((), "string"), Text(), train=words), {"normalise": True}),
        (lambda: Given(Inputs((3,)), Wrong(), train=numbers), {}),
        (lambda: Text(vocabulary=2), {}),
        (lambda: Text(tokens=0), {}),
        (lambda: Text(standardize="upper"), {}),  # type: ignore[arg-type]
    ]
    return [refused(make, changes) for make, changes in cases]


def refused(make: Callable[[], Any], changes: dict[str, Any]) -> str:
    from scaleflow import dataset

    try:
        dataset.prepare_splits(make(), options(**changes), 0)
    except ConfigError as refusal:
        return str(refusal)
    return ""


def test_preprocessing_that_cannot_be_is_refused(isolated: Callable[..., Any]) -> None:
    assert isolated(refusals) == [
        "dataset.normalise=true: the dataset's inputs are text, which has no mean; remove dataset.normalise",
        "dataset.normalise=true: Given preprocesses its inputs itself, with Text; remove dataset.normalise",
        "dataset: Wrong.layer returns float32 of shape (3,), but its features say float32 of shape (16,)",
        "dataset.vocabulary=2: expected an integer, at least 3",
        "dataset.tokens=0: expected an integer, at least 1",
        "dataset.standardize=upper: expected one of unicode, lower_and_strip_punctuation, lower, strip_punctuation, "
        "none",
    ]


def unicode_words(folder: Path) -> None:
    """Words in capitals, with a capital and with accents apart are those that were learned, in a Keras file, too."""
    import unicodedata

    import keras

    from scaleflow.dataset.reading.text import Text
    from scaleflow.dataset.tables.columns import WordBag

    words = ["хорошо", "«плохо»", "café", "naïve", "plain"]
    texts = np.array([f"{words[n % 5]} {words[n % 3]}".encode() for n in range(60)], object)
    written = [*words, *(w.title() for w in words), *(w.upper() for w in words)]
    written += [unicodedata.normalize("NFD", each) for each in written]
    for made, size in ((Text(50, 3, "unicode"), None), (WordBag("x", 50, "unicode"), 6)):
        learned = made.learn([texts])
        assert set(learned) == set(words)
        made.layer(learned).save(folder / "a.keras")
        for layer in (made.layer(learned), keras.saving.load_model(folder / "a.keras")):
            found = np.asarray(layer(np.array([*written, "другое"], object)))
            for n, row in enumerate(found):
                place = learned.index(words[n % 5]) if n < len(written) else -1
                expected = [place + 2, 0, 0] if size is None else np.eye(size)[place + 1].tolist()
                assert row.tolist() == expected, (n, row)
    chinese = np.array(["今天天气好。", "天气不好", "ok 好"], object)
    for made in (Text(50, 6, "unicode"), WordBag("x", 50, "unicode")):
        learned = made.learn([chinese])
        assert {"天", "气", "好"} < set(learned)
        assert all(len(word) == 1 for word in learned)
        found = np.asarray(made.layer(learned)(np.array(["好天"], object)))[0]
        places = [learned.index("好"), learned.index("天")]
        assert (
            found[:2].tolist() == [p + 2 for p in places]
            if found.dtype == np.int32
            else found[[p + 1 for p in places]].all()
        )
    old = Text(50, 3)
    assert np.asarray(old.layer(["хорошо"])(np.array(["ХОРОШО", "хорошо"], object)))[:, 0].tolist() == [1, 2]


def test_words_of_all_scripts_are_lowered(isolated: Callable[..., Any], tmp_path: Path) -> None:
    isolated(unicode_words, tmp_path)
