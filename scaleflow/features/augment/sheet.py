"""The sheet of augmented examples: training examples next to versions of them as training sees them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scaleflow.features.augment.feed import AugmentedFeed
from scaleflow.interfaces import Arrays, name_leaves
from scaleflow.pages.pictures import draw_sheet

if TYPE_CHECKING:
    from scaleflow.dataset import Splits

Array = np.ndarray[Any, Any]

#: Number of examples in a sheet, and of versions of each example.
EXAMPLES = 8
VERSIONS = 4


def write_sheet(feed: Any, splits: Splits, folder: Path) -> list[Path]:
    """Writes `augmented.png`, `augmented.txt` or both. Writes nothing if the training feed does not augment."""
    if not isinstance(feed, AugmentedFeed):
        return []
    halves = choose_examples(splits)
    versions = [halves[0].inputs, *(feed.change_examples(halves, epoch) for epoch in range(VERSIONS))]
    files: dict[str, bytes] = {}
    if feed.changed_image is not None:
        images = [np.asarray(name_leaves(version)[feed.changed_image]) for version in versions]
        files["augmented.png"] = draw_images(images)
    if feed.changed_text is not None:
        texts = [np.asarray(name_leaves(version)[feed.changed_text]) for version in versions]
        files["augmented.txt"] = print_texts(texts, find_words(splits, feed.changed_text)).encode()
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in files]


def choose_examples(splits: Splits) -> Sequence[Arrays]:
    """Returns the examples of a sheet, and as many others as their partners in mixtures."""
    from scaleflow.dataset import sample_rows

    sample = sample_rows(splits.train, 2 * EXAMPLES, splits.transforms, reads_first=True)
    # A small split repeats its examples.
    sample = sample.map(lambda values: values[np.arange(2 * EXAMPLES) % len(values)])
    return [sample.map(operator.itemgetter(slice(first, None, 2))) for first in range(2)]


def find_words(splits: Splits, name: str) -> Sequence[str]:
    """Returns the words that a text input encodes as numbers from 2 on; empty if the dataset has only numbers."""
    learned = {} if splits.learned is None else splits.learned.preprocessing
    return learned[name].learned if name in learned else ()


def draw_images(versions: Sequence[Array]) -> bytes:
    """Returns a sheet as PNG, with a row for each example.

    Args:
        versions: the examples [examples, h, w, channels], first unchanged, then changed.
    """
    original = versions[0]
    low, high = (0, 255) if original.dtype == np.uint8 else (original.min(), original.max())
    rows = np.stack(versions, axis=1).astype(np.float64)
    scaled = (rows - low) * (255 / ((high - low) or 1))
    pictures = np.clip(np.round(scaled), 0, 255).astype(np.uint8)
    return draw_sheet(pictures.reshape(-1, *pictures.shape[2:]), in_a_row=len(versions))


def print_texts(versions: Sequence[Array], words: Sequence[str]) -> str:
    """Returns the texts of the examples, with the versions of each in the lines below it.

    Args:
        versions: numbers of words [examples, words], first unchanged, then changed.
        words: the words with the numbers from 2 on.
    """
    known: Mapping[int, str] = {0: "_", 1: "[UNK]"} | dict(enumerate(words, 2))
    paragraphs = []
    for example in np.stack(versions, axis=1).tolist():
        lines = []
        for numbers in example:
            text = " ".join(known.get(number, str(number)) for number in numbers)
            lines.append(text.rstrip(" _"))
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)
