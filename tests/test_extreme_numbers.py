"""Numbers that float32 would round: each door gives the metrics that NumPy computes in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.conftest import Command

ROWS = 400

#: By the name of a column of numbers: from values between -1 and 1.
COLUMNS: Mapping[str, Callable[[Any], Any]] = {
    "unix_s": lambda u: 1_700_000_000 + 200 * u,
    "unix_ns": lambda u: (1_700_000_000_000_000_000 + 2e11 * u).astype(np.int64),
    "julian": lambda u: 2_460_000 + 3 * u,
    "northing": lambda u: 5_400_000 + 2 * u,
    "id": lambda u: 9_007_199_254_740_993 + (4000 * u).astype(np.int64),
    "tail": lambda u: np.exp(30 * (u + 1)),
    "tiny": lambda u: 1e-12 * u,
    "noise": lambda u: 1e6 + 1e-3 * u,
    "zero": lambda u: np.where(u > 0, 0.0, -0.0),
    "missing": lambda u: np.where(u > 0.8, np.nan, 1e12 * u),
}


def draw_table(target: Callable[[Any], Any]) -> Any:
    import pandas as pd

    shares = np.random.default_rng(0).uniform(-1, 1, (ROWS, len(COLUMNS)))
    table = pd.DataFrame({name: make(shares[:, n]) for n, (name, make) in enumerate(COLUMNS.items())})
    table["y"] = target(shares.sum(axis=1))
    return table


def standardise(columns: Mapping[str, Any]) -> list[float]:
    """The largest difference of each column's features from numpy's, one column at a time and all at once."""
    import tensorflow as tf

    from scaleflow.dataset.tables.columns import Number

    learned = {name: Number().learn(iter([x.astype(np.float64)])) for name, x in columns.items()}
    tensors = [tf.constant(x, tf.float64) for x in columns.values()]
    together = Number().layer_of_all(list(learned.values()))(tensors)
    differences = []
    for (name, values), tensor, features in zip(columns.items(), tensors, together, strict=True):
        numbers = values.astype(np.float64)
        center = np.nanmedian(numbers) if name == "tail" else np.nanmean(numbers)
        wanted = np.nan_to_num((numbers - center) / np.nanstd(numbers))
        np.testing.assert_array_equal(Number().layer(learned[name])(tensor), features)
        assert features.shape[1] == 1 + np.isnan(numbers).any()
        differences.append(float(np.abs(features[:, 0].numpy() - wanted).max()))
    return differences


def test_numbers_are_standardised_before_they_become_float32(isolated: Callable[..., Any]) -> None:
    table = draw_table(np.asarray)
    columns = {name: table[name].to_numpy() for name in COLUMNS if name != "zero"}
    assert max(isolated(standardise, columns)) < 1e-6


def describe_wide(columns: int) -> tuple[int, int, set[str]]:
    """Layers of an exported model, transforms of its pipeline, and the first characters of its layers."""
    import keras

    from scaleflow.dataset.batches.preprocessing import group_names, make_layer
    from scaleflow.dataset.tables.columns import Number
    from scaleflow.interfaces import Inputs, Outputs
    from scaleflow.model.export import add_preprocessing
    from scaleflow.model.tabular import build

    names = [f"c{n:03}" for n in range(columns)]
    preprocessings = dict.fromkeys(names, Number())
    learned = {name: Number().learn(iter([np.array([1.0, 2.0, n])])) for n, name in enumerate(names)}
    groups = group_names(preprocessings)
    core = build({name: Number().features(learned[name]) for name in names}, Outputs("regression", (1,)), units=8)
    layers = {group: make_layer(preprocessings, learned, group) for group in groups}
    whole = add_preprocessing(layers, core, {name: Inputs((), "float64") for name in names})
    inputs = sum(isinstance(each, keras.layers.InputLayer) for each in whole.layers)
    single = build(Inputs((24,)), Outputs("regression", (1,)), units=8)
    firsts = {layer.name[0] for layer in (*core.layers, *single.layers)}
    return len(whole.layers) - inputs, len(groups), firsts


def test_all_columns_of_numbers_are_preprocessed_at_once(isolated: Callable[..., Any]) -> None:
    layers, groups, firsts = isolated(describe_wide, 30)
    assert (layers, groups) == (2, 1)
    assert "_" not in firsts  # TensorFlow takes no name of a scope that begins so


def read_npz(path: str) -> Any:
    from scaleflow.dataset.batches.preprocessing import Normalise
    from scaleflow.dataset.npz import Npz

    source = Npz(path, test=0.0)
    arrays = source.load("train")
    learned = Normalise(source.inputs).learn(iter([arrays.inputs]))
    features = Normalise(source.inputs).layer(learned)(arrays.inputs)
    return source.inputs.dtype, source.outputs, arrays.targets, np.asarray(features)


def test_arrays_that_float32_would_round_stay_float64(isolated: Callable[..., Any], tmp_path: Any) -> None:
    shares = np.random.default_rng(0).uniform(-1, 1, (200, 3))
    x = np.stack([1.7e9 + 200 * shares[:, 0], 1e-12 * shares[:, 1], np.full(200, 0.1)], axis=1)
    y = 1.7e12 + 2e5 * shares[:, 2]
    np.savez(tmp_path / "a.npz", x=x, y=y)
    dtype, outputs, targets, features = isolated(read_npz, str(tmp_path / "a.npz"))
    assert dtype == "float64"
    np.testing.assert_array_equal(targets[:, 0], y)
    assert (outputs.scaling, outputs.dtype) == (pytest.approx((y.mean(), y.std()), rel=1e-8), "float64")
    wanted = (x[:, :2] - x[:, :2].mean(axis=0)) / x[:, :2].std(axis=0)
    np.testing.assert_allclose(features[:, :2], wanted, atol=1e-6)
    np.testing.assert_allclose(features[:, 2], 0, atol=1e-6)


def answer(folder: str, frame: Any) -> dict[str, Any]:
    """What the exported model of a run answers, through its signature."""
    import tensorflow as tf

    signature = tf.saved_model.load(f"{folder}/model/saved_model").signatures["serving_default"]
    (_, specs) = signature.structured_input_signature
    return np.asarray(
        signature(**{n: tf.constant(frame[n].to_numpy(), each.dtype) for n, each in specs.items()})["prediction"]
    )


def compute_metrics(target: Any, predicted: Any) -> dict[str, float]:
    errors = np.asarray(predicted, np.float64) - target
    squared = float((errors**2).mean())
    explained = 1 - squared / float(((target - target.mean()) ** 2).mean())
    return {"mae": float(np.abs(errors).mean()), "rmse": squared**0.5, "r2": explained}


def check_metrics(found: Mapping[str, float], wanted: Mapping[str, float]) -> None:
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=2e-6), name


#: Targets, from sums of values between -1 and 1.
TARGETS: Mapping[str, Callable[[Any], Any]] = {
    "unix_s": lambda z: 1.7e9 + 200 * z,
    "unix_ms": lambda z: (1.7e12 + 2e5 * z).round().astype(np.int64),
    "big": lambda z: 1e11 + 100 * z,  # float32 has steps of 8,192 there
    "tiny": lambda z: 1e-12 * z,
    "tail": lambda z: np.exp(5 * z),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "unix_s" else pytest.mark.slow) for name in TARGETS]
)
def test_every_door_has_the_metrics_of_float64(command: Command, isolated: Callable[..., Any], name: str) -> None:
    import pandas as pd

    table = draw_table(TARGETS[name])
    table.to_parquet(command.folder / "t.parquet")
    words = ("dataset=table", "dataset.data_dir=t.parquet", "dataset.target=y", "training.epochs=3")
    ended = command(*words, "objective.metrics=[mape]", "hydra.run.dir=run", "--json")
    assert ended.returncode == 0, ended.stderr
    run = json.loads(ended.stdout.splitlines()[-1])
    kept = pd.read_parquet(command.folder / "run" / "evaluation" / "predictions.parquet")
    rows = kept["row"].to_numpy() - 1
    target = table["y"].to_numpy()[rows].astype(np.float64)
    np.testing.assert_array_equal(kept["target"], target)
    wanted = compute_metrics(target, kept["prediction"])
    assert wanted["mae"] > 0
    tested = {key.removeprefix("test/"): value for key, value in run["metrics"].items()}
    check_metrics(tested, wanted)
    if np.abs(target).min() > 1:  # Keras divides by at least 1e-7
        assert tested["mape"] == pytest.approx(100 * np.abs(kept["prediction"] / target - 1).mean(), rel=1e-5)
    served = isolated(answer, str(command.folder / "run"), table)[rows]
    assert np.abs(served - kept["prediction"]).max() < 2e-6 * target.std()
    check_metrics(compute_metrics(target, served), wanted)
    if name == "unix_s":
        return
    ended = command.python("-m", "scaleflow", "evaluate", run["run_id"], "--json")
    check_metrics(
        {k.rpartition("/")[2]: v for k, v in json.loads(ended.stdout.splitlines()[-1])["metrics"].items()}, wanted
    )
    command.python("-m", "scaleflow", "predict", run["run_id"], "--input", "t.parquet", "--output", "p.parquet")
    check_metrics(compute_metrics(target, pd.read_parquet(command.folder / "p.parquet")["prediction"][rows]), wanted)
