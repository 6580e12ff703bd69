"""Images in a folder a class: `image_dataset_from_directory`, with augmentation in `map`."""

import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

IMAGE_SIZE = (32, 32)
BATCH_SIZE = 16
SEED = 1337

keras.utils.set_random_seed(SEED)


def write_images(folder):
    rng = np.random.default_rng(SEED)
    for name, color in {"cat": (200, 120, 60), "dog": (60, 120, 200)}.items():
        (folder / name).mkdir(parents=True)
        for number in range(60):
            pixels = np.clip(rng.normal(color, 50, size=(40, 36, 3)), 0, 255).astype("uint8")
            keras.utils.save_img(folder / name / f"{number:03d}.png", pixels)


data_folder = Path(tempfile.mkdtemp()) / "PetImages"
write_images(data_folder)

train_ds, val_ds = keras.utils.image_dataset_from_directory(
    data_folder,
    validation_split=0.2,
    subset="both",
    seed=SEED,
    image_size=IMAGE_SIZE,
    batch_size=BATCH_SIZE,
)
print("Classes:", train_ds.class_names)

data_augmentation = [layers.RandomFlip("horizontal"), layers.RandomRotation(0.1)]


def augment(images):
    for layer in data_augmentation:
        images = layer(images)
    return images


# With parallel calls, the random changes would go to other batches in each run.
train_ds = train_ds.map(lambda images, labels: (augment(images), labels))
train_ds = train_ds.prefetch(tf.data.AUTOTUNE)
val_ds = val_ds.prefetch(tf.data.AUTOTUNE)


def make_model(input_shape):
    inputs = keras.Input(shape=input_shape)
    hidden = layers.Rescaling(1.0 / 255)(inputs)
    hidden = layers.Conv2D(8, 3, strides=2, padding="same")(hidden)
    hidden = layers.BatchNormalization()(hidden)
    hidden = layers.Activation("relu")(hidden)
    residual = layers.Conv2D(16, 1, strides=2, padding="same")(hidden)
    hidden = layers.SeparableConv2D(16, 3, padding="same")(hidden)
    hidden = layers.MaxPooling2D(3, strides=2, padding="same")(hidden)
    hidden = layers.add([hidden, residual])
    hidden = layers.GlobalAveragePooling2D()(hidden)
    hidden = layers.Dropout(0.25)(hidden)
    return keras.Model(inputs, layers.Dense(1)(hidden))


model = make_model(input_shape=(*IMAGE_SIZE, 3))
model.compile(
    optimizer=keras.optimizers.Adam(3e-3),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(name="acc")],
)
history = model.fit(
    train_ds,
    epochs=2,
    callbacks=[keras.callbacks.ModelCheckpoint("save_at_{epoch}.keras")],
    validation_data=val_ds,
)

img = keras.utils.load_img(data_folder / "cat" / "000.png", target_size=IMAGE_SIZE)
score = float(keras.ops.sigmoid(model.predict(np.expand_dims(keras.utils.img_to_array(img), 0))[0][0]))
print(f"This image is {100 * (1 - score):.2f}% cat and {100 * score:.2f}% dog.")
