"""The input pipeline: how fast it is alone, and how much of a step is spent waiting for it.

SingleProcess: examples per second read by a compiled loop that does nothing else, 64 batches to a call, against the
pipeline
that one would write (`from_tensor_slices().shuffle().batch()`), both over the same arrays in memory.

Files: epochs of a linear model on JPEG files of 320 x 240 pixels, decoded to 128 x 128 in every epoch, from a folder
and from TFRecords, and with flips and crops, against Keras `fit` on the tf.data lines that one would write.

Waiting: epochs of the CNN on photographs that were decoded once and kept (`dataset.cache=memory`), against epochs of
the same compiled loop whose every step takes one and the same batch, in turn, in one process. What the second is faster
by is what the first waits for.

    python -m benchmarks input image_files
    python -m benchmarks.input alone      # one contestant, as JSON
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import (
    Benchmark,
    Results,
    Row,
    WrongResultError,
    expect_accuracy,
    metric,
    row,
    run,
    run_by_hand,
    run_scaleflow,
)
from benchmarks.steps import ends_of

EXAMPLES, BATCH_SIZE, BATCHES_PER_CALL = 7 * 64 * 128, 128, 64
EPOCHS = 8

PHOTOS = 32 * BATCH_SIZE
SIDE = 32

FILES, FILE_EPOCHS, CLASSES = 16 * BATCH_SIZE, 6, 10
HEIGHT, WIDTH, RESIZED = 240, 320, 128

#: What is read, as the scripts of `by_hand/` name it, and scaleflow's words for it.
IMAGE = f"image: {{kind: image, size: [{RESIZED}, {RESIZED}]}}"
KINDS = {
    "folder": ["dataset=image_folder", f"dataset.size=[{RESIZED},{RESIZED}]"],
    "records": [
        *("dataset=tfrecord", f"dataset.features={{{IMAGE}, label: {{dtype: int64}}}}"),
        *("dataset.input=image", "dataset.target=label", f"dataset.classes={CLASSES}"),
    ],
    "augmented": [
        *("dataset=image_folder", f"dataset.size=[{RESIZED},{RESIZED}]"),
        "dataset.augment={flip: true, crop: 4}",
    ],
}
ASKED = {"folder": 1.0, "records": 1.0, "augmented": 0.95}

#: Of the last epoch; a mirrored bar is another class's.
LEAST_ACCURACY = {"folder": 0.5, "records": 0.5, "augmented": 0.3}


def benchmark() -> Benchmark:
    """Two rows: the pipeline alone, and the step without waiting against the step with it."""
    return Benchmark({"scaleflow": ours, "tf.data": by_hand, "not waiting": not_waiting}, rows)


def rows(results: Results) -> list[Row]:
    alone, by_hand, shares = results.values()
    work, against = "input alone, in memory, examples/s", "from_tensor_slices().shuffle().batch()"
    waits = Row("cnn on kept photographs, steps/s", "the same batch every step", shares, "", "", at_least=0.95)
    return [row(work, against, alone, by_hand, "/s", at_least=1.5), waits]


def files() -> Benchmark:
    """A row for each kind of file: scaleflow against Keras `fit`."""
    contestants = {}
    for kind in KINDS:
        contestants[f"scaleflow, {kind}"] = functools.partial(train_on_files, kind)
        contestants[f"fit, {kind}"] = functools.partial(fit_files, kind)
    return Benchmark(contestants, rows_of_files, write_files)


def rows_of_files(results: Results) -> list[Row]:
    return [
        row(
            f"JPEG files, {kind}, examples/s",
            "Keras fit on tf.data by hand",
            results[f"scaleflow, {kind}"],
            results[f"fit, {kind}"],
            "/s",
            at_least=least,
        )
        for kind, least in ASKED.items()
    ]


def train_on_files(kind: str, folder: Path) -> float:
    words = [
        *KINDS[kind],
        *(f"dataset.data_dir={folder / 'photos'}", "dataset.cache=none", "dataset.validation=null", "model=linear"),
        *(f"training.batch_size={BATCH_SIZE}", f"training.epochs={FILE_EPOCHS}", "strategy=one_device"),
        *("checkpoint=none", "hardware=cpu"),
    ]
    events, _ = run_scaleflow(words, folder)
    expect_accuracy(f"scaleflow, {kind}", metric(events, "train/accuracy")[-1], LEAST_ACCURACY[kind])
    ends = ends_of(events)
    return FILES / statistics.median(b - a for a, b in itertools.pairwise(ends))


def fit_files(kind: str, folder: Path) -> float:
    options = ["--data-dir", str(folder / "photos"), "--epochs", str(FILE_EPOCHS), "--batch-size", str(BATCH_SIZE)]
    found, _ = run_by_hand("images.py", [kind, *options], folder)
    expect_accuracy(f"fit, {kind}", found["accuracy"], LEAST_ACCURACY[kind])
    return float(found["examples_per_second"])


def write_files(folder: Path) -> None:
    """Writes the photographs as files of class folders, and as TFRecords."""
    run(["-m", "benchmarks.input", "write", folder / "photos"], folder)


def not_waiting(folder: Path) -> float:
    """The share of a step that is not spent waiting for its batch."""
    return 1 - float(said("waiting", folder)["share"])


def by_hand(folder: Path) -> float:
    options = ["mlp", "--examples", str(EXAMPLES), "--epochs", str(EPOCHS), "--batch-size", str(BATCH_SIZE)]
    found, _ = run_by_hand("input.py", options, folder)
    expect_right("tf.data", found)
    return float(found["examples_per_second"])


def ours(folder: Path) -> float:
    found = said("alone", folder)
    expect_right("scaleflow", found)
    return float(found["examples_per_second"])


def said(name: str, folder: Path) -> dict[str, Any]:
    """What a process of this module's prints."""
    output, _ = run(["-m", "benchmarks.input", name], folder)
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


