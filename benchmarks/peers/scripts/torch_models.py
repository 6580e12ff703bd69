"""The models in PyTorch, on images [batch, channels, height, width] uint8 divided by `scale`."""

import itertools

import torch
from torch import nn


class Rescale(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x.to(torch.float32) / self.scale


def mlp(pixels=784, units=(128,), scale=255):
    widths = [pixels, *units]
    layers = [Rescale(scale), nn.Flatten()]
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def cnn(scale=255):
    return nn.Sequential(
        Rescale(scale),
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2304, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


MODELS = {"mlp": mlp, "cnn": cnn}
