"""Every recipe of conf/experiment, a few steps of it on small data."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conf.test_conf import EXPERIMENTS
from tests.conftest import Command, make_once
from tests.dataset import test_tfds
from tests.processes import call
from tests.training.fake_engine import ignore, make_session

SHORT = ("training.max_steps=2", "training.epochs=1", "dataset.limit=40", "tracking=none", "evaluation=none")

#: What makes each small, `{}` the folder of prepared datasets. Those that are sweeps are in `SWEEPS`.
SMALL = {
    "cifar10_mirrored": ("dataset.data_dir={}", "training.batch_size=4"),
    "custom_step": ("training.batch_size=4",),
    "deliver": ("tracking=mlflow", "training.batch_size=4"),
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
ON_TWO_DEVICES = ("cifar10_mirrored", "custom_step", "digits_mirrored", "model_parallel")
SEVERAL_PROCESSES = {
    "dlrm": (),
    "multi_worker_local": ("model.units=[8]",),
    "parameter_server_async": (),
}
SWEEPS = {"gradient_accumulation": 2, "mixed_vs_float32": 2, "strategy_benchmark": 3}


def test_every_recipe_is_tried() -> None:
    assert {path.stem for path in EXPERIMENTS} == {*SMALL, *SEVERAL_PROCESSES, *SWEEPS}


@pytest.fixture
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets of their names, in the form of tensorflow-datasets."""
    return make_once(tmp_path_factory, "recipes", lambda folder: call(prepare, str(folder)))[0]


def prepare(folder: str) -> None:
    """`cifar10` beside two that the tests of tensorflow-datasets prepare, photos and a text."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    def photo(i: tf.Tensor) -> Any:
        return {"image": tf.fill([32, 32, 3], tf.cast(i * 5, tf.uint8)), "label": i % 10}

    test_tfds.prepare(folder, ["mnist/3.0.1", "imdb_reviews/plain_text/1.0.0"])
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


def few_steps(plans: dict[str, Any]) -> dict[str, tuple[int, list[str]]]:
    """Of each recipe how many steps it took, and the losses that were measured."""
    from scaleflow.worker.build import build_training

    found = {}
    for recipe, plan in plans.items():
        seen: set[str] = set()

        def collect(event: Any, seen: set[str] = seen) -> None:
            seen.update(getattr(event, "values", ()))

        built = build_training(plan, ignore)
        session = make_session(plan, built, collect, callbacks=built.callbacks)
        losses = session.run().steps, sorted(n for n in seen if n.endswith("/loss") and n.count("/") == 1)
        found[recipe] = losses
    return found


#: Recipes that share a process: those that set up no devices.
ON_ONE_DEVICE = [recipe for recipe in SMALL if recipe not in ON_TWO_DEVICES]


@pytest.mark.parametrize(
    "recipes", [[recipe] for recipe in ON_TWO_DEVICES] + [ON_ONE_DEVICE], ids=[*ON_TWO_DEVICES, "on one device"]
)
def test_a_recipe_trains_validates_and_tests(
    request: pytest.FixtureRequest, isolated: Callable[..., Any], plan: Callable[..., Any], recipes: list[str]
) -> None:
    needs_data = any("{}" in word for recipe in recipes for word in SMALL[recipe])
    folder = request.getfixturevalue("prepared") if needs_data else None
    plans = {
        recipe: plan(f"experiment={recipe}", *SHORT, *(word.format(folder) for word in SMALL[recipe]))
        for recipe in recipes
    }
    assert isolated(few_steps, plans, timeout=480) == {
        recipe: (chosen.training.max_steps, ["test/loss", "train/loss", "val/loss"]) for recipe, chosen in plans.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SEVERAL_PROCESSES)
def test_a_recipe_of_several_processes_runs(command: Command, recipe: str) -> None:
    ended = command(f"experiment={recipe}", *SHORT, "training.batch_size=8", *SEVERAL_PROCESSES[recipe])
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_strategies_are_benchmarked_in_turn_and_begin_with_the_same_losses(command: Command) -> None:
    fewer = ("strategy=one_device,mirrored", "sweep.repeat=2", "sweep.warm_up=0", "training.epochs=2")
    words = ("training.max_steps=6", "training.steps_per_loop=1", "tracking=none")
    words += ("dataset.shape=[8,8,1]", "dataset.examples=200", "model.filters=[4]", "model.units=8")
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
    assert (table.parent / "throughput.svg").exists()


@pytest.mark.parametrize("recipe", SWEEPS)
def test_a_recipe_that_is_a_sweep_says_over_what(command: Command, recipe: str) -> None:
    shown = command(f"experiment={recipe}", "--cfg", "hydra", "-p", "hydra.sweeper.params")
    assert shown.returncode == 0, shown.stderr
    (values,) = [line for line in shown.stdout.splitlines() if ":" in line and not line.startswith("#")]
    assert len(values.split(",")) == SWEEPS[recipe]
