"""Callbacks with attributes of all kinds."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf


class Tuner(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Sets the rate from what it has seen, in attributes that change in every hook."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = None
        self.seen: deque[float] = deque(maxlen=3)
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.kinds: Counter[str] = Counter()
        self.random = np.random.default_rng(0)
        self.dice = random.Random(0)
        self.seed = keras.random.SeedGenerator(3)
        self.average = tf.Variable(0.0)
        self.nested: dict[Any, Any] = {1: (2, {3.5, 4.5}), "inf": float("inf")}
        self.path = Path("a")

    def on_train_begin(self, logs: Any = None) -> None:
        self.rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        self.began = np.float32(self.rate)
        self.model.optimizer.learning_rate = self.rate

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.counts["epochs"] += 1
        self.model.optimizer.learning_rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)) * 0.9

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.counts["calls"] += 1
        self.kinds.update(["batch"])
        drawn = keras.random.uniform((), seed=self.seed) + self.random.uniform() + self.dice.random()
        self.average.assign(0.5 * (self.average + drawn))
        self.seen.append(float(self.average))
        self.weights = self.model.get_weights()[:1]
        self.nested[len(self.nested)] = [np.array(self.seen), self.path]
        self.path = self.path.with_name(str(self.counts["calls"]))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        factor = 1 + 0.1 * np.mean(self.seen) + 0.01 * self.counts["epochs"] + 0.001 * self.kinds["batch"]
        self.model.optimizer.learning_rate = float(self.began * factor)


class Holder(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Holds what no checkpoint can."""

    def __init__(self) -> None:
        super().__init__()
        self.smoother = object()
        self.function = print
        self.later = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.later = object()


def decay(epoch: int, rate: float) -> float:
    return rate * 0.8
