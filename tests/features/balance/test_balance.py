"""`dataset.balance`: which examples an epoch has, and the probabilities of a model that was trained on them."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scaleflow.errors import ConfigError
from scaleflow.features.balance.feature import BalanceOptions
from scaleflow.interfaces import Arrays, Batching, Outputs, Plan, Stream
from tests.dataset.reading import as_stream, numbered, reader, spread_over
from tests.training.fake_engine import build_untested, make_session, run_apart
from tests.training.interrupted import differences
from tests.training.test_callback_state import BASE

#: The classes of 53 examples: 30 of 0, 3 of 1, none of 2, 20 of 3.
CLASSES = np.random.default_rng(0).permutation(np.repeat([0, 1, 3], [30, 3, 20]))


def counted() -> dict[str, Any]:
    from scaleflow.features.balance.order import count_drawn

    counts = np.bincount(CLASSES)
    options: dict[str, Any] = {"over": "oversample", "under": "undersample", "share": {1: 0.3}, "few": {1: 0.001}}
    options["all"] = {0: 0.2, 1: 0.2, 3: 0.6}
    return {name: count_drawn(counts, option).tolist() for name, option in options.items()}


def test_numbers_of_drawn_examples_follow_the_option(isolated: Callable[..., Any]) -> None:
    assert isolated(counted) == {
        "over": [30, 30, 0, 30],
        "under": [3, 3, 0, 3],
        "share": [22, 16, 0, 15],  # 15.9 of 53; 3 of 5 and 2 of 5 of the other 37.1
        "few": [32, 1, 0, 21],
        "all": [11, 10, 0, 32],
    }


def epochs(replicas: int, accumulate: int) -> dict[str, Any]:
    """Two epochs of over- and undersampling, the second also from step 1 on, of arrays and of records in memory."""
    from scaleflow import dataset
    from scaleflow.features.balance.order import ClassOrder, count_drawn

    strategy, found = spread_over(replicas), {}
    arrays = numbered(len(CLASSES))
    records = Stream(as_stream(arrays), len(arrays), lambda vector, number: (vector, number))
    for form, option in itertools.product(("arrays", "records"), ("oversample", "undersample")):
        examples: Any = arrays
        if form == "records":
            from scaleflow.dataset.batches.records import cache_records
            from scaleflow.dataset.batches.rows import to_rows

            examples = cache_records("train", to_rows(records))  # type: ignore[arg-type]
            assert examples.is_random_access
        order = ClassOrder(CLASSES, count_drawn(np.bincount(CLASSES), option))
        feed: Any = dataset.make_feed(
            examples, Batching(12 // replicas // accumulate, accumulate, replicas), strategy, 5
        )
        read = reader(strategy, feed.reorder(5, order))
        found[form, option] = (read(0), read(1), read(1, 1), reader(strategy, feed.reorder(6, order))(0))
    return found


def test_an_epoch_has_its_number_of_each_class_in_an_order_of_seed_and_epoch(isolated: Callable[..., Any]) -> None:
    one = isolated(epochs, 1, 1)
    for option, many in (("oversample", 30), ("undersample", 3)):
        first, second, rest, other = one["arrays", option]
        assert one["records", option] == one["arrays", option]
        assert rest == second[1:]
        numbers = [[n for batch, _ in read for n in batch] for read in (first, second, other)]
        assert len({str(each) for each in numbers}) == 3
        for each in numbers:
            assert np.bincount(CLASSES[each]).tolist() == [many, many, 0, many]
            for number in (0, 1, 3):
                times = np.bincount([n for n in each if CLASSES[n] == number], minlength=53)[number == CLASSES]
                assert times.max() - times.min() <= 1  # of 20 examples 10 occur twice
        if option == "undersample":
            assert set(numbers[0]) != set(numbers[1])
    assert isolated(epochs, 2, 2) == one


@pytest.mark.parametrize(
    "words",
    [
        ("dataset.balance={3: 0.5}", "dataset.augment={mixup: 0.2}"),
        pytest.param(
            ("dataset.balance=undersample", "strategy=mirrored", "hardware.logical_devices=2"), marks=pytest.mark.slow
        ),
        pytest.param(
            ("dataset.balance=oversample", "training.engine=fit", "training.steps_per_loop=1"), marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.slow
def test_a_resumed_run_draws_the_same_examples(
    isolated: Callable[..., Any], plan: Callable[..., Plan], words: tuple[str, ...]
) -> None:
    assert isolated(differences, plan(*BASE, *words), [3])[0] == []


def write_rare(folder: Path) -> dict[str, dict[str, Any]]:
    """Writes examples of two and of three classes, one of which is rare, and returns them."""
    random, found = np.random.default_rng(0), {}
    for name, weights, biases in (
        ("two", [[0, 1.5], [0, -1.0]], [0, -2.5]),
        ("three", [[0, 1.0, -1.0], [0, 0.5, 1.5]], [0, -1.0, -3.5]),
    ):
        x = random.normal(size=(6000, 2)).astype(np.float32)
        chances = np.exp(x @ np.array(weights) + biases)
        chances /= chances.sum(axis=1, keepdims=True)
        y = (random.uniform(size=(6000, 1)) > np.cumsum(chances, axis=1)).sum(axis=1)
        found[name] = {"x_train": x[:4000], "y_train": y[:4000], "x_test": x[4000:], "y_test": y[4000:]}
        np.savez(folder / f"{name}.npz", **found[name])
    return found


def predict(plan: Plan, x: Any, folder: Path) -> dict[str, Any]:
    """Trains, and returns the probabilities of the model in training and of its files, and the validation loss."""
    import keras
    import tensorflow as tf

    values: dict[str, float] = {}
    built = build_untested(plan)
    make_session(plan, built, lambda event: values.update(getattr(event, "values", None) or {})).run()
    built.export(folder)
    saved = keras.models.load_model(folder / "model.keras", compile=False)
    served = tf.saved_model.load(folder / "saved_model").signatures["probabilities"]
    logits = [np.asarray(each) for each in (built.engine.predict(x), saved(x))]
    chances = [np.asarray(tf.nn.softmax(each) if each.shape[-1] > 1 else tf.sigmoid(each)) for each in logits]
    chances = [each if each.shape[-1] > 1 else np.hstack([1 - each, each]) for each in chances]
    answer = next(iter(served(tf.constant(x)).values())).numpy()
    return {"in training": chances[0], "keras": chances[1], "served": answer, "loss": values["val/loss"]}


def predict_all(cases: list[Any]) -> list[dict[str, Any]]:
    return run_apart(predict, cases)


LINEAR = (
    *("hardware=cpu", "tracking=none", "model=linear", "dataset.validation=test", "training.epochs=6"),
    *("optimizer.learning_rate=0.03", "optimizer.schedule=cosine", "training.batch_size=64"),
)


@pytest.mark.slow
def test_corrected_probabilities_are_those_of_a_logistic_regression_on_all_examples(
    isolated: Callable[..., Any], plan: Callable[..., Plan], tmp_path: Path
) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    data = write_rare(tmp_path)
    cases = [
        ("two", "dataset.balance=oversample"),
        ("two", "dataset.balance={1: 0.5}", "dataset.prior_correction=false"),
        ("three", "dataset.balance={2: 0.3}"),
    ]
    plans = [plan(*LINEAR, "dataset=npz", f"dataset.data_dir={tmp_path / name}.npz", *words) for name, *words in cases]
    inputs = [data[name]["x_test"] for name, *_ in cases]
    found = isolated(
        predict_all, [(*each, tmp_path / str(n)) for n, each in enumerate(zip(plans, inputs, strict=True))]
    )
    for (name, *words), result in zip(cases, found, strict=True):
        known = data[name]
        wanted = LogisticRegression(C=1e6).fit(known["x_train"], known["y_train"]).predict_proba(known["x_test"])
        for door in ("keras", "served"):
            np.testing.assert_allclose(result[door], result["in training"], atol=1e-5)
        chances, rare = result["served"], wanted.shape[1] - 1
        if len(words) > 1:  # not corrected
            assert chances[:, rare].mean() > 1.5 * wanted[:, rare].mean()
            continue
        assert abs(chances - wanted).mean() < 0.02, name
        np.testing.assert_allclose(chances.mean(axis=0), np.bincount(known["y_test"]) / 2000, atol=0.02)
        assert result["loss"] == pytest.approx(log_loss(known["y_test"], wanted), abs=0.02)


ONE = Outputs("classification", (4,), names=("a", "b", "c", "d"))
SHARES = {"a": 0.2, "b": 0.2}


def refuse_all() -> list[str]:
    from scaleflow.dataset.batches.rows import to_rows
    from scaleflow.features.balance.hook import balance_classes

    arrays = Arrays(numbered(53).inputs, CLASSES.astype(np.int32))
    stream = Stream(as_stream(arrays), 53)
    cases: list[tuple[Any, Any, Any]] = [
        ("oversample", {"a": ONE, "b": ONE}, arrays),
        ("oversample", Outputs("regression", (1,)), arrays),
        ("oversample", Outputs("multi_label", (4,)), arrays),
        ("oversample", Outputs("classification", (7, 4)), arrays),
        ("oversample", Outputs("classification", (4,), ignore=-1), arrays),
        ("undersample", ONE, stream),
        ({"e": 0.2}, ONE, arrays),
        ({"a": 0.2, "0": 0.2}, ONE, arrays),
        ({"c": 0.2}, ONE, arrays),
        ({**SHARES, "d": 0.5}, ONE, arrays),
        ({"a": 0.5, "b": 0.5}, ONE, arrays),
    ]
    found = []
    for option, outputs, examples in cases:
        options = BalanceOptions(balance=option)
        splits = SimpleNamespace(outputs=outputs, train=to_rows(examples))
        with pytest.raises(ConfigError) as refused:
            balance_classes(options, splits)  # type: ignore[arg-type]
        found.append(str(refused.value))
    return found


def test_what_cannot_be_balanced_is_refused(isolated: Callable[..., Any]) -> None:
    needs = "dataset.balance: needs one class of each example, and the dataset has"
    assert isolated(refuse_all) == [
        f"{needs} several outputs; leave it null",
        f"{needs} regression targets (1,); leave it null",
        f"{needs} multi_label targets (4,); leave it null",
        f"{needs} classification targets (7, 4); leave it null",
        f"{needs} classification targets (4,), some of which are ignored; leave it null",
        "dataset.balance: the classes of examples that are read while training are not known before; use "
        "dataset.cache=memory, or objective.class_weight=balanced",
        "dataset.balance.e: there is no such class; the classes are 0, 1, 2, 3, a, b, c, d",
        "dataset.balance={'a': 0.2, '0': 0.2}: names a class twice, by its name and by its number",
        "dataset.balance={'c': 0.2}: the training split has no example of c",
        "dataset.balance={'a': 0.2, 'b': 0.2, 'd': 0.5}: the shares of all classes sum to 0.9; leave one class out, or "
        "let them sum to 1",
        "dataset.balance={'a': 0.5, 'b': 0.5}: leaves nothing for 1 other class; use shares below 1 in total",
    ]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("'dataset.balance={1: 0.7, 2: 0.4}'", "the shares sum to more than 1"),
        ("'dataset.balance={1: 0}'", "dataset.balance={1: 0}: expected"),
        ("dataset.balance=both", "expected one of oversample, undersample"),
        ("dataset.balance=oversample objective.class_weight=balanced", "rare classes would count twice"),
        ("dataset.balance=oversample 'training.step={_target_: a.b}'", "use dataset.prior_correction=false"),
        ("dataset.prior_correction=false", "nothing to correct"),
        ("dataset.balance=oversample debug=overfit", "use only one of the two"),
    ],
)
def test_options_that_do_not_go_together_are_refused(plan: Callable[..., Plan], words: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        plan(*shlex.split(words))
