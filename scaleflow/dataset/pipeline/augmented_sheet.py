"""The sheet of augmented examples: some of the training split, each beside versions of it as training sees them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.dataset.pipeline.augment import AugmentedFeed
from scaleflow.dataset.pipeline.cache import Transforms, preprocess_arrays
from scaleflow.dataset.pipeline.rows import ArrayRows
from scaleflow.interfaces import Arrays, Feed, Rows, name_leaves

#: The examples of a sheet, and the versions of each beside it.
EXAMPLES, VERSIONS = 8, 4

#: Bounds of the side of a picture on the sheet, in pixels, and its margin.
LEAST_SIDE, MOST_SIDE, MARGIN = 96, 256, 4


def write_sheet(
    feed: Feed, examples: Rows, transforms: Transforms, words: Mapping[str, Sequence[str]], folder: Path
) -> list[Path]:
    """Writes `augmented.png` or `augmented.txt`, or both; nothing if the training feed does not augment.

    Args:
        feed, examples, transforms: of the training split.
        words: of each text that becomes numbers, from 2 on, by the name of the input.
    """
    if not isinstance(feed, AugmentedFeed):
        return []
    with tf.device("CPU:0"):
        sample = Arrays(*examples.read_spread(2 * EXAMPLES)[1])
        sample = preprocess_arrays(sample, {} if isinstance(examples, ArrayRows) else transforms)
        sample = sample.map(lambda values: values[np.arange(2 * EXAMPLES) % len(values)])
        halves = [sample.map(operator.itemgetter(slice(first, None, 2))) for first in range(2)]
        versions = [halves[0].inputs, *(feed.change_examples(halves, epoch) for epoch in range(VERSIONS))]
        columns = [name_leaves(each) for each in versions]
        image, text = feed.changed
        written = []
        folder.mkdir(parents=True, exist_ok=True)
        if image is not None:
            written.append(folder / "augmented.png")
            written[-1].write_bytes(draw_pictures([np.asarray(each[image]) for each in columns]))
        if text is not None:
            written.append(folder / "augmented.txt")
            known = {0: "_", 1: "[UNK]"} | dict(enumerate(words.get(text, ()), 2))
            rows = zip(*(np.asarray(each[text]) for each in columns), strict=True)
            lines = [
                "\n".join(" ".join(known.get(n, str(n)) for n in np.trim_zeros(each, "b").tolist()) for each in row)
                for row in rows
            ]
            written[-1].write_text("\n\n".join(lines) + "\n")
        return written


def draw_pictures(columns: Sequence[Any]) -> bytes:
    """Returns a PNG file with a row for each example, from arrays [examples, h, w, channels]."""
    pictures = np.stack(columns, axis=1).astype(np.float64)
    channels = 3 if pictures.shape[-1] >= 3 else 1
    if columns[0].dtype != np.uint8:
        low, high = columns[0].min(), columns[0].max()
        pictures = (pictures - low) * 255 / (high - low or 1)
    count, versions, height, width, _ = pictures.shape
    factor = max(1, -(-LEAST_SIDE // min(height, width)))
    step = max(1, max(height, width) // MOST_SIDE)
    pictures = pictures[:, :, ::step, ::step, :channels].repeat(factor, axis=2).repeat(factor, axis=3)
    margins = [(0, 0), (0, 0), (0, MARGIN), (0, MARGIN), (0, 0)]
    pictures = np.pad(pictures, margins, constant_values=255)
    _, _, height, width, _ = pictures.shape
    sheet = pictures.transpose(0, 2, 1, 3, 4).reshape(count * height, versions * width, channels)
    return bytes(tf.io.encode_png(np.clip(np.round(sheet), 0, 255).astype(np.uint8)).numpy())
