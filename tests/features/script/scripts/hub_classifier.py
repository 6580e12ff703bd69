"""A KerasHub task on strings: a small BERT classifier with a vocabulary of its own, no preset."""

import keras
import keras_hub
import numpy as np

keras.utils.set_random_seed(23)

FEATURES = ["the", "quick", "brown", "fox", "jumped", "slow", "lazy", "dog", "slept", "."]
VOCABULARY = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", *FEATURES]

rng = np.random.default_rng(23)
labels = rng.integers(0, 2, size=160)
texts = []
for label in labels:
    words = ["quick", "fox", "jumped"] if label else ["slow", "dog", "slept"]
    texts.append(" ".join(["the", *rng.permutation(words), "brown", "."]))

tokenizer = keras_hub.models.BertTokenizer(vocabulary=VOCABULARY)
preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer=tokenizer, sequence_length=12)
backbone = keras_hub.models.BertBackbone(
    vocabulary_size=len(VOCABULARY),
    num_layers=1,
    num_heads=2,
    hidden_dim=16,
    intermediate_dim=32,
    max_sequence_length=12,
)
classifier = keras_hub.models.BertTextClassifier(backbone=backbone, preprocessor=preprocessor, num_classes=2)
classifier.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=keras.optimizers.Adam(5e-3),
    metrics=["accuracy"],
)
history = classifier.fit(
    x=texts[:128], y=labels[:128], batch_size=16, epochs=2, validation_data=(texts[128:], labels[128:])
)
print(classifier.predict(["the quick brown fox jumped ."]))
