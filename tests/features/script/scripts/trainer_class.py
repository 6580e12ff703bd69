"""A trainer class with command-line arguments, as larger projects have it."""

import argparse
from dataclasses import asdict, dataclass

import keras
import numpy as np
from keras import layers


@dataclass
class Config:
    """What can be set on the command line."""

    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 0.01
    units: int = 24
    seed: int = 1337


class Trainer:
    """Prepares the data, builds the model, trains and evaluates it."""

    def __init__(self, config):
        self.config = config
        self.model = self.build_model()
        self.callbacks = [
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=1),
        ]

    def load_data(self):
        rng = np.random.default_rng(self.config.seed)
        x = rng.normal(size=(450, 13)).astype("float32")
        y = (2 * x[:, 0] - x[:, 3] + np.sin(x[:, 5]) + 0.1 * rng.normal(size=450)).astype("float32")
        return (x[:300], y[:300]), (x[300:375], y[300:375]), (x[375:], y[375:])

    def build_model(self):
        model = keras.Sequential(
            [
                layers.Input((13,)),
                layers.Dense(self.config.units, activation="relu"),
                layers.Dense(1),
            ]
        )
        model.compile(optimizer=keras.optimizers.RMSprop(self.config.learning_rate), loss="mse", metrics=["mae"])
        return model

    def train(self):
        train_data, val_data, test_data = self.load_data()
        history = self.model.fit(
            *train_data,
            epochs=self.config.epochs,
            batch_size=self.config.batch_size,
            validation_data=val_data,
            callbacks=self.callbacks,
            verbose=2,
        )
        mse, mae = self.model.evaluate(*test_data, verbose=0)
        print(f"test mse {mse:.4f}, mae {mae:.4f}")
        return history


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in asdict(Config()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return Config(**vars(parser.parse_args()))


if __name__ == "__main__":
    args = parse_args()
    print(args)
    keras.utils.set_random_seed(args.seed)
    history = Trainer(args).train()
