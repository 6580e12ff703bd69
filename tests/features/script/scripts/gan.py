"""A GAN with two optimizers in one `train_step`, and a callback that saves generated images."""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

LATENT_DIM = 16
EPOCHS = 2
BATCH_SIZE = 32

keras.utils.set_random_seed(27)

discriminator = keras.Sequential(
    [
        keras.Input(shape=(16, 16, 1)),
        layers.Conv2D(8, 4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Flatten(),
        layers.Dropout(0.2),
        layers.Dense(1, activation="sigmoid"),
    ],
    name="discriminator",
)
generator = keras.Sequential(
    [
        keras.Input(shape=(LATENT_DIM,)),
        layers.Dense(4 * 4 * 8),
        layers.Reshape((4, 4, 8)),
        layers.Conv2DTranspose(8, 4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Conv2DTranspose(8, 4, strides=2, padding="same"),
        layers.Conv2D(1, 5, padding="same", activation="sigmoid"),
    ],
    name="generator",
)


class GAN(keras.Model):
    """The two networks and their losses."""

    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real_images):
        batch_size = tf.shape(real_images)[0]
        noise = keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)
        generated_images = self.generator(noise)
        combined_images = tf.concat([generated_images, real_images], axis=0)
        labels = tf.concat([tf.ones((batch_size, 1)), tf.zeros((batch_size, 1))], axis=0)
        labels += 0.05 * tf.random.uniform(tf.shape(labels))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(combined_images)
            d_loss = self.loss_fn(labels, predictions)
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights, strict=True))

        noise = keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)
        misleading_labels = tf.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(misleading_labels, predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))

        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


class GANMonitor(keras.callbacks.Callback):
    """Saves a few generated images after each epoch."""

    def __init__(self, num_img=2, latent_dim=16):
        super().__init__()
        self.num_img = num_img
        self.latent_dim = latent_dim
        self.seed_generator = keras.random.SeedGenerator(42)
        self.folder = Path("generated")
        self.folder.mkdir(exist_ok=True)

    def on_epoch_end(self, epoch, logs=None):
        noise = keras.random.normal(shape=(self.num_img, self.latent_dim), seed=self.seed_generator)
        for number, image in enumerate((self.model.generator(noise) * 255).numpy()):
            keras.utils.array_to_img(image).save(self.folder / f"generated_{number:03d}_{epoch}.png")


rng = np.random.default_rng(27)
real_images = np.zeros((192, 16, 16, 1), dtype="float32")
for image in real_images:
    row, column = rng.integers(0, 8, size=2)
    image[row : row + 8, column : column + 8] = rng.uniform(0.6, 1.0)
dataset = tf.data.Dataset.from_tensor_slices(real_images).shuffle(buffer_size=192).batch(BATCH_SIZE)

gan = GAN(discriminator=discriminator, generator=generator, latent_dim=LATENT_DIM)
gan.compile(
    d_optimizer=keras.optimizers.Adam(learning_rate=0.0003),
    g_optimizer=keras.optimizers.Adam(learning_rate=0.0003),
    loss_fn=keras.losses.BinaryCrossentropy(),
)
history = gan.fit(dataset, epochs=EPOCHS, callbacks=[GANMonitor(num_img=2, latent_dim=LATENT_DIM)])