def expect_right(who: str, found: dict[str, Any]) -> None:
    if not found["right"]:
        raise WrongResultError(f"{who} did not read every example once in an epoch")


# ---------------------------------------------------------------------------------------------
# What runs in a process of its own
# ---------------------------------------------------------------------------------------------


def alone() -> dict[str, Any]:
    """Reads epochs with a compiled loop that does nothing else."""
    sys.path.insert(0, str(Path(__file__).parent / "by_hand"))
    import tensorflow as tf
    from data import synthetic

    from scaleflow import dataset
    from scaleflow.interfaces import Arrays, Batching

    x, y = synthetic(EXAMPLES, (28, 28, 1))
    feed = dataset.make_feed(Arrays(x, y), Batching(BATCH_SIZE, 1, 1), tf.distribute.get_strategy(), 0)
    nothing = tf.constant(0, tf.int64)

    @tf.function
    def read(opened: Any, epoch: tf.Tensor, first: tf.Tensor) -> Any:
        total, largest = tf.constant(0), tf.constant(0.0)
        for step in tf.range(first, first + BATCHES_PER_CALL):
            inputs, targets, _ = feed.micro_batch(feed.fetch(opened), epoch, step, nothing, nothing)
            total += tf.reduce_sum(targets)
            largest = tf.maximum(largest, tf.reduce_max(inputs[:, 0, 0, 0]))
        return total, largest

    rates, sums = [], []
    for epoch in range(EPOCHS):
        begin = time.perf_counter()
        opened = feed.open(epoch, 0)
        firsts = range(0, feed.batching.steps(EXAMPLES), BATCHES_PER_CALL)
        sums.append(sum(int(read(opened, tf.constant(epoch, tf.int64), tf.constant(f, tf.int64))[0]) for f in firsts))
        rates.append(EXAMPLES / (time.perf_counter() - begin))
    return {"examples_per_second": statistics.median(rates[1:]), "right": set(sums) == {int(y.sum())}}


class Photos:
    """Coloured noise as PNG files in memory, decoded late."""

    def __init__(self) -> None:
        from scaleflow.interfaces import Inputs, Outputs

        self.inputs = Inputs((SIDE, SIDE, 3), "uint8", scale=1 / 255)
        self.outputs = Outputs("classification", (10,))
        self.splits = ("train",)

    def load(self, split: str) -> Any:
        import tensorflow as tf

        from scaleflow.interfaces import Stream

        random = np.random.default_rng(0)
        labels = random.integers(10, size=PHOTOS).astype(np.int32)
        noise = random.integers(0, 20, (PHOTOS, SIDE, SIDE, 3))
        photos = (noise + 20 * labels[:, None, None, None]).astype(np.uint8)
        files = [tf.io.encode_png(photo).numpy() for photo in photos]

        def decode(file: tf.Tensor, label: tf.Tensor) -> Any:
            return tf.ensure_shape(tf.io.decode_png(file, 3), (SIDE, SIDE, 3)), label

        return Stream(tf.data.Dataset.from_tensor_slices((files, labels)), PHOTOS, decode)


