"""A DataFrame as a dict of columns: StringLookup, IntegerLookup and Normalization, adapted before the model."""

import keras
import numpy as np
import pandas as pd
import tensorflow as tf
from keras import layers

BATCH_SIZE = 32

keras.utils.set_random_seed(13)
rng = np.random.default_rng(13)
count = 400
dataframe = pd.DataFrame(
    {
        "type": rng.choice(["Cat", "Dog"], count),
        "color": rng.choice(["black", "brown", "white", "golden"], count),
        "siblings": rng.integers(0, 5, count),
        "age": rng.integers(1, 60, count),
        "fee": rng.gamma(2.0, 40.0, count).round(2),
    }
)
chance = 1 / (1 + np.exp(dataframe["age"] / 20 - 1.5 + (dataframe["type"] == "Cat")))
dataframe["target"] = (rng.random(count) < chance).astype(int)
print(dataframe.head())

test = dataframe.sample(frac=0.2, random_state=13)
train = dataframe.drop(test.index)


def dataframe_to_dataset(frame, shuffle=True):
    frame = frame.copy()
    labels = frame.pop("target")
    columns = {name: values.to_numpy()[:, np.newaxis] for name, values in frame.items()}
    for name in ("type", "color"):
        columns[name] = columns[name].astype(str)
    dataset = tf.data.Dataset.from_tensor_slices((columns, labels.to_numpy()))
    if shuffle:
        dataset = dataset.shuffle(buffer_size=len(frame))
    return dataset.batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE)


train_ds = dataframe_to_dataset(train)
test_ds = dataframe_to_dataset(test, shuffle=False)

all_inputs = {}
encoded_features = []
for header in ["fee", "age"]:
    column = keras.Input(shape=(1,), name=header)
    normalization = layers.Normalization(axis=None)
    normalization.adapt(train_ds.map(lambda columns, target, name=header: columns[name]))
    all_inputs[header] = column
    encoded_features.append(normalization(column))
for header in ["type", "color"]:
    column = keras.Input(shape=(1,), name=header, dtype="string")
    lookup = layers.StringLookup(output_mode="multi_hot")
    lookup.adapt(train_ds.map(lambda columns, target, name=header: columns[name]))
    all_inputs[header] = column
    encoded_features.append(lookup(column))
column = keras.Input(shape=(1,), name="siblings", dtype="int64")
lookup = layers.IntegerLookup(max_tokens=5, output_mode="multi_hot")
lookup.adapt(train["siblings"].to_numpy())
all_inputs["siblings"] = column
encoded_features.append(lookup(column))

hidden = layers.concatenate(encoded_features)
hidden = layers.Dense(16, activation="relu")(hidden)
hidden = layers.Dropout(0.5)(hidden)
model = keras.Model(all_inputs, layers.Dense(1)(hidden))
model.compile(
    optimizer="adam",
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(train_ds, epochs=3, validation_data=test_ds)
result = model.evaluate(test_ds, return_dict=True)
print(result)

sample = {"type": "Cat", "color": "black", "siblings": 1, "age": 3, "fee": 100.0}
input_dict = {name: tf.convert_to_tensor([[value]]) for name, value in sample.items()}
print("Chance of adoption:", float(tf.sigmoid(model.predict(input_dict)[0, 0])))
