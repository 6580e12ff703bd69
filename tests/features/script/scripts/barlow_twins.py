"""Barlow Twins: a loss of the cross-correlation of two augmented views, then a frozen encoder with a classifier."""

import numpy as np
import tensorflow as tf
from tensorflow import keras

AUTO = tf.data.AUTOTUNE
BATCH_SIZE = 32
CROP_TO = 16
SEED = 26
PROJECT_DIM = 32
EPOCHS = 2

keras.utils.set_random_seed(SEED)
rng = np.random.default_rng(SEED)
y = rng.integers(0, 5, size=256)
x = np.clip(rng.uniform(0, 255, size=(5, 1, 1, 3))[y] + rng.normal(0, 25, (256, 24, 24, 3)), 0, 255).astype("float32")


def random_view(image):
    image = tf.image.random_crop(image, (CROP_TO, CROP_TO, 3)) / 255.0
    image = tf.image.random_flip_left_right(image)
    return tf.clip_by_value(image * tf.random.uniform((3,), 0.8, 1.2), 0.0, 1.0)


def make_views(seed):
    images = tf.data.Dataset.from_tensor_slices(x).shuffle(256, seed=seed)
    return images.map(random_view).batch(BATCH_SIZE, drop_remainder=True).prefetch(AUTO)


ssl_ds = tf.data.Dataset.zip((make_views(SEED), make_views(SEED)))


def off_diagonal(matrix):
    return matrix - tf.linalg.diag(tf.linalg.diag_part(matrix))


def compute_loss(z_a, z_b, lambd):
    z_a = (z_a - tf.reduce_mean(z_a, axis=0)) / (tf.math.reduce_std(z_a, axis=0) + 1e-6)
    z_b = (z_b - tf.reduce_mean(z_b, axis=0)) / (tf.math.reduce_std(z_b, axis=0) + 1e-6)
    correlation = tf.matmul(z_a, z_b, transpose_a=True) / tf.cast(tf.shape(z_a)[0], tf.float32)
    on_diagonal = tf.reduce_sum(tf.pow(tf.linalg.diag_part(correlation) - 1, 2))
    return on_diagonal + lambd * tf.reduce_sum(tf.pow(off_diagonal(correlation), 2))


def get_encoder():
    inputs = keras.layers.Input((CROP_TO, CROP_TO, 3))
    hidden = keras.layers.Conv2D(8, 3, strides=2, padding="same", use_bias=False)(inputs)
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.ReLU()(hidden)
    hidden = keras.layers.GlobalAveragePooling2D(name="backbone_pool")(hidden)
    hidden = keras.layers.Dense(PROJECT_DIM, activation="relu")(hidden)
    return keras.Model(inputs, keras.layers.Dense(PROJECT_DIM)(hidden), name="encoder")


class BarlowTwins(keras.Model):
    """The two branches share the encoder."""

    def __init__(self, encoder, lambd=5e-3):
        super().__init__()
        self.encoder = encoder
        self.lambd = lambd
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, data):
        ds_one, ds_two = data
        with tf.GradientTape() as tape:
            z_a, z_b = self.encoder(ds_one, training=True), self.encoder(ds_two, training=True)
            loss = compute_loss(z_a, z_b, self.lambd)
        gradients = tape.gradient(loss, self.encoder.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.encoder.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


steps = EPOCHS * (256 // BATCH_SIZE)
barlow_twins = BarlowTwins(get_encoder())
barlow_twins.compile(optimizer=keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(1e-2, steps), momentum=0.9))
pretraining_history = barlow_twins.fit(ssl_ds, epochs=EPOCHS)

backbone = keras.Model(barlow_twins.encoder.input, barlow_twins.encoder.get_layer("backbone_pool").output)
backbone.trainable = False
inputs = keras.layers.Input((CROP_TO, CROP_TO, 3))
linear_model = keras.Model(inputs, keras.layers.Dense(5, activation="softmax")(backbone(inputs, training=False)))
linear_model.compile(
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
)
crops = x[:, 4:20, 4:20] / 255
linear_history = linear_model.fit(crops[:192], y[:192], validation_data=(crops[192:], y[192:]), epochs=2, verbose=2)
