"""Texts in a folder a class: `text_dataset_from_directory`, `adapt`, and a model with convolutions."""

import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

batch_size = 32
max_features = 300
embedding_dim = 16
sequence_length = 24

keras.utils.set_random_seed(6)


def write_texts(folder):
    rng = np.random.default_rng(6)
    words = [f"word{number}" for number in range(100)]
    for split, count in {"train": 150, "test": 40}.items():
        for label, sign in {"pos": "wonderful", "neg": "terrible"}.items():
            (folder / split / label).mkdir(parents=True)
            for number in range(count):
                text = [*rng.choice(words, size=rng.integers(8, 20)), sign]
                rng.shuffle(text)
                (folder / split / label / f"{number}.txt").write_text(" ".join(text) + ".")


root = Path(tempfile.mkdtemp())
write_texts(root)
raw_train_ds = keras.utils.text_dataset_from_directory(
    root / "train", batch_size=batch_size, validation_split=0.2, subset="training", seed=1337
)
raw_val_ds = keras.utils.text_dataset_from_directory(
    root / "train", batch_size=batch_size, validation_split=0.2, subset="validation", seed=1337
)
raw_test_ds = keras.utils.text_dataset_from_directory(root / "test", batch_size=batch_size)

vectorize_layer = layers.TextVectorization(
    max_tokens=max_features, output_mode="int", output_sequence_length=sequence_length
)
vectorize_layer.adapt(raw_train_ds.map(lambda text, label: text))


def vectorize_text(text, label):
    return vectorize_layer(tf.expand_dims(text, -1)), label


train_ds = raw_train_ds.map(vectorize_text).cache().prefetch(buffer_size=10)
val_ds = raw_val_ds.map(vectorize_text).cache().prefetch(buffer_size=10)
test_ds = raw_test_ds.map(vectorize_text).cache().prefetch(buffer_size=10)

inputs = keras.Input(shape=(None,), dtype="int64")
hidden = layers.Embedding(max_features, embedding_dim)(inputs)
hidden = layers.Dropout(0.5)(hidden)
hidden = layers.Conv1D(16, 3, padding="valid", activation="relu")(hidden)
hidden = layers.GlobalMaxPooling1D()(hidden)
hidden = layers.Dense(16, activation="relu")(hidden)
predictions = layers.Dense(1, activation="sigmoid", name="predictions")(hidden)
model = keras.Model(inputs, predictions)
model.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])

history = model.fit(train_ds, validation_data=val_ds, epochs=3)
model.evaluate(test_ds)

string_inputs = keras.Input(shape=(1,), dtype="string")
end_to_end_model = keras.Model(string_inputs, model(vectorize_layer(string_inputs)))
end_to_end_model.compile(loss="binary_crossentropy", optimizer="adam", metrics=["accuracy"])
end_to_end_model.evaluate(raw_test_ds.map(lambda text, label: (tf.expand_dims(text, -1), label)))
