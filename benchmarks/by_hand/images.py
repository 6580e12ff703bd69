"""A linear model on JPEG files or TFRecords of them by Keras `fit`, decoded in each epoch by the usual tf.data lines.

python images.py folder --data-dir photos --epochs 4
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import keras
import tensorflow as tf

SIDE, CLASSES = 128, 10


class EpochEnds(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.ends = []

    def on_epoch_end(self, epoch, logs=None):
        self.ends.append(time.perf_counter())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("folder", "records", "augmented"))
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()

    keras.utils.set_random_seed(0)
    dataset, count = records(args.data_dir) if args.kind == "records" else folder(args.data_dir)
    dataset = dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    if args.kind == "augmented":
        dataset = dataset.map(augment, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.batch(args.batch_size).prefetch(tf.data.AUTOTUNE)
    model = keras.Sequential(
        [keras.Input((SIDE, SIDE, 3)), keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(10)]
    )
    model.compile(
        keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    times = EpochEnds()
    history = model.fit(dataset, epochs=args.epochs, callbacks=[times], verbose=0)
    # The first epoch compiles.
    rate = count / statistics.median(b - a for a, b in itertools.pairwise(times.ends))
    print(json.dumps({"examples_per_second": rate, "accuracy": history.history["accuracy"][-1]}))


def folder(data_dir):
    files = sorted(map(str, (data_dir / "train").glob("*/*.jpg")))
    labels = [int(Path(name).parent.name[1:]) for name in files]
    dataset = tf.data.Dataset.from_tensor_slices((files, labels)).shuffle(len(files))
    return dataset.map(lambda path, label: (tf.io.read_file(path), label), num_parallel_calls=tf.data.AUTOTUNE), len(
        files
    )


def records(data_dir):
    names = sorted(map(str, data_dir.glob("train*.tfrecord")))
    count = sum(1 for _ in tf.data.TFRecordDataset(names))
    spec = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    def parse(record):
        parsed = tf.io.parse_single_example(record, spec)
        return parsed["image"], tf.cast(parsed["label"], tf.int32)

    dataset = tf.data.TFRecordDataset(names, num_parallel_reads=tf.data.AUTOTUNE).shuffle(count)
    return dataset.map(parse, num_parallel_calls=tf.data.AUTOTUNE), count


def decode(encoded, label):
    return tf.image.resize(tf.io.decode_jpeg(encoded, 3), [SIDE, SIDE]), label


def augment(image, label):
    image = tf.image.random_flip_left_right(image)
    padded = tf.pad(image, [[4, 4], [4, 4], [0, 0]])
    return tf.image.random_crop(padded, [SIDE, SIDE, 3]), label


if __name__ == "__main__":
    main()
