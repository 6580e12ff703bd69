"""What the tests of files share: small files of every kind, and what a source makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.interfaces import Arrays, Dataset, Examples, Target


def options(**changes: Any) -> Dataset:
    return Dataset(Target("dataset", "nowhere"), **{"validation": None, **changes})


def examples(source: Any, split: str) -> tuple[list[Any], list[Any]]:
    """The inputs and targets of a split as the pipeline decodes them, in the source's order."""
    from scaleflow.dataset.batches.records import decode_records

    found: Examples = source.load(split)
    if isinstance(found, Arrays):
        return list(found.inputs), list(found.targets)
    pairs = list(decode_records(found).as_numpy_iterator())
    assert len(pairs) == len(found)
    return [x for x, _ in pairs], [y for _, y in pairs]


def names(source: Any, split: str) -> list[str]:
    """What the records of a split are called."""
    stream = source.load(split)
    return [stream.name(*record) for record in stream.dataset.as_numpy_iterator()]


def prepared(make: Callable[[], Any], **changes: Any) -> tuple[dict[str, int], list[str]] | str:
    """(how many examples each split has, the notes), or the words of the refusal."""
    from scaleflow import dataset

    notes: list[str] = []
    try:
        splits = dataset.prepare_splits(make(), options(**changes), 0, emit=lambda event: notes.append(event.text))
    except ConfigError as refusal:
        return str(refusal)
    return dict(splits.counts()), notes


def refused(makes: Sequence[Callable[[], Any]]) -> list[str]:
    """The words of each refusal."""
    found = [prepared(make) for make in makes]
    assert all(isinstance(each, str) for each in found), found
    return [str(each) for each in found]


def write(path: Path, contents: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    return path


def picture(path: Path, pixels: Any, **how: Any) -> Path:
    """An encoded image; its format is the file's ending."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(pixels, np.uint8))
    (image.convert("P") if path.suffix == ".gif" else image).save(path, **how)
    return path


def plain(colour: Sequence[int], height: int = 4, width: int = 6) -> np.ndarray[Any, Any]:
    """A picture of one colour, [height, width, 3]."""
    return np.broadcast_to(np.array(colour, np.uint8), (height, width, 3))


def holds(found: Sequence[str], wanted: Sequence[Sequence[str]]) -> None:
    """Each message has all of its words."""
    for message, said in zip(found, wanted, strict=True):
        for part in said:
            assert part in message, (part, message)
