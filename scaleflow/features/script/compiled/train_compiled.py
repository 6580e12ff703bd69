"""Trains a compiled Keras model that a program passed to `scaleflow.run`. A worker runs it as a script.

Its arguments are the file with the model, and the file with the arguments of `fit` (`compiled_model.py`).
"""

import sys
import warnings

import keras

from scaleflow.features.script.compiled_model import load_fit_arguments

SEED = 0

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Keras warns of an optimizer that has not trained yet
    model = keras.models.load_model(sys.argv[1])
arguments = load_fit_arguments(sys.argv[2], model)
keras.utils.set_random_seed(SEED)
model.fit(**arguments)
