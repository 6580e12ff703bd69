"""A denoising autoencoder that is a subclass of Model: inputs are targets too."""

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers, losses
from tensorflow.keras.models import Model

LATENT_DIM = 16
tf.keras.utils.set_random_seed(24)

rng = np.random.default_rng(24)
rows = rng.random((400, 28, 1)) > 0.6
images = (rows * rng.uniform(0.5, 1.0, (400, 1, 28))).astype("float32")
x_train, x_test = images[:320], images[320:]
x_train_noisy = tf.clip_by_value(x_train + 0.2 * tf.random.normal(shape=x_train.shape), 0.0, 1.0)
x_test_noisy = tf.clip_by_value(x_test + 0.2 * tf.random.normal(shape=x_test.shape), 0.0, 1.0)


class Autoencoder(Model):
    """Encoder and decoder of dense layers."""

    def __init__(self, latent_dim, shape):
        super().__init__()
        self.encoder = tf.keras.Sequential([layers.Flatten(), layers.Dense(latent_dim, activation="relu")])
        self.decoder = tf.keras.Sequential(
            [layers.Dense(int(np.prod(shape)), activation="sigmoid"), layers.Reshape(shape)]
        )

    def call(self, x):
        return self.decoder(self.encoder(x))


autoencoder = Autoencoder(LATENT_DIM, x_train.shape[1:])
autoencoder.compile(optimizer="adam", loss=losses.MeanSquaredError())
history = autoencoder.fit(
    x_train_noisy, x_train, epochs=3, shuffle=True, validation_data=(x_test_noisy, x_test), batch_size=64
)

encoded = autoencoder.encoder(x_test_noisy).numpy()
decoded = autoencoder.decoder(encoded).numpy()
errors = np.mean(np.abs(decoded - x_test), axis=(1, 2))
print("Threshold:", np.mean(errors) + np.std(errors))
