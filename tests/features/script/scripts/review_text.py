"""Reviews as text: TextVectorization adapted to the training split, an embedding and a logit."""

import random
import re
import string

import tensorflow as tf
from tensorflow.keras import layers, losses

SEED = 42
MAX_FEATURES = 500
SEQUENCE_LENGTH = 20
EMBEDDING_DIM = 16

tf.keras.utils.set_random_seed(SEED)

GOOD = ["great", "lovely", "superb", "moving", "funny"]
BAD = ["boring", "awful", "weak", "tedious", "flat"]
OTHER = ["the", "film", "plot", "actor", "was", "<br />", "and", "scene", "Music!", "long"]


def write_review(positive):
    words = random.choices(OTHER, k=12) + random.choices(GOOD if positive else BAD, k=2)
    random.shuffle(words)
    return " ".join(words)


labels = [random.randint(0, 1) for _ in range(400)]
reviews = [write_review(label) for label in labels]
raw_train_ds = tf.data.Dataset.from_tensor_slices((reviews[:320], labels[:320])).batch(32)
raw_test_ds = tf.data.Dataset.from_tensor_slices((reviews[320:], labels[320:])).batch(32)


@tf.keras.utils.register_keras_serializable()
def custom_standardization(text):
    lowercase = tf.strings.lower(text)
    stripped_html = tf.strings.regex_replace(lowercase, "<br />", " ")
    return tf.strings.regex_replace(stripped_html, f"[{re.escape(string.punctuation)}]", "")


vectorize_layer = layers.TextVectorization(
    standardize=custom_standardization,
    max_tokens=MAX_FEATURES,
    output_mode="int",
    output_sequence_length=SEQUENCE_LENGTH,
)
vectorize_layer.adapt(raw_train_ds.map(lambda text, label: text))
print("Vocabulary size:", len(vectorize_layer.get_vocabulary()))

train_ds = raw_train_ds.map(lambda text, label: (vectorize_layer(text), label)).cache().prefetch(tf.data.AUTOTUNE)
test_ds = raw_test_ds.map(lambda text, label: (vectorize_layer(text), label)).cache().prefetch(tf.data.AUTOTUNE)

model = tf.keras.Sequential(
    [
        layers.Embedding(MAX_FEATURES, EMBEDDING_DIM),
        layers.Dropout(0.2),
        layers.GlobalAveragePooling1D(),
        layers.Dropout(0.2),
        layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(
    loss=losses.BinaryCrossentropy(),
    optimizer="adam",
    metrics=[tf.metrics.BinaryAccuracy(threshold=0.5)],
)
history = model.fit(train_ds, validation_data=test_ds, epochs=3)
loss, accuracy = model.evaluate(test_ds)

export_model = tf.keras.Sequential([tf.keras.Input((1,), dtype="string"), vectorize_layer, model])
examples = tf.constant([["The film was great and funny!"], ["boring plot, awful actor"]])
print(export_model.predict(examples))
