"""What is told of a split without going through all of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from scaleflow.interfaces import Arrays, Stream


def digests() -> dict[str, str]:
    import tensorflow as tf

    from scaleflow.dataset.fingerprint import fingerprint_split

    inputs, targets = np.arange(4000, dtype=np.float32).reshape(400, 10), np.arange(400, dtype=np.int32)
    last = inputs.copy()
    last[-1, -1] = 0
    texts = np.array([b"one", b"two", b"three"], object)
    pairs = tf.data.Dataset.from_tensor_slices((inputs, targets))
    cases = {
        "arrays": ("train", Arrays(inputs, targets)),
        "again": ("train", Arrays(inputs.copy(), targets.copy())),
        "test": ("test", Arrays(inputs, targets)),
        "fewer": ("train", Arrays(inputs[:-1], targets[:-1])),
        "the last differs": ("train", Arrays(last, targets)),
        "another dtype": ("train", Arrays(inputs.astype(np.int32), targets)),
        "texts": ("train", Arrays(texts, targets[:3])),
        "stream": ("train", Stream(pairs, 400)),
    }
    return {name: fingerprint_split(split, examples).digest for name, (split, examples) in cases.items()}


def test_a_digest_is_of_the_examples_and_their_number(isolated: Callable[..., Any]) -> None:
    found = isolated(digests)
    assert found.pop("again") == found["arrays"]
    assert len(set(found.values())) == len(found)
    assert all(len(digest) == 16 for digest in found.values())


def of_records(folder: Path) -> Any:
    """Pictures that are not there, with labels that are."""
    import tensorflow as tf

    from scaleflow.dataset.fingerprint import read_cheap_targets
    from scaleflow.dataset.records import cache_records, check_decoded_targets
    from scaleflow.interfaces import Outputs

    def decode(path: Any, label: Any) -> Any:
        return tf.io.decode_png(tf.io.read_file(path), channels=3), label

    paths = [str(folder / f"{n}.png") for n in range(2500)]
    records = tf.data.Dataset.from_tensor_slices((paths, np.arange(2500) % 3))
    stream = check_decoded_targets(
        cache_records("train", Stream(records, 2500, decode)), Outputs("classification", (3,))
    )
    plain = Stream(tf.data.Dataset.range(3).map(lambda n: (n, n)), 3)
    found = read_cheap_targets(stream)
    assert found is not None
    return found, read_cheap_targets(plain)


def test_the_targets_of_records_are_had_without_reading_the_inputs(
    isolated: Callable[..., Any], tmp_path: Path
) -> None:
    (found, weights), plain = isolated(of_records, tmp_path)
    assert weights is None
    assert found.tolist() == (np.arange(2500) % 3).tolist()
    assert plain is None
