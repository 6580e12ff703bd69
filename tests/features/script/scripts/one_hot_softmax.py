"""Softmax, one-hot targets and `validation_split`: the first script of many courses."""

import numpy as np
from keras.layers import Dense, Dropout, Input
from keras.models import Sequential
from keras.utils import set_random_seed, to_categorical

NUM_CLASSES = 10
BATCH_SIZE = 32
EPOCHS = 3
UNITS = 32

set_random_seed(2)
rng = np.random.default_rng(2)
digits = rng.integers(0, NUM_CLASSES, 500)
strokes = rng.random((NUM_CLASSES, 28, 28)) > 0.8
pixels = (255 * np.clip(0.7 * strokes[digits] + 0.3 * rng.random((500, 28, 28)), 0, 1)).astype("uint8")

x_train, x_test = pixels[:400], pixels[400:]
x_train = x_train.reshape(-1, 784).astype("float32") / 255
x_test = x_test.reshape(-1, 784).astype("float32") / 255
y_train = to_categorical(digits[:400], NUM_CLASSES)
y_test = to_categorical(digits[400:], NUM_CLASSES)
print("x_train shape:", x_train.shape)
print(x_test.shape[0], "test samples")

model = Sequential()
model.add(Input((784,)))
model.add(Dense(UNITS, activation="relu"))
model.add(Dropout(0.2))
model.add(Dense(NUM_CLASSES, activation="softmax"))
model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])

history = model.fit(x_train, y_train, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=1, validation_split=0.1)
score = model.evaluate(x_test, y_test, verbose=0)
print("Test loss:", score[0])
print("Test accuracy:", score[1])
