"""Three inputs and two outputs as dicts, with `loss_weights`: support tickets with a priority and a department."""

import keras
import numpy as np
from keras import layers

NUM_TAGS = 12
NUM_WORDS = 200
NUM_DEPARTMENTS = 4

keras.utils.set_random_seed(15)

title_input = keras.Input(shape=(None,), name="title")
body_input = keras.Input(shape=(None,), name="body")
tags_input = keras.Input(shape=(NUM_TAGS,), name="tags")
title_features = layers.LSTM(8)(layers.Embedding(NUM_WORDS, 8)(title_input))
body_features = layers.LSTM(4)(layers.Embedding(NUM_WORDS, 8)(body_input))
together = layers.concatenate([title_features, body_features, tags_input])
priority_pred = layers.Dense(1, name="priority")(together)
department_pred = layers.Dense(NUM_DEPARTMENTS, name="department")(together)
model = keras.Model(
    inputs=[title_input, body_input, tags_input],
    outputs={"priority": priority_pred, "department": department_pred},
)
model.compile(
    optimizer=keras.optimizers.RMSprop(1e-3),
    loss={
        "priority": keras.losses.BinaryCrossentropy(from_logits=True),
        "department": keras.losses.CategoricalCrossentropy(from_logits=True),
    },
    metrics={"priority": ["mae"], "department": ["accuracy"]},
    loss_weights={"priority": 1.0, "department": 0.2},
)

rng = np.random.default_rng(15)
title_data = rng.integers(NUM_WORDS, size=(256, 6))
body_data = rng.integers(NUM_WORDS, size=(256, 12))
tags_data = rng.integers(2, size=(256, NUM_TAGS)).astype("float32")
priority_targets = tags_data[:, :1]
dept_targets = keras.utils.to_categorical(tags_data[:, 1:4].sum(axis=1), NUM_DEPARTMENTS)

history = model.fit(
    {"title": title_data, "body": body_data, "tags": tags_data},
    {"priority": priority_targets, "department": dept_targets},
    epochs=2,
    batch_size=32,
    validation_split=0.25,
)
