from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NUMBERS = ["0", "1", "-1", "+1.5", ".5", "5.", "1e3", "1E-3", "-2.5e+07", "123456789.123456789", "1e300", "1e-300"]
NUMBERS += ["3.141592653589793", "0.1", "1.7976931348623157e308", "00012", "-0", "12345678901234567890", "123e-308"]
NO_NUMBERS = ["", "-", "e5", "1e", "1e+", "1-2", "--1", "1.2.3", "1e5e5", "1e5.5", "abc", "1 2", " 1", "1,5", "0x10"]
NO_NUMBERS += ["nan", "inf", ".", "+", "1" * 32, "1_000", "1e-", "e", "5-", "1e1234", "٣"]


def parse(strings: list[str]) -> Any:
    import keras
    import tensorflow as tf

    from scaleflow.dataset.columns import are_numbers, as_numbers, parse_numbers

    keras.config.set_dtype_policy("mixed_float16")
    given = keras.Input((), dtype="string")
    found = keras.Model(given, parse_numbers(given))(tf.constant(strings)).numpy()
    is_number = are_numbers(tf.constant(strings)).numpy()
    return found, is_number, as_numbers(tf.constant(np.array(strings)[is_number])).numpy()


def test_a_number_is_read_by_keras_operations_as_by_tensorflow(isolated: Callable[..., Any]) -> None:
    random = np.random.default_rng(0)
    values = random.standard_normal(500) * 10.0 ** random.integers(-40, 40, 500)
    strings = [*NUMBERS, *map(repr, values.tolist()), *NO_NUMBERS]
    found, is_number, as_numbers = isolated(parse, strings)
    count = len(strings) - len(NO_NUMBERS)
    assert found.dtype == np.float64
    assert is_number.tolist()[:count] == [True] * count
    wanted = [float(string) for string in strings[:count]]
    np.testing.assert_allclose(found[:count], wanted, rtol=2e-15)
    np.testing.assert_allclose(as_numbers, wanted, rtol=2e-15)
    for string, number, known in zip(NO_NUMBERS, found[count:], is_number[count:], strict=True):
        assert np.isnan(number), string
        assert not known, string


ROWS = [
    ["1.0", "red", "7", "", "1600000000"],
    ["NA", "blue", "7", "x", "1600000010"],
    ["3.0", "NA", "7", "", "1600000020"],
    ["5.0", "red", "7", "y", "1600000030"],
]
OTHER = [["11", "green", "8", "z", "1600000015"], ["", "", "NA", "x", "NA"]]


def learned_from(folder: Path) -> Any:
    """What is learned in two batches; the features of rows, live and loaded from both forms."""
    import keras
    import tensorflow as tf

    from scaleflow.dataset.columns import Columns

    keras.config.set_dtype_policy("mixed_bfloat16")
    columns = Columns(["a", "b", "c", "d", "e"], [0, 2, 4], ["", "NA"], 3)
    rows = np.array(ROWS, object)
    learned = columns.learn([rows[:3], rows[3:]])
    layer = columns.layer(learned)
    layer.save(folder / "model.keras")
    layer.export(folder / "saved", input_signature=[tf.TensorSpec([None, 5], tf.string)], verbose=False)
    saved = tf.saved_model.load(str(folder / "saved"))
    given = tf.constant(ROWS + OTHER)
    live = layer(given)
    forms = [live, keras.models.load_model(folder / "model.keras")(given), saved.serve(given)]
    in_pipeline = next(iter(tf.data.Dataset.from_tensors(given).map(layer)))
    errors = []
    for call in (layer, saved.serve):
        try:
            call(tf.constant([["one", "red", "7", "x", "1"]]))
        except tf.errors.InvalidArgumentError as error:
            errors.append(str(error))
    return learned, columns.features(learned), [form.numpy() for form in (*forms, in_pipeline)], errors


def test_rows_become_standard_numbers_and_one_hot_words(isolated: Callable[..., Any], tmp_path: Path) -> None:
    learned, features, forms, errors = isolated(learned_from, tmp_path)
    assert learned["words"] == [["blue", "red"], ["x", "y"]]
    assert learned["words_missing"] == [True, True]
    assert learned["missing"] == [True, False, False]
    np.testing.assert_allclose(learned["mean"], [3.0, 7.0, 1600000015.0])
    deviation = [np.std([1, 3, 5]), 1.0, np.std([0, 10, 20, 30])]
    np.testing.assert_allclose(learned["deviation"], deviation, rtol=1e-12)
    assert (features.shape, features.dtype) == ((3 + 1 + 4 + 4,), "float32")
    a, e = 2 / deviation[0], 5 / deviation[2]
    wanted = [
        [-a, 0, -3 * e, 0, *[0, 0, 1, 0], *[0, 0, 0, 1]],
        [0, 0, -e, 1, *[0, 1, 0, 0], *[0, 1, 0, 0]],
        [0, 0, e, 0, *[0, 0, 0, 1], *[0, 0, 0, 1]],
        [a, 0, 3 * e, 0, *[0, 0, 1, 0], *[0, 0, 1, 0]],
        [4 * a, 1, 0, 0, *[1, 0, 0, 0], *[1, 0, 0, 0]],
        [0, 0, 0, 1, *[0, 0, 0, 1], *[0, 1, 0, 0]],
    ]
    for form in forms:
        assert form.dtype == np.float32
        np.testing.assert_allclose(form, wanted, atol=1e-6)
    assert len(errors) == 2
    assert all("one" in error for error in errors)


def alone(numeric: list[int], missing: list[str]) -> Any:
    import tensorflow as tf

    from scaleflow.dataset.columns import Columns

    columns = Columns(["a"], numeric, missing, 3)
    rows = np.array([["1"], ["2"]], object)
    learned = columns.learn([rows])
    return columns.layer(learned)(tf.constant([["1"], ["3"]])).numpy().tolist(), columns.features(learned).shape


@pytest.mark.parametrize("missing", [[], ["NA"]])
def test_a_single_column_of_either_kind_is_enough(isolated: Callable[..., Any], missing: list[str]) -> None:
    assert isolated(alone, [0], missing) == ([[-1.0], [3.0]], (1,))
    assert isolated(alone, [], missing) == ([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]], (3,))


def refusals() -> list[str]:
    from scaleflow.dataset.columns import Columns
    from scaleflow.errors import ConfigError

    found = []
    for numeric, values in (([], "abcd"), ([0], ["1", "1e999"])):
        with pytest.raises(ConfigError) as refusal:
            Columns(["town"], numeric, [], 3).learn(np.array([[value]], object) for value in values)
        found.append(str(refusal.value))
    return found


def test_a_column_that_cannot_be_learned_is_refused(isolated: Callable[..., Any]) -> None:
    assert isolated(refusals) == [
        "dataset.columns: the column town has more than 3 different words; remove it with dataset.drop, or raise "
        "dataset.most_values",
        "dataset.columns: the column town has numbers too large to compute a mean; remove it with dataset.drop",
    ]
