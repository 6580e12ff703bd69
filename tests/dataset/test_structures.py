"""Dicts of inputs and targets, and weights, go through the input pipeline as single tensors do."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Batching, Dataset, Inputs, Outputs, Stream, Target
from tests.dataset.reading import spread_over

EXAMPLES, GLOBAL = 29, 12

INPUTS = {"pair": Inputs((2,)), "deep": {"number": Inputs((), "int32"), "text": Inputs((), "string")}}
OUTPUTS = {"number": Outputs("classification", (EXAMPLES,)), "row": Outputs("regression", (3,))}

FORMS = {
    "arrays": {},
    "host": {},
    "mapped": {},
    "stream": {"cache": "none"},
    "records": {"cache": "none"},
    "records, several at once": {"cache": "none"},
    "records in memory": {"cache": "memory"},
    "records in a file": {"cache": "file"},
}


def options(**changes: Any) -> Dataset:
    return Dataset(Target("dataset", "nowhere"), **{"validation": None, **changes})


def numbered(count: int, text: bool = True, weighted: bool = True) -> Arrays:
    """Number i has the inputs [i, -i], i and "i", the targets i and [i, i, i], and the weight i / 4."""
    numbers = np.arange(count, dtype=np.int32)
    floats = numbers.astype(np.float32)
    deep = {"number": numbers, **({"text": numbers.astype(str)} if text else {})}
    inputs = {"pair": np.stack([floats, -floats], axis=1), "deep": deep}
    targets = {"number": numbers, "row": np.repeat(floats[:, None], 3, axis=1)}
    return Arrays(inputs, targets, floats.astype(np.float64) / 4 if weighted else None)


class Numbered:
    outputs: Any = OUTPUTS
    splits = ("train",)

    def __init__(self, form: str, text: bool) -> None:
        self.inputs: Any = INPUTS if text else {**INPUTS, "deep": {"number": Inputs((), "int32")}}
        self._form = form
        self._text = text

    def load(self, split: str) -> Any:
        import tensorflow as tf

        arrays = numbered(EXAMPLES, self._text)
        if self._form in ("arrays", "host"):
            return arrays
        if self._form == "mapped":
            with tempfile.TemporaryFile() as file:  # it stays mapped
                mapped = np.memmap(file, np.float32, "w+", shape=arrays.inputs["pair"].shape)
            mapped[:] = arrays.inputs["pair"]
            return Arrays({**arrays.inputs, "pair": mapped}, *arrays.parts[1:])
        if self._form == "stream":
            return Stream(tf.data.Dataset.from_tensor_slices(arrays.parts), EXAMPLES)
        parts = tf.nest.map_structure(tf.constant, arrays.parts)
        decode = lambda number: tf.nest.map_structure(lambda part: tf.gather(part, number), parts)  # noqa: E731
        at_once = 4 if "at once" in self._form else None
        return Stream(tf.data.Dataset.range(EXAMPLES), EXAMPLES, decode, at_once=at_once)


def read_epochs(replicas: int, accumulate: int) -> dict[str, list[tuple[list[int], list[float]]]]:
    """Of each form the numbers of two epochs' batches, with their weights, after a check of all other parts."""
    import tensorflow as tf

    from scaleflow import dataset

    strategy = spread_over(replicas)
    batching = Batching(GLOBAL // replicas // accumulate, accumulate, replicas)
    found: dict[str, list[tuple[list[int], list[float]]]] = {}
    for form, changes in FORMS.items():
        splits = dataset.prepare_splits(
            Numbered(form, text="cache" not in changes), options(**{"cache": "none", **changes}), 0
        )
        assert splits.is_weighted
        feed = dataset.make_feed(splits.train, batching, strategy, 3, device_bytes=1.0 if form == "host" else None)

        def in_replica(fetched: Any, epoch: Any, step: Any, feed: Any = feed) -> Any:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            indices = [tf.constant(index, tf.int64) for index in range(accumulate)]
            micro = [feed.micro_batch(fetched, epoch, step, replica, index) for index in indices]
            return tf.nest.map_structure(lambda *tensors: tf.concat(tensors, axis=0), *micro)

        @tf.function
        def batch(opened: Any, epoch: Any, step: Any, feed: Any = feed, in_replica: Any = in_replica) -> Any:
            return strategy.run(in_replica, args=(feed.fetch(opened), epoch, step))

        found[form] = []
        for epoch in range(2):
            opened = feed.open(epoch, 0)
            for step in range(feed.batching.steps(feed.examples)):
                parts = batch(opened, *tf.constant([epoch, step], tf.int64))
                found[form].append(check_parts(tf.nest.map_structure(lambda part: gather(strategy, part), parts)))
        whole = [check_parts(each) for each in feed.batches(2, 3).as_numpy_iterator()]
        assert whole == found[form], form
    return found


def gather(strategy: Any, part: Any) -> Any:
    return np.concatenate([np.asarray(value) for value in strategy.experimental_local_results(part)])


def check_parts(parts: Any) -> tuple[list[int], list[float]]:
    inputs, targets, mask, weights = parts
    numbers = targets["number"]
    np.testing.assert_array_equal(inputs["pair"], np.stack([numbers, -numbers], axis=1))
    np.testing.assert_array_equal(inputs["deep"]["number"], numbers)
    np.testing.assert_array_equal(targets["row"], np.repeat(numbers[:, None], 3, axis=1))
    np.testing.assert_array_equal(weights, np.where(mask == 1, numbers / 4, 0).astype(np.float32))
    if "text" in inputs["deep"]:
        assert [int(text) for text in inputs["deep"]["text"]] == numbers.tolist()
    return numbers[mask == 1].tolist(), weights[mask == 1].tolist()


@pytest.mark.slow
def test_every_form_gives_the_same_batches_however_they_are_divided(isolated: Callable[..., Any]) -> None:
    one = isolated(read_epochs, 1, 1)
    for form, batches in one.items():
        for epoch in (batches[:3], batches[3:]):
            assert sorted(number for numbers, _ in epoch for number in numbers) == list(range(EXAMPLES)), form
        assert (batches == one["arrays"]) == (form != "stream"), form
    assert isolated(read_epochs, 2, 2) == one


# ---------------------------------------------------------------------------------------------
# Preprocessing
# ---------------------------------------------------------------------------------------------


class Doubled:
    """Preprocessing: the input times the number of examples that were learned from."""

    def learn(self, batches: Any) -> int:
        return sum(len(batch) for batch in batches)

    def features(self, learned: int) -> Inputs:
        return Inputs((), "float32")

    def layer(self, learned: int) -> Any:
        import keras

        return keras.layers.Rescaling(float(learned))


def preprocessed() -> dict[str, Any]:
    from scaleflow import dataset

    found: dict[str, Any] = {}
    for form, cache in (("arrays", "auto"), ("records", "none")):
        source: Any = Numbered(form, text=False)
        for name, own in (("own", {"deep": {"number": Doubled()}}), ("by name", {"deep/number": Doubled()})):
            source.preprocessing = own
            splits = dataset.prepare_splits(source, options(cache=cache), 0)
            feed = dataset.make_feed(splits.train, Batching(5, 1, 1), spread_over(1), transforms=splits.transforms)
            inputs, *_ = next(iter(feed.batches(1, 1).as_numpy_iterator()))
            found[f"{form}, {cache}, {name}"] = (inputs["deep"]["number"], inputs["pair"][:, 0], splits.inputs)
        source.preprocessing = None
        splits = dataset.prepare_splits(source, options(cache="auto", normalise=True), 0)
        found[f"{form} normalised"] = splits.train.inputs["pair"].mean(axis=0), splits.train.inputs["deep"]["number"]
    return found


def test_each_input_has_its_own_preprocessing(isolated: Callable[..., Any]) -> None:
    for name, values in isolated(preprocessed).items():
        if "normalised" in name:
            np.testing.assert_allclose(values[0], 0, atol=1e-6)
            assert values[1].tolist() == list(range(EXAMPLES)), name  # no quantity: integers
            continue
        numbers, untouched, inputs = values
        assert numbers.tolist() == [EXAMPLES * number for number in range(5)], name
        assert untouched.tolist() == list(range(5)), name
        assert inputs == {"pair": Inputs((2,)), "deep": {"number": Inputs(())}}


# ---------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------


class Given:
    splits = ("train",)

    def __init__(self, **changes: Any) -> None:
        self.inputs: Any = {"a": Inputs((2,)), "b": {"c": Inputs(())}}
        self.outputs: Any = {"x": Outputs("classification", (3,)), "y": Outputs("regression", (1,))}
        vars(self).update(changes)

    def load(self, split: str) -> Any:
        inputs = {"a": np.zeros((4, 2), np.float32), "b": {"c": np.zeros(4, np.float32)}}
        targets = {"x": np.arange(4) % 3, "y": np.zeros((4, 1), np.float32)}
        given = Arrays(
            getattr(self, "given_inputs", inputs), getattr(self, "given_targets", targets), getattr(self, "w", None)
        )
        return self.change(given) if hasattr(self, "change") else given


def as_stream(weight: Any) -> Callable[[Arrays], Stream]:
    import tensorflow as tf

    def change(arrays: Arrays) -> Stream:
        return Stream(tf.data.Dataset.from_tensor_slices((arrays.inputs, arrays.targets, weight)), 4)

    return change


def refusals() -> list[str | None]:
    from scaleflow import dataset

    zeros = np.zeros((4, 2), np.float32)
    cases: list[Any] = [
        Given(inputs={}),
        Given(inputs={"a/b": Inputs((2,))}),
        Given(outputs={"x": {"y": Outputs("binary", (1,))}}),
        Given(outputs={"x": Outputs("ranking", (3,))}),  # type: ignore[arg-type]
        Given(given_inputs=zeros),
        Given(given_inputs={"a": zeros, "b": {"d": zeros[:, 0]}}),
        Given(given_inputs={"a": zeros, "b": {"c": zeros}}),
        Given(given_inputs={"a": zeros.astype("uint8"), "b": {"c": zeros[:, 0]}}),
        Given(given_inputs={"a": zeros, "b": {"c": zeros[:3, 0]}}),
        Given(given_inputs={"a": zeros, "b": {"c": [0, 0, 0, 0]}}),
        Given(given_targets={"x": np.arange(4), "y": zeros[:, :1]}),
        Given(outputs=Outputs("classification", (3,))),
        Given(w=np.array([1, 1, 1])),
        Given(w=np.array([1, 1, -1, 1])),
        Given(w=np.zeros(4)),
        Given(w=np.ones((4, 1))),
        Given(change=as_stream(np.ones((4, 2), np.float32))),
        Given(change=as_stream(-np.ones(4, np.float32))),
        Given(preprocessing={"a": Doubled(), "b": Doubled()}),
        Given(preprocessing=Doubled()),
        Given(outputs=Outputs("classification", (5, 3)), given_targets=np.zeros((4, 3), int)),
        Given(outputs=Outputs("classification", (2, 3), ignore=-1), given_targets=np.full((4, 2), -1)),
        Given(outputs=Outputs("classification", (2, 3), ignore=-1), given_targets=np.full((4, 2), -2)),
    ]
    return [refused(lambda case=case: dataset.prepare_splits(case, options(), 0)) for case in cases] + [
        refused(lambda: dataset.prepare_splits(Given(inputs={"a": Inputs((2,), "int32")}, given_inputs={
            "a": zeros.astype("int32")}), options(normalise=True), 0)),
    ]  # fmt: skip


def refused(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except ConfigError as refusal:
        return str(refusal)
    return None


def test_structures_that_do_not_fit_are_refused_with_their_keys(isolated: Callable[..., Any]) -> None:
    wanted = [
        "dataset: Given.inputs must be a scaleflow.interfaces.Inputs, or a dict of them",
        "dataset: Given.inputs has the key 'a/b'; expected a name without /",
        "dataset: Given.outputs['x'] must be a scaleflow.interfaces.Outputs",
        "dataset: Given.outputs['x'].kind=ranking: expected one of classification",
        "dataset: inputs of 'train' are one tensor, but the source's inputs have the keys a, b/c",
        "dataset: inputs of 'train' have the keys a, b/d, but the source's inputs have the keys a, b/c",
        "dataset: inputs['b/c'] of 'train' have shape (2,), but the source says ()",
        "dataset: inputs['a'] of 'train' are uint8, but the source says float32",
        "dataset: load('train') returned 4 inputs['a'] and 3 inputs['b/c']",
        "dataset: inputs['b/c'] of 'train' are a list, expected a numpy array",
        "dataset: classification targets['x'] of 'train' range from 0 to 3, expected 0 to 2",
        "dataset: targets of 'train' have the keys x, y, but the source's outputs are one tensor",
        "dataset: load('train') returned 4 inputs['a'] and 3 weights",
        "dataset: weights of 'train' contain values that are negative, infinite or NaN",
        "dataset: weights of 'train' are all 0",
        "dataset: weights of 'train' have shape (4, 1), expected one number each",
        "dataset: the stream of 'train' yields the weight TensorSpec(shape=(2,), dtype=tf.float32, name=None), "
        "expected one number",
        "dataset: example 0 of 'train' cannot be read: its weight is negative, infinite or NaN -1; use "
        "dataset.on_bad_example",
        "dataset: Given.preprocessing: names b, but the inputs have the keys a, b/c",
        "dataset: Given.preprocessing: names one tensor, but the inputs have the keys a, b/c",
        "dataset: targets of 'train' have shape (3,), but the source says (5,)",
        "dataset: all classification targets of 'train' are -1, which is ignored",
        "dataset: classification targets of 'train' range from -2 to -2, expected 0 to 2 or -1, which is ignored",
        "dataset.normalise=true: none of the dataset's inputs (a) is float; remove it",
    ]
    found = isolated(refusals)
    for expected, message in zip(wanted, found, strict=True):
        assert message is not None, expected
        assert message.startswith(expected), message
