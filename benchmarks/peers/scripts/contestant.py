"""What the scripts share: their arguments, the arrays, the clock, and the last line of output."""

import argparse
import json
import statistics
import time

import numpy as np


def parse_arguments(add=lambda parser: None):
    """Takes what `add` adds to the parser, too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("mlp", "cnn"))
    parser.add_argument("--file", required=True, help="the .npz file with x_train and y_train")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=128)
    add(parser)
    return parser.parse_args()


def load(file):
    """Images [n, height, width, channels] uint8, and classes [n] int32."""
    with np.load(file) as arrays:
        return arrays["x_train"], arrays["y_train"]


def train(epochs, examples, take_epoch):
    """Calls take_epoch() once for each epoch. It returns the mean accuracy of the epoch's steps."""
    ends = [time.perf_counter()]
    for _ in range(epochs):
        accuracy = float(take_epoch())
        ends.append(time.perf_counter())
    report(ends[1:], examples, accuracy)


def report(ends, examples, accuracy):
    """Prints the speed of the median epoch. The first epoch compiles and only its end counts."""
    seconds = statistics.median(np.diff(ends))
    print(json.dumps({"examples_per_second": examples / seconds, "accuracy": accuracy}))
