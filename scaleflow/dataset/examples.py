"""Generated datasets for the recipes, to use or to copy: pixels, two targets, a text next to a table, clicks.

Each is in memory, takes milliseconds to make, and is the same for the same seed.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from scaleflow.dataset.digits import Digits
from scaleflow.dataset.reading.text import Text
from scaleflow.dataset.synthetic import Generated
from scaleflow.interfaces import Arrays, Inputs, Outputs
from scaleflow.interfaces.options import Positive, at_least, check_options

Array = np.ndarray[Any, Any]


class Shapes(Generated):
    """Grey images with noise, each with a disc and a square: which pixels belong to which?

    The classes are `background`, `disc` and `square`. A square covers a disc where they overlap.

    conf/dataset/shapes.yaml describes the arguments.
    """

    @check_options("dataset")
    def __init__(self, examples: int = 1000, size: Annotated[int, at_least(16)] = 32, seed: int = 0) -> None:
        super().__init__(examples, seed)
        self._size = size
        names = ("background", "disc", "square")
        self.inputs = Inputs((size, size, 1), "uint8", scale=1 / 255)
        self.outputs = Outputs("classification", (size, size, len(names)), names=names)

    def load(self, split: str) -> Arrays:
        """Returns images [n, size, size, 1] uint8 and the classes of their pixels [n, size, size] int32."""
        count, random = self.count_and_seed(split)
        rows, columns = np.mgrid[: self._size, : self._size]
        radius, side = random.uniform(0.1, 0.25, (2, count, 1, 1)) * self._size
        disc, square = random.uniform(0.2, 0.8, (2, 2, count, 1, 1)) * self._size
        classes = np.zeros((count, self._size, self._size), np.int32)
        classes[(rows - disc[0]) ** 2 + (columns - disc[1]) ** 2 < radius**2] = 1
        classes[np.maximum(abs(rows - square[0]), abs(columns - square[1])) < side] = 2
        light = np.array([64, 160, 160])[classes] + random.normal(0, 24, classes.shape)
        return Arrays(np.clip(light, 0, 255).astype(np.uint8)[..., None], classes)


class DigitsWithInk(Digits):
    """The digits with two targets: `digit`, a class, and `ink`, the mean of the pixels from 0 to 16."""

    def __init__(self) -> None:
        self.outputs = {"digit": Outputs("classification", (10,)), "ink": Outputs("regression", (1,))}

    def load(self, split: str) -> Arrays:
        """Returns images [n, 8, 8, 1] float32, and targets `digit` [n] int32 and `ink` [n, 1] float32."""
        digits = super().load(split)
        ink = digits.inputs.mean(axis=(1, 2, 3), dtype=np.float32)[:, None]
        return Arrays(digits.inputs, {"digit": digits.targets, "ink": ink}, rows=digits.rows)


#: What a customer writes, by the urgency of the ticket.
PHRASES = (
    (
        *("how do I change my address", "where can I find my invoice"),
        *("thank you for the new manual", "a question about the tariff"),
    ),
    (
        *("the server does not answer", "we cannot work since this morning"),
        *("all orders are lost", "the payment fails again"),
    ),
)


class Tickets(Generated):
    """Support tickets: is one urgent? The text says it for most, the customer's numbers for the others.

    The inputs are `text` (a string), `orders` (of the last year) and `days` (since the last ticket).

    conf/dataset/tickets.yaml describes the arguments.
    """

    outputs = Outputs("binary", (1,), names=("normal", "urgent"))

    def __init__(self, examples: int = 2000, vocabulary: int = 1000, tokens: int = 12, seed: int = 0) -> None:
        super().__init__(examples, seed)
        self.inputs = {"text": Inputs((), "string"), "orders": Inputs(()), "days": Inputs(())}
        self.preprocessing = {"text": Text(vocabulary, tokens)}

    def load(self, split: str) -> Arrays:
        """Returns the inputs [n] by name, and targets [n, 1] float32."""
        count, random = self.count_and_seed(split)
        urgent = random.random(count) < 0.4
        phrases = np.array(PHRASES)
        misleading = random.random(count) < 0.2
        text = phrases[(urgent ^ misleading).astype(int), random.integers(phrases.shape[1], size=count)]
        orders = random.poisson(np.where(urgent, 6, 2)).astype(np.float32)
        days = random.exponential(np.where(urgent, 1.0, 4.0)).astype(np.float32)
        return Arrays({"text": text, "orders": orders, "days": days}, urgent.astype(np.float32)[:, None])


class Clicks(Generated):
    """Advertisements that were shown to users: was one clicked?

    Each user and each item has a hidden vector; their product decides, together with the hour. Small numbers of `users`
    and `items` occur more often. The inputs are `user`, `item` (numbers below `users` and `items`) and `hour`.

    conf/dataset/clicks.yaml describes the arguments.
    """

    outputs = Outputs("binary", (1,), names=("shown", "clicked"))

    @check_options("dataset")
    def __init__(self, examples: int = 20000, users: Positive = 200, items: Positive = 100, seed: int = 0) -> None:
        super().__init__(examples, seed)
        self._sizes = users, items
        self.inputs = {
            "user": Inputs((), "int32", vocabulary=users),
            "item": Inputs((), "int32", vocabulary=items),
            "hour": Inputs((), scale=1 / 24),
        }

    def load(self, split: str) -> Arrays:
        """Returns the inputs [n] by name, and targets [n, 1] float32."""
        count, random = self.count_and_seed(split)
        hidden = np.random.default_rng([self._seed, 0])
        chosen = []
        vectors = []
        for size in self._sizes:
            chosen.append((size * random.random(count) ** 2).astype(np.int32))
            vectors.append(hidden.standard_normal((size, 2), dtype=np.float32)[chosen[-1]])
        hour = random.uniform(0, 24, count).astype(np.float32)
        liking = 2 * np.sum(vectors[0] * vectors[1], axis=1) + np.cos((hour - 20) / 24 * 2 * np.pi) - 1
        clicked = random.random(count) < 1 / (1 + np.exp(-liking))
        inputs = {"user": chosen[0], "item": chosen[1], "hour": hour}
        return Arrays(inputs, clicked.astype(np.float32)[:, None])
