"""Weights of examples: a column of a table or of a Hugging Face dataset, a feature of TFRecord files."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, balanced_accuracy_score, log_loss

from scaleflow.errors import RunError
from scaleflow.interfaces import Batching, ObjectiveOptions
from tests.conftest import Command
from tests.dataset.files import options, prepared, refused
from tests.dataset.test_tfrecord import example, written
from tests.test_doors import last_parts, run_json

#: The weights of the rows of a file, and some that cannot be used.
GOOD = np.arange(40) % 5 / 2
BAD = {1: -1.0, 3: float("nan"), 4: float("inf"), 7: 1e300}


def open_table(path: Path, weights: str = "w", **changes: Any) -> Any:
    from scaleflow.dataset.table import Table

    return Table(str(path), "y", weights, **{"test": 0, "cache_dir": str(path.parent / "cache"), **changes})


def open_saved(path: Path, weights: str = "w") -> Any:
    from scaleflow.dataset.huggingface import HuggingFace

    return HuggingFace(["a", "b"], "y", weights, str(path), test=0)


def open_records(path: Path, weights: str = "w") -> Any:
    from scaleflow.dataset.tfrecord import TFRecord

    spec = {"a": {}, "y": {}, "w": {"shape": [1]}, "word": {"dtype": "string"}}
    cache = str(path.parent / "cache")
    return TFRecord(str(path), spec, "a", "y", weights, "regression", test=0, cache_dir=cache)


def write_all(folder: Path, weights: np.ndarray[Any, Any]) -> dict[str, Callable[..., Any]]:
    """Writes rows, whose target is 8 times a good weight, in every form; returns what opens them."""
    a = np.arange(len(weights)) / 10
    frame = pd.DataFrame({"a": a, "w": weights, "b": a[::-1], "word": "x", "y": 8 * GOOD[: len(weights)]})
    folder.mkdir()
    frame.to_csv(folder / "table.csv", index=False)
    frame.to_parquet(folder / "table.parquet", row_group_size=6)
    if np.isfinite(weights).all():  # JSON has no other numbers, and these are no form of numbers
        frame.to_csv(folder / "comma.csv", index=False, sep=";", decimal=",")
        frame.to_json(folder / "table.jsonl", orient="records", lines=True)
    opened = {path.name: functools.partial(open_table, path) for path in sorted(folder.iterdir())}
    columns = zip(*(frame[name].tolist() for name in ("a", "y", "w")), strict=True)
    records = [example(a=[x], y=[y], word=b"x", **({} if w != w else {"w": [w]})) for x, y, w in columns]
    opened["records"] = functools.partial(open_records, written(folder / "rows.tfrecord", records))
    if find_spec("datasets"):
        import datasets

        datasets.Dataset.from_pandas(frame).save_to_disk(str(folder / "saved"))
        opened["saved"] = functools.partial(open_saved, folder / "saved")
    return opened


def read_batches(folder: str) -> dict[str, list[int]]:
    """How many rows of an epoch have each weight, by form, cache and shards, after a check of each row."""
    import tensorflow as tf

    from scaleflow import dataset

    found = {}
    for name, opened in write_all(Path(folder) / "good", GOOD).items():
        cases = [(opened, cache, 1) for cache in ("none", "memory", "file")]
        if name == "table.parquet":
            cases += [(functools.partial(opened, learn_on=9, drop=["w"]), "none", shards) for shards in (1, 2)]
        for number, (make, cache, shards) in enumerate(cases):
            splits = dataset.prepare_splits(make(), options(cache=cache, shards=shards), 0)
            strategy, batching = tf.distribute.get_strategy(), Batching(12, 1, 1)
            feed = dataset.make_feed(splits.train, batching, strategy, 3, transforms=splits.transforms, shards=shards)
            targets, mask, weights = map(np.concatenate, zip(*(each[1:] for each in feed.batches(1, 4)), strict=True))
            np.testing.assert_array_equal(weights, targets[:, 0] / 8 * mask)
            assert len(weights) == 48
            assert splits.is_weighted
            assert not isinstance(splits.inputs, dict) or "w" not in splits.inputs
            found[f"{name} {number}"] = np.bincount((2 * weights[mask > 0]).astype(int)).tolist()
    return found


def test_weights_come_with_their_rows(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(read_batches, str(tmp_path))
    assert len(found) >= 5 * 3 + 2
    assert set(map(tuple, found.values())) == {(8,) * 5}


def evaluate_whole(make: Callable[[], Any]) -> Any:
    """Evaluates rows that are read while training."""
    import tensorflow as tf

    from scaleflow import dataset, objective, training

    splits = dataset.prepare_splits(make(), options(cache="none"), 0)
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    feed = dataset.make_feed(splits.train, Batching(4, 1, 1), strategy, transforms=splits.transforms)
    goal = objective.make_objective(splits.outputs, ObjectiveOptions(), is_weighted=splits.is_weighted)
    return training.Evaluation(strategy, lambda inputs: inputs["a"], goal)(feed)


def refuse_bad(folder: Path) -> tuple[dict[str, Any], list[str], list[str]]:
    """Of each form: what is said of bad rows, and what is left without them; what is said if all weights are 0."""
    weights = GOOD.copy()
    weights[list(BAD)] = list(BAD.values())
    bad = {
        name: (prepared(opened, cache="memory"), prepared(opened, cache="memory", on_bad_example="skip"))
        for name, opened in write_all(folder / "bad", weights).items()
    }
    zero = [str(prepared(opened, cache="memory")) for opened in write_all(folder / "zero", 0 * GOOD[:20]).values()]
    with pytest.raises(RunError, match="the weights of all 20 examples of a split are 0"):
        evaluate_whole(functools.partial(open_table, folder / "zero" / "table.parquet", learn_on=9))
    table, records = folder / "bad" / "table.csv", folder / "bad" / "rows.tfrecord"
    pd.read_csv(table).assign(z="many").to_csv(folder / "words.csv", index=False)
    wrong: list[Callable[[], Any]] = [functools.partial(open_table, table, name) for name in ("v", "y")]
    wrong += [functools.partial(open_table, table, columns=["a", "w"])]
    wrong += [functools.partial(open_table, folder / "words.csv", "z")]
    wrong += [functools.partial(open_records, records, name) for name in ("v", "y", "a", "word")]
    return bad, zero, refused(wrong)


@pytest.mark.slow
def test_weights_that_cannot_be_used_are_refused(isolated: Callable[..., Any], tmp_path: Path) -> None:
    bad, zero, wrong = isolated(refuse_bad, tmp_path)
    for name, (refusal, left) in bad.items():
        row = {"records": "rows.tfrecord, record 1: its target or its weight is", "saved": "saved, row 1"}
        assert row.get(name, f"{name}, row 2: its weight w is -1.0, expected a finite number from 0 up") in refusal, (
            refusal
        )
        assert left[0] == {"train": 36}, name
        assert "left out 4 of the 40 examples" in " ".join(left[1])
    assert len(zero) == len(bad) + 2
    assert set(zero) == {"dataset: weights of 'train' are all 0"}
    said = ["dataset.weights=v: there is no such column", "is the target", "is in dataset.columns, too"]
    said += ["no row has a number from 0 up in it, the first has 'many'", "dataset.weights=v: there is no such feature"]
    said += ["is the target", "is in dataset.input, too", "dataset.weights=word: expected a feature that is one number"]
    for message, words in zip(wrong, said, strict=True):
        assert words in message


def draw_rows(seed: int, count: int) -> pd.DataFrame:
    """Rows of which a half says the opposite of the others, and has no weight, or a small one."""
    random = np.random.default_rng(seed)
    x, z, is_wrong = random.normal(size=count), random.normal(size=count), random.uniform(size=count) < 0.5
    weights = np.where(is_wrong, random.choice([0.0, 0.01], count), random.choice([1.0, 2.5], count))
    return pd.DataFrame({"x": x, "z": z, "w": weights, "y": np.where((x > 0) != is_wrong, "yes", "no")})


@pytest.mark.slow
def test_the_weighted_metrics_are_the_same_by_every_door(command: Command) -> None:
    """In the run, whose members leave out folds, in its report, in `evaluate`, and of what `predict` returns."""
    folder, test = command.folder, draw_rows(1, 60)
    (folder / "data").mkdir()
    draw_rows(0, 240).to_csv(folder / "data" / "train.csv", index=False)
    test.to_csv(folder / "data" / "test.csv", index=False)
    test[["z", "x"]].to_csv(folder / "new.csv", index=False)
    words = ("dataset=table", "dataset.data_dir=data", "dataset.target=y", "dataset.weights=w", "hydra.run.dir=run")
    run = run_json(command, *words, "model.units=16", "model.members=4", "training.epochs=20")
    found = {"run": last_parts(run["metrics"])}
    found["evaluate"] = last_parts(run_json(command, "evaluate", run["run_id"])["metrics"])
    report = json.loads((folder / "run" / "evaluation" / "metrics.json").read_text())["outputs"][""]["metrics"]
    values = {name: each["value"] for name, each in report.items()}
    found["report"] = {**values, "loss": values["log_loss"]}
    where = ("--input", "new.csv", "--output", "out.parquet", "--probabilities")
    run_json(command, "predict", run["run_id"], *where)
    kept = pd.read_parquet(folder / "run" / "evaluation" / "predictions.parquet")
    for door, rows, weights in (
        ("predict", pd.read_parquet(folder / "out.parquet"), test.w),
        ("kept", kept, kept.weight),
    ):
        metrics = {"accuracy": accuracy_score, "balanced_accuracy": balanced_accuracy_score}
        found[door] = {name: each(test.y, rows.prediction, sample_weight=weights) for name, each in metrics.items()}
        found[door]["loss"] = log_loss(test.y, rows[["probability_no", "probability_yes"]], sample_weight=weights)
    for door, each in found.items():
        for name in ("loss", "accuracy", "balanced_accuracy"):
            assert each[name] == pytest.approx(found["predict"][name], rel=1e-6), (door, name, found)
    metrics = run["metrics"]  # without weights, all of these are about 0.5
    assert min(metrics[f"{name}/accuracy"] for name in ("train", "val", "test", "baseline/boosting")) > 0.9
