"""A PyDataset that loads its batches from files and shuffles after each epoch."""

import math
import tempfile
from pathlib import Path

import keras
import numpy as np

keras.utils.set_random_seed(12)


class FileSequence(keras.utils.PyDataset):
    """Batches of arrays that were saved one by one."""

    def __init__(self, paths, labels, batch_size, shuffle=False, **kwargs):
        super().__init__(**kwargs)
        self.paths = np.array(paths)
        self.labels = np.array(labels)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.random = np.random.default_rng(12)

    def __len__(self):
        return math.ceil(len(self.paths) / self.batch_size)

    def __getitem__(self, index):
        low = index * self.batch_size
        high = min(low + self.batch_size, len(self.paths))
        features = np.stack([np.load(path) for path in self.paths[low:high]])
        return features, self.labels[low:high]

    def on_epoch_end(self):
        if not self.shuffle:
            return
        order = self.random.permutation(len(self.paths))
        self.paths = self.paths[order]
        self.labels = self.labels[order]


folder = Path(tempfile.mkdtemp())
rng = np.random.default_rng(12)
labels = rng.integers(0, 3, size=240)
paths = []
for number, label in enumerate(labels):
    path = folder / f"{number}.npy"
    np.save(path, (rng.normal(size=(10, 10)) + label).astype("float32"))
    paths.append(str(path))

training_generator = FileSequence(paths[:200], labels[:200], batch_size=32, shuffle=True, workers=2)
validation_generator = FileSequence(paths[200:], labels[200:], batch_size=32)

model = keras.Sequential(
    [
        keras.Input((10, 10)),
        keras.layers.Flatten(),
        keras.layers.Dense(12, activation="relu"),
        keras.layers.Dense(3, activation="softmax"),
    ]
)
model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(training_generator, validation_data=validation_generator, epochs=3)
