"""The sheet of augmented examples: some of the training split, each beside versions of it as training sees them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.interfaces import Arrays, name_leaves
from scaleflow.pages.pictures import draw_sheet

if TYPE_CHECKING:
    from scaleflow.dataset import Splits

#: The examples of a sheet, and the versions of each beside it.
EXAMPLES, VERSIONS = 8, 4


def write_sheet(feed: Any, splits: Splits, words: Mapping[str, Sequence[str]], folder: Path) -> list[Path]:
    """Writes `augmented.png` or `augmented.txt`, or both; nothing if the training feed does not augment.

    `words` has those of each text that becomes numbers, from 2 on, by the name of the input.
    """
    if not hasattr(feed, "change_examples"):
        return []
    import numpy as np

    from scaleflow.dataset import sample_rows

    sample = sample_rows(splits.train, 2 * EXAMPLES, splits.transforms, reads_first=True)
    sample = sample.map(lambda values: values[np.arange(2 * EXAMPLES) % len(values)])
    halves: list[Arrays] = [sample.map(operator.itemgetter(slice(first, None, 2))) for first in range(2)]
    versions = [halves[0].inputs, *(feed.change_examples(halves, epoch) for epoch in range(VERSIONS))]
    image, text = (
        [] if name is None else [np.asarray(name_leaves(v)[name]) for v in versions] for name in feed.changed
    )
    files: dict[str, bytes] = {}
    if image:
        low, high = (0, 255) if image[0].dtype == np.uint8 else (image[0].min(), image[0].max())
        pictures = (np.stack(image, axis=1).astype(np.float64) - low) * (255 / ((high - low) or 1))
        pictures = np.clip(np.round(pictures), 0, 255).astype(np.uint8)
        files["augmented.png"] = draw_sheet(pictures.reshape(-1, *pictures.shape[2:]), in_a_row=1 + VERSIONS)
    if text:
        known = {0: "_", 1: "[UNK]"} | dict(enumerate(words.get(feed.changed[1], ()), 2))
        rows = np.stack(text, axis=1).tolist()
        lines = [[" ".join(known.get(n, str(n)) for n in version).rstrip(" _") for version in row] for row in rows]
        files["augmented.txt"] = "\n\n".join(map("\n".join, lines)).encode()
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in files]
