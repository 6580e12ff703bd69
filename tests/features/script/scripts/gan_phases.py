"""GAN phases: a discriminator is trained by `fit`, then both in turn by `train_on_batch`, then again by `fit`."""

import numpy as np
from tensorflow import keras
from tensorflow.keras import layers

keras.utils.set_random_seed(28)
rng = np.random.default_rng(28)
real = rng.normal(loc=2.0, scale=0.5, size=(256, 2)).astype("float32")

generator = keras.Sequential([keras.Input((4,)), layers.Dense(16, activation="relu"), layers.Dense(2)])
discriminator = keras.Sequential([keras.Input((2,)), layers.Dense(16, "relu"), layers.Dense(1, "sigmoid")])
discriminator.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])


def mix_with_fakes():
    fake = generator.predict(rng.normal(size=(256, 4)).astype("float32"), verbose=0)
    x = np.concatenate([real, fake])
    y = np.concatenate([np.ones((256, 1)), np.zeros((256, 1))])
    return x, y


x, y = mix_with_fakes()
first_history = discriminator.fit(x, y, epochs=2, batch_size=64, verbose=0)
print("Discriminator alone:", first_history.history["accuracy"])

latent = keras.Input((4,))
frozen = keras.models.clone_model(discriminator)
frozen.trainable = False
combined = keras.Model(latent, frozen(generator(latent)))
combined.compile(optimizer="adam", loss="binary_crossentropy")

history = {"d_loss": [], "g_loss": []}
for _ in range(6):
    x, y = mix_with_fakes()
    d_loss, _ = discriminator.train_on_batch(x, y)
    frozen.set_weights(discriminator.get_weights())
    g_loss = combined.train_on_batch(rng.normal(size=(64, 4)).astype("float32"), np.ones((64, 1)))
    history["d_loss"].append(float(d_loss))
    history["g_loss"].append(float(np.squeeze(g_loss)))

x, y = mix_with_fakes()
last_history = discriminator.fit(x, y, epochs=1, batch_size=64, verbose=0)
print("Discriminator after the game:", last_history.history["accuracy"])
