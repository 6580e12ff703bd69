"""A network of keras.applications with a new head: freeze, fit, unfreeze, compile again, fit on."""

import keras
import numpy as np
import tensorflow as tf

IMG_SIZE = (32, 32)
INITIAL_EPOCHS = 2
FINE_TUNE_EPOCHS = 1
BASE_LEARNING_RATE = 1e-3

keras.utils.set_random_seed(22)
rng = np.random.default_rng(22)
labels = rng.integers(0, 2, size=(80, 1))
images = np.clip(90 + 70 * labels[:, :, None, None] + rng.normal(0, 40, (80, *IMG_SIZE, 3)), 0, 255).astype("float32")
train_dataset = tf.data.Dataset.from_tensor_slices((images[:64], labels[:64])).shuffle(64).batch(32)
validation_dataset = tf.data.Dataset.from_tensor_slices((images[64:], labels[64:])).batch(32)

# No weights are downloaded here. A real script has weights="imagenet".
base_model = keras.applications.MobileNet(input_shape=(*IMG_SIZE, 3), alpha=0.25, include_top=False, weights=None)
base_model.trainable = False

inputs = keras.Input(shape=(*IMG_SIZE, 3))
x = keras.applications.mobilenet.preprocess_input(inputs)
x = base_model(x, training=False)
x = keras.layers.GlobalAveragePooling2D()(x)
x = keras.layers.Dropout(0.2)(x)
outputs = keras.layers.Dense(1, activation="sigmoid")(x)
model = keras.Model(inputs, outputs)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=BASE_LEARNING_RATE),
    loss=keras.losses.BinaryCrossentropy(),
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.5, name="accuracy")],
)
history = model.fit(train_dataset, epochs=INITIAL_EPOCHS, validation_data=validation_dataset)

base_model.trainable = True
fine_tune_at = 60
for layer in base_model.layers[:fine_tune_at]:
    layer.trainable = False
model.compile(
    loss=keras.losses.BinaryCrossentropy(),
    optimizer=keras.optimizers.RMSprop(learning_rate=BASE_LEARNING_RATE / 10),
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.5, name="accuracy")],
)
history_fine = model.fit(
    train_dataset,
    epochs=INITIAL_EPOCHS + FINE_TUNE_EPOCHS,
    initial_epoch=len(history.epoch),
    validation_data=validation_dataset,
)
accuracies = history.history["val_accuracy"] + history_fine.history["val_accuracy"]
print("Validation accuracies of both phases:", accuracies)
loss, accuracy = model.evaluate(validation_dataset)
