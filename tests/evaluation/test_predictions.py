"""The record of kept predictions: what runs write into it, and what a reader gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from scaleflow.errors import ConfigError
from scaleflow.evaluation import collector as collector_module
from scaleflow.evaluation.collector import PredictionCollector, choose_form, draw_sample
from scaleflow.evaluation.predictions import (
    METADATA,
    PredictionColumns,
    Predictions,
    load_predictions,
    make_predictions_table,
    save_predictions,
)
from scaleflow.interfaces import Outputs
from tests.conftest import Command
from tests.dataset.files import picture, plain, write

TINY = ("tracking=none", "checkpoint=none", "training.max_steps=3", "hardware=cpu")

CLASSES = Outputs("classification", (3,), names=("a", "b", "c"))

#: What each strategy needs; the last ones are slow.
STRATEGIES = {
    "mirrored": ("strategy=mirrored", "hardware.logical_devices=2"),
    "multi_worker": ("strategy=multi_worker",),
    "parameter_server": ("strategy=parameter_server",),
    "pipeline": ("strategy=pipeline", "hardware.logical_devices=2"),
    "fit": ("training.engine=fit",),
}

#: Updates that are the same on every strategy: none changes the weights by much.
SAME = ("training.global_batch_size=48", "optimizer=sgd", "optimizer.learning_rate=1e-9")


def keep(folder: Path, *words: str) -> Predictions:
    """What a run in a folder keeps."""
    folder.mkdir(exist_ok=True)
    command = Command(folder)
    done = command(*TINY, *words, "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    return load_predictions(folder / "run" / "evaluation" / "predictions.parquet")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Predictions:
    return keep(tmp_path_factory.mktemp("alone"), *SAME)


def test_a_run_keeps_where_its_drawn_test_examples_come_from(alone: Predictions) -> None:
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    assert (alone.split, alone.examples, len(alone.table), alone.is_sample) == ("test", 359, 359, False)
    assert alone.digest, "of the split, so that another run can tell whether it has the same"
    assert digits.target[alone.column("row")].tolist() == alone.column("target").tolist()
    assert alone.column("example").tolist() == list(range(359))
    chances = np.stack([alone.column(f"probability_{n}") for n in range(10)], axis=1)
    assert chances.sum(axis=1) == pytest.approx(1, abs=1e-6)
    assert (alone.column("prediction") == chances.argmax(axis=1)).all()
    assert (alone.column("target_probability") == chances[range(359), alone.column("target")]).all()
    ranks = 1 + (chances > alone.column("target_probability")[:, None]).sum(axis=1)
    assert (alone.column("target_rank") == ranks).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_keeps_what_one_device_does(tmp_path: Path, alone: Predictions, name: str) -> None:
    found = keep(tmp_path, *SAME, *STRATEGIES[name])
    assert found.table.column_names == alone.table.column_names
    for column in ("example", "row", "target"):
        assert found.column(column).tolist() == alone.column(column).tolist(), column
    assert found.column("probability_3") == pytest.approx(alone.column("probability_3"), abs=1e-4)


ROWS = [f"{n % 7},{'red' if n % 3 else 'blue'},{n},key-{n:03}" for n in range(90)]


def write_tables(folder: Path) -> None:
    for name, part in (("a", ROWS[:40]), ("b", ROWS[40:])):
        write(folder / "tables" / f"{name}.csv", "\n".join(["size,colour,price,key", *part]) + "\n")


@pytest.mark.parametrize(
    "words",
    [
        (),
        pytest.param(("dataset.cache=none",), marks=pytest.mark.slow),
        pytest.param(
            ("dataset.cache=none", "dataset.shards=2", "strategy=multi_worker", "training.global_batch_size=16"),
            marks=pytest.mark.slow,
        ),
        pytest.param(("dataset.test=0", "dataset.validation=0.3"), marks=pytest.mark.slow),
    ],
    ids=["kept in memory", "read while training", "divided among workers", "validation"],
)
def test_a_table_s_rows_are_named_by_file_and_row_and_by_the_user_s_id(tmp_path: Path, words: tuple[str, ...]) -> None:
    write_tables(tmp_path)
    table = (
        "dataset=table",
        f"dataset.data_dir={tmp_path}/tables",
        "dataset.target=price",
        "dataset.drop=[key]",
        "model=mlp",
    )
    found = keep(tmp_path, *table, "evaluation.id=key", *words)
    assert len(found.table) == found.examples == (18 if not words or "cache" in words[0] else 27)
    rows, files, prices = found.column("row"), found.column("file"), found.column("target")
    assert {Path(file).name for file in files} == {"a.csv", "b.csv"}
    for row, file, price, key in zip(rows, files, prices, found.column("id"), strict=True):
        assert price == row - 1 + (40 if file.endswith("b.csv") else 0)
        assert key == f"key-{int(price):03}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("evaluation.id=kye",), "evaluation.id=kye: there is no such column; did you mean key?"),
        (("evaluation.id=[a]",), "evaluation.id"),
    ],
)
def test_an_unknown_id_is_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    write_tables(tmp_path)
    done = Command(tmp_path)(*TINY, "dataset=table", "dataset.data_dir=tables", "dataset.target=price", *words)
    assert done.returncode == 2
    assert message in done.stderr


def test_nothing_is_kept_with_none(tmp_path: Path) -> None:
    done = Command(tmp_path)(*TINY, "evaluation=none", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run" / "evaluation").exists()


@pytest.mark.slow
def test_other_datasets_name_their_examples(tmp_path: Path) -> None:
    for split, count in (("train", 6), ("test", 2)):
        for number, name in enumerate(("red", "green")):
            for n in range(count):
                picture(tmp_path / "photos" / split / name / f"{n}.png", plain([200 * number] * 3, 8, 8))
    for name in ("bad", "good"):
        for n in range(12):
            write(tmp_path / "reviews" / name / f"{n}.txt", f"a {name} film, number {n}")
    np.savez(tmp_path / "arrays.npz", x=np.arange(120).reshape(60, 2), y=np.arange(60) / 7)
    write(tmp_path / "corpus" / "a.txt", "to be or not to be that is the question " * 60)
    photos = keep(
        tmp_path,
        *("dataset=image_folder", "dataset.data_dir=photos", "dataset.size=[8,8]", "model=cnn", "model.filters=[4]"),
    )
    assert all(Path(f).parent.name == t for f, t in zip(photos.column("file"), photos.column("target"), strict=True))
    texts = keep(tmp_path / "1", "dataset=text_folder", "dataset.data_dir=../reviews", "model=text")
    assert all(Path(f).parent.name == t for f, t in zip(texts.column("file"), texts.column("target"), strict=True))
    arrays = keep(tmp_path / "2", "dataset=npz", "dataset.data_dir=../arrays.npz")
    assert arrays.column("row") / 7 == pytest.approx(arrays.column("target"))
    tokens = keep(
        tmp_path / "3",
        *("dataset=tokens", "dataset.data_dir=../corpus", "dataset.tokens=8", "model=gpt", "model.width=8"),
        *("model.blocks=1", "model.heads=1", "objective=language"),
    )
    assert [len(tokens.positions[""][key]) for key in ("loss", "count")] == [8, 8]
    assert sum(tokens.positions[""]["loss"]) / sum(tokens.positions[""]["count"]) == pytest.approx(
        tokens.column("loss").mean(), rel=1e-5
    )
    two = keep(tmp_path / "4", "dataset=digits_with_ink", "model=mlp")
    assert {"digit_target", "digit_prediction", "ink_target", "ink_prediction"} <= set(two.table.column_names)


# ---------------------------------------------------------------------------------------------
# Rules without a run
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "form"),
    [
        (CLASSES, "class"),
        (Outputs("classification", (21,)), "best"),
        (Outputs("binary", (1,)), "class"),
        (Outputs("multi_label", (64,)), "labels"),
        (Outputs("multi_label", (65,)), "positions"),
        (Outputs("regression", (1,)), "values"),
        (Outputs("regression", ()), "values"),
        (Outputs("regression", (8, 8, 3)), "positions"),
        (Outputs("classification", (8, 8, 3)), "positions"),
        (Outputs("classification", (16, 50_000)), "positions"),
        (Outputs("binary", (8, 8)), "positions"),
    ],
)
def test_what_is_kept_follows_from_the_output(outputs: Outputs, form: str) -> None:
    assert choose_form(outputs) == form


def draw_batch(seed: int, count: int) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(seed)
    outputs = random.normal(size=(count, 3)).astype(np.float32)
    return {"/target": random.integers(3, size=count).astype(np.int32), "/output": outputs, "weight": np.ones(count)}


def test_batches_come_in_any_order_and_from_several_processes() -> None:
    one, first, second = (PredictionCollector(CLASSES, 12) for _ in range(3))
    for n in range(3):
        one.add(np.arange(4 * n, 4 * n + 4), draw_batch(n, 4))
        (second if n == 1 else first).add(np.arange(4 * n, 4 * n + 4)[::-1], flip(draw_batch(n, 4)))
    first.merge(second.to_bytes())
    first.merge(PredictionCollector(CLASSES, 12).to_bytes())
    table = make_predictions_table(CLASSES, one)
    assert make_predictions_table(CLASSES, first) == table
    predicted = PredictionColumns({"": CLASSES}).convert({"": draw_batch(0, 4)["/output"]})
    assert table["prediction"].to_pylist()[:4] == predicted["prediction"].to_pylist()
    assert table["target"].to_pylist()[:4] == [CLASSES.names[n] for n in draw_batch(0, 4)["/target"]]  # type: ignore[index]


def flip(batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: values[::-1] for name, values in batch.items()}


def test_an_evaluation_replaces_the_one_before() -> None:
    collector = PredictionCollector(CLASSES, 4)
    for seed in (1, 2):
        collector.clear()
        collector.add(np.arange(4), draw_batch(seed, 4))
    assert make_predictions_table(CLASSES, collector)["target"].to_pylist() == [
        CLASSES.names[n]
        for n in draw_batch(2, 4)["/target"]  # type: ignore[index]
    ]


def test_of_many_examples_a_fixed_sample_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_module, "MAX_EXAMPLES", 100)
    tables = []
    for size in (50, 200):
        collector = PredictionCollector(CLASSES, 1000)
        batch = draw_batch(0, 1000)
        for first in range(0, 1000, size):
            part = {name: values[first : first + size] for name, values in batch.items()}
            collector.add(np.arange(first, first + size), part)
        tables.append(make_predictions_table(CLASSES, collector))
    assert len(tables[0]) == 100
    assert tables[0] == tables[1], "however the split is divided"
    assert draw_sample(100, 100) is None


def test_ignored_and_unknown_targets_are_missing() -> None:
    outputs = replace(CLASSES, ignore=-1)
    collector = PredictionCollector(outputs, 3)
    collector.add(np.arange(3), {"/target": np.array([2, -1, 0]), "/output": np.eye(3, dtype=np.float32)})
    table = make_predictions_table(outputs, collector)
    assert table["target"].to_pylist() == ["c", None, "a"]
    assert table["target_rank"].to_pylist()[1] is None
    assert table["prediction"].null_count == 0


def test_a_record_is_read_as_it_was_written_and_a_newer_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "predictions.parquet"
    outputs = {"kind": CLASSES, "size": Outputs("regression", (1,), scaling=(1.0, 2.0))}
    table = pyarrow.table({"example": [0, 1], "size_prediction": [0.5, 1.5]})
    written = Predictions(table, outputs, "test", 5, "abc", {"kind": {"loss": [1.0], "count": [2.0]}})
    save_predictions(path, written)
    found = load_predictions(path)
    assert replace(found, table=None) == replace(written, table=None)
    assert found.table.equals(table)
    assert found.is_sample
    assert found.column("prediction", "size").tolist() == [0.5, 1.5]
    record = json.loads(parquet.read_schema(path).metadata[METADATA])
    newer = {METADATA: json.dumps({**record, "version": 2})}
    parquet.write_table(table.replace_schema_metadata(newer), path)
    with pytest.raises(ConfigError, match="it has the version 2, and this scaleflow reads up to 1"):
        load_predictions(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_predictions(path)


# ---------------------------------------------------------------------------------------------
# What is computed in the replicas
# ---------------------------------------------------------------------------------------------


def reduce_outputs() -> list[Any]:
    import tensorflow as tf

    from scaleflow import objective

    random = np.random.default_rng(3)
    logits = random.normal(size=(4, 5, 6, 3)).astype(np.float32)
    targets = random.integers(3, size=(4, 5, 6)).astype(np.int32)
    targets[0, :2] = 255
    pixels = objective.sum_positions(
        Outputs("classification", (5, 6, 3), ignore=255), tf.constant(targets), tf.constant(logits)
    )
    tokens = objective.sum_positions(
        Outputs("classification", (6, 3)), tf.constant(targets[:, 4]), tf.constant(logits[:, 4])
    )
    values = objective.sum_positions(
        Outputs("regression", (5, 6)), tf.constant(targets, tf.float32), tf.constant(logits[..., 0])
    )
    ranks = objective.rank_classes(Outputs("classification", (3,)), tf.constant(targets[:, 4, 0]), logits[:, 4, 0])
    found = [{name: each.numpy() for name, each in part.items()} for part in (pixels, tokens, values, ranks)]
    return [logits.astype(np.float64), targets, *found]


def test_sums_over_positions_are_numpy_s(isolated: Callable[..., Any]) -> None:
    logits, targets, pixels, tokens, values, ranks = isolated(reduce_outputs)
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    is_counted = targets != 255
    valid = np.where(is_counted, targets, 0)
    losses = -np.log(np.take_along_axis(chances, valid[..., None], axis=-1)[..., 0])
    is_correct = chances.argmax(axis=-1) == valid
    count = is_counted.sum(axis=(1, 2))
    assert pixels["positions"].tolist() == count.tolist() == [18, 30, 30, 30]
    assert pixels["loss"] == pytest.approx((losses * is_counted).sum(axis=(1, 2)) / count, rel=1e-5)
    assert pixels["correct"] == pytest.approx((is_correct & is_counted).sum(axis=(1, 2)) / count)
    for n in range(3):
        assert pixels["true"][:, n].tolist() == ((valid == n) & is_counted).sum(axis=(1, 2)).tolist()
        predicted = (chances.argmax(axis=-1) == n) & is_counted
        assert pixels["predicted"][:, n].tolist() == predicted.sum(axis=(1, 2)).tolist()
        assert pixels["both"][:, n].tolist() == (predicted & (valid == n)).sum(axis=(1, 2)).tolist()
    assert tokens["losses"] == pytest.approx(losses[:, 4], rel=1e-5)
    assert "losses" not in pixels
    assert values["mean_error"] == pytest.approx(np.abs(targets - logits[..., 0]).mean(axis=(1, 2)), rel=1e-5)
    assert ranks["target_rank"].tolist() == [
        1 + int((row > row[t]).sum()) for row, t in zip(logits[:, 4, 0], targets[:, 4, 0], strict=True)
    ]
