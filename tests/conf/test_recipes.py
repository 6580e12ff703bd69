"""Every recipe of conf/experiment, a few steps of it on small data."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conf.test_conf import EXPERIMENTS
from tests.conftest import Command
from tests.dataset import test_tfds
from tests.processes import call
from tests.training.fake_engine import ignore, make_session

SHORT = ("training.max_steps=2", "training.epochs=1", "dataset.limit=40", "tracking=none")

#: What makes each small, `{}` the folder of prepared datasets. Those that are sweeps are in `SWEEPS`.
SMALL = {
    "cifar10_mirrored": ("dataset.data_dir={}", "training.batch_size=4"),
    "custom_step": ("training.batch_size=4",),
    "digits_mirrored": ("training.batch_size=4",),
    "finetune_image": (
        *("dataset.data_dir={}/photos", "dataset.size=[32,32]", "dataset.limit=8", "training.batch_size=4"),
        "model.weights=null",
    ),
    "imdb_text": ("dataset.data_dir={}", "training.batch_size=4", "dataset.vocabulary=20", "dataset.tokens=5"),
    "gpt_bytes": (
        *("dataset.data_dir={}/text", "dataset.tokens=8", "dataset.limit=20", "training.batch_size=4"),
        *("model.width=8", "model.heads=2", "model.blocks=1"),
    ),
    "large_batch_warmup": ("training.global_batch_size=32",),
    "mnist_mlp": ("dataset.data_dir={}", "training.batch_size=4"),
    "profile_input": (
        *("dataset.data_dir={}", "training.batch_size=4"),
        *("profiler.start_step=2", "profiler.steps=2", "training.max_steps=3"),
    ),
    "multi_task": ("training.batch_size=4",),
    "segmentation": ("dataset.examples=40", "dataset.size=16", "model.filters=[2,2]", "training.batch_size=4"),
    "text_and_table": ("dataset.examples=40", "model.units=4", "training.batch_size=4"),
    "model_parallel": ("model.units=[8,8]", "training.batch_size=8", "dataset.examples=100"),
}
SEVERAL_PROCESSES = ("dlrm", "multi_worker_local", "parameter_server_async")
SWEEPS = {"gradient_accumulation": 2, "mixed_vs_float32": 2, "strategy_benchmark": 3}


def test_every_recipe_is_tried() -> None:
    assert {path.stem for path in EXPERIMENTS} == {*SMALL, *SEVERAL_PROCESSES, *SWEEPS}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets of their names, in the form of tensorflow-datasets."""
    folder = tmp_path_factory.mktemp("tfds")
    call(prepare, str(folder))
    return folder


def prepare(folder: str) -> None:
    """`cifar10` beside those that the tests of tensorflow-datasets prepare, and a text."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    def photo(i: tf.Tensor) -> Any:
        return {"image": tf.fill([32, 32, 3], tf.cast(i * 5, tf.uint8)), "label": i % 10}

    test_tfds.prepare(folder)
    for name in ("cat", "dog"):
        for i in range(8):
            photo_file = Path(folder, "photos", name, f"{i}.png")
            photo_file.parent.mkdir(parents=True, exist_ok=True)
            photo_file.write_bytes(tf.io.encode_png(tf.fill([8, 8, 3], tf.cast(i, tf.uint8))).numpy())
    Path(folder, "text").mkdir()
    Path(folder, "text", "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    kind = tfds.features
    tfds.dataset_builders.store_as_tfds_dataset(
        name="cifar10",
        version="3.0.2",
        features=kind.FeaturesDict({"image": kind.Image(shape=(32, 32, 3)), "label": kind.ClassLabel(num_classes=10)}),
        data_dir=folder,
        disable_shuffling=True,
        split_datasets={n: tf.data.Dataset.range(40).map(photo) for n in ("train", "test")},
    )
    test_tfds.supervise(Path(folder) / "cifar10" / "3.0.2" / "dataset_info.json", ["image", "label"])


def few_steps(plan: Any) -> tuple[int, list[str]]:
    from scaleflow.worker.build import build_training

    seen: set[str] = set()
    built = build_training(plan, ignore)
    session = make_session(
        plan, built, lambda event: seen.update(getattr(event, "values", ())), callbacks=built.callbacks
    )
    return session.run().steps, sorted(name for name in seen if name.endswith("/loss") and name.count("/") == 1)


@pytest.mark.parametrize("recipe", SMALL)
def test_a_recipe_trains_validates_and_tests(
    prepared: Path, isolated: Callable[..., Any], plan: Callable[..., Any], recipe: str
) -> None:
    words = [word.format(prepared) for word in SMALL[recipe]]
    chosen = plan(f"experiment={recipe}", *SHORT, *words)
    assert isolated(few_steps, chosen) == (
        chosen.training.max_steps,
        ["test/loss", "train/loss", "val/loss"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SEVERAL_PROCESSES)
def test_a_recipe_of_several_processes_runs(command: Command, recipe: str) -> None:
    ended = command(f"experiment={recipe}", *SHORT, "training.batch_size=8")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_strategies_are_benchmarked_in_turn_and_begin_with_the_same_losses(command: Command) -> None:
    fewer = ("strategy=one_device,mirrored", "sweep.repeat=2", "sweep.warm_up=0", "training.epochs=2")
    words = ("training.max_steps=6", "training.steps_per_loop=1", "dataset.examples=200", "tracking=none")
    ended = command("-m", "experiment=strategy_benchmark", *words, *fewer, "training.global_batch_size=48")
    assert ended.returncode == 0, ended.stderr
    assert re.findall(r"^#\d+ (strategy=.*)$", ended.stdout, re.M) == [
        f"strategy={strategy} (repeat {repeat})" for repeat in (1, 2) for strategy in ("one_device", "mirrored")
    ]
    (table,) = command.folder.rglob("report.csv")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert sorted((row["strategy"], row["counted"], row["first losses"]) for row in rows) == [
        ("mirrored", "2", "same"),
        ("one_device", "2", "same"),
    ]
    speeds = [float(row["perf/examples_per_second"]) for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    for row in rows:
        assert float(row["least"]) <= float(row["examples/s"]) <= float(row["most"])
    assert (table.parent / "throughput.png").exists()


@pytest.mark.parametrize("recipe", SWEEPS)
def test_a_recipe_that_is_a_sweep_says_over_what(command: Command, recipe: str) -> None:
    shown = command(f"experiment={recipe}", "--cfg", "hydra", "-p", "hydra.sweeper.params")
    assert shown.returncode == 0, shown.stderr
    (values,) = [line for line in shown.stdout.splitlines() if ":" in line and not line.startswith("#")]
    assert len(values.split(",")) == SWEEPS[recipe]