class Still:
    """A feed that gives one batch again and again."""

    def __init__(self, feed: Any, batch: Any) -> None:
        self.examples, self.batching, self.ahead = feed.examples, feed.batching, False
        self._batch = batch

    def open(self, epoch: int, step: int) -> Any:
        return self._batch

    def fetch(self, opened: Any) -> Any:
        return opened

    def micro_batch(self, fetched: Any, *_: Any, **position: Any) -> Any:
        return fetched


def waiting() -> dict[str, Any]:
    """The share of a step that is spent waiting for its batch."""
    import tensorflow as tf
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    from scaleflow.config.compose import ComposedConfig
    from scaleflow.launcher.prepare import make_plan
    from scaleflow.worker.build import build_training

    words = (
        *("dataset._target_=benchmarks.input.Photos", "dataset.cache=memory", "dataset.validation=null"),
        *("model=cnn", "model.padding=valid", f"training.batch_size={BATCH_SIZE}", "tracking=none"),
        *("strategy=one_device", "hardware=cpu"),
    )
    with initialize_config_module("scaleflow.conf", version_base="1.3"):
        config = OmegaConf.to_container(compose("config", overrides=list(words)), resolve=True)
    built = build_training(make_plan(ComposedConfig(config)), lambda event, **fields: None)  # type: ignore[arg-type]
    loop: Any = built.engine
    steps = built.feeds.train.batching.steps(built.feeds.train.examples)
    one = next(iter(built.feeds.train.batches(1, 1)))
    feeds = {"fed": built.feeds.train, "still": Still(built.feeds.train, tuple(map(tf.identity, one)))}
    seconds: dict[str, list[float]] = {name: [] for name in feeds}
    losses = []
    for epoch in range(EPOCHS):
        for name, feed in feeds.items():
            loop.start_epoch()
            begin = time.perf_counter()
            means = loop.train(feed, feed.open(epoch, 0), epoch, 0, steps, 0)
            seconds[name].append(time.perf_counter() - begin)
            losses += [means["loss"]] if name == "fed" else []
    if not losses[-1] < losses[0]:
        raise WrongResultError(f"the loss went from {losses[0]} to {losses[-1]}")
    fed, still = (statistics.median(seconds[name][1:]) for name in ("fed", "still"))
    return {"share": 1 - still / fed}


def write(folder: Path) -> dict[str, Any]:
    """Writes smooth coloured noise, with a bright bar for the class, as JPEG files and as TFRecords of them."""
    import tensorflow as tf

    def feature(value: bytes | int) -> Any:
        if isinstance(value, int):
            return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))

    random = np.random.default_rng(0)
    for label in range(CLASSES):
        (folder / "train" / f"c{label}").mkdir(parents=True)
    shards = [tf.io.TFRecordWriter(str(folder / f"train-{shard}.tfrecord")) for shard in range(8)]
    for number in range(FILES):
        label = number % CLASSES
        coarse = random.integers(0, 160, (HEIGHT // 8, WIDTH // 8, 3)).astype(np.float32)
        photo = tf.image.resize(coarse, [HEIGHT, WIDTH], "bicubic").numpy() + random.normal(0, 8, (HEIGHT, WIDTH, 1))
        photo[:, label * WIDTH // CLASSES : (label + 1) * WIDTH // CLASSES] += 64
        encoded = tf.io.encode_jpeg(np.clip(photo, 0, 255).astype(np.uint8), quality=90).numpy()
        (folder / "train" / f"c{label}" / f"{number:05}.jpg").write_bytes(encoded)
        example = {"image": feature(encoded), "label": feature(label)}
        shards[number % len(shards)].write(
            tf.train.Example(features=tf.train.Features(feature=example)).SerializeToString()
        )
    for shard in shards:
        shard.close()
    return {"files": FILES}


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    print(json.dumps({"alone": alone, "waiting": waiting, "write": write}[name](*map(Path, arguments))))
