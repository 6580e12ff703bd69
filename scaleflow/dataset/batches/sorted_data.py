"""Notes about data that are sorted by their targets, so that a shuffle buffer or a limit has few classes.

A stream that is not in memory is shuffled through a buffer. If the stream is sorted by class, and the buffer is small
compared with it, long stretches of the training have few classes. A limit takes the first examples, which may have few
classes as well.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from scaleflow.dataset.batches.feeds import buffer_size
from scaleflow.interfaces import Outputs, OutputStructure, Rows

Array = np.ndarray[Any, Any]

#: A sample has the targets of a whole shuffle buffer, and at least this many. A smaller split is read whole.
MIN_SAMPLE = 2000

#: Time limit for reading it, in seconds.
SAMPLE_SECONDS = 2.0

#: Smaller windows are not examined.
MIN_WINDOW = 20

#: Smaller samples are not examined.
MIN_TARGETS = 50

#: Targets are sorted if the windows explain more than this share of their variance. In random order, it is nearly 0.
MAX_EXPLAINED = 0.3

#: Targets are sorted if their rank correlation with the position is at least this. In random order, it is nearly 0.
MAX_CORRELATION = 0.9

#: Maximum share of a sample that classes with a single example have, if the sample shows all but rare classes. The
#: classes outside of the sample have about the same share of all examples, unless the data are sorted (Good 1953).
MAX_SINGLE = 0.01


def describe_stream_order(examples: Rows, outputs: OutputStructure, shuffle: int | None) -> str | None:
    """Returns a note if a stream is sorted and its shuffle buffer is small. `shuffle` is `dataset.shuffle`."""
    if examples.is_random_access or examples.place != "stream":
        return None
    window = buffer_size(examples, shuffle)  # type: ignore[arg-type]
    if window >= len(examples):
        return None
    targets = read_first_targets(examples, outputs, max(MIN_SAMPLE, window))
    if targets is None:
        return None
    order = describe_sorted(targets, count_classes(outputs), window)
    if order is None:
        return None
    return (
        f"dataset.shuffle: the training data seem to be sorted: {order}. The shuffle buffer has {window:,} of "
        f"{len(examples):,} examples, so a step sees neighbours only. Write the examples in random order, or use "
        "dataset.cache=file or a larger dataset.shuffle"
    )


def describe_first_examples(key: str, name: str, examples: Rows, outputs: OutputStructure) -> str | None:
    """Returns a note if a split, which has the first examples only, has few of the classes.

    Args:
        key: the option that limits the split, with its value.
        name: the split.
    """
    classes = count_classes(outputs)
    targets = None if classes is None else read_first_targets(examples, outputs, len(examples))
    absent = None if targets is None else describe_absent(targets, classes)
    if absent is None:
        return None
    return (
        f"{key}: takes the first examples of {name!r}, and {absent}. If the data are sorted by class, write them in "
        "random order, or use more examples"
    )


def count_classes(outputs: OutputStructure) -> int | None:
    """Returns the number of classes if an example has one class, else None."""
    if not isinstance(outputs, Outputs) or not outputs.is_one_class:
        return None
    return 2 if outputs.kind == "binary" else int(outputs.shape[-1])


def read_first_targets(examples: Rows, outputs: OutputStructure, count: int) -> Array | None:
    """Reads up to `count` targets in order, [n] float64. It reads fewer if this takes long.

    Returns None if an example has no single target or cannot be read.
    """
    if not isinstance(outputs, Outputs) or not (outputs.is_one_class or outputs.target_shape in ((), (1,))):
        return None
    first = examples.limit(min(count, len(examples)))
    deadline = time.monotonic() + SAMPLE_SECONDS
    parts: list[Array] = []
    try:
        for batch in first.iterate(lambda _, targets, *__: targets):
            parts.append(np.ravel(batch).astype(np.float64))
            if time.monotonic() > deadline:
                break
    except Exception:  # training reports what cannot be read
        return None
    targets: Array = np.concatenate(parts)
    kept = np.isfinite(targets)
    if outputs.ignore is not None:
        kept &= targets != outputs.ignore
    chosen: Array = targets[kept]
    return chosen


def describe_sorted(targets: Array, classes: int | None, window: int) -> str | None:
    """Returns a text on how the first targets of a stream differ from a random order; None if they do not.

    Args:
        targets: in their order, [n].
        classes: the number of classes; None if the targets are numbers.
        window: the size of the shuffle buffer.
    """
    if len(targets) < MIN_TARGETS:
        return None
    length = max(window, MIN_WINDOW)
    windows = len(targets) // length
    if windows >= 2:
        explained = explain_variance(targets[: windows * length].reshape(windows, length), classes)
        if explained > MAX_EXPLAINED:
            return f"in the first {windows} windows of {length:,} examples the targets differ from window to window"
    if classes is not None:
        return describe_absent(targets, classes)
    ranks = np.argsort(np.argsort(targets, kind="stable"), kind="stable")
    if len(np.unique(targets)) < MIN_WINDOW:
        return None
    correlation = float(np.corrcoef(ranks, np.arange(len(targets)))[0, 1])
    if abs(correlation) < MAX_CORRELATION:
        return None
    return f"the first {len(targets):,} targets {'rise' if correlation > 0 else 'fall'} from one to the next"


def describe_absent(targets: Array, classes: int | None) -> str | None:
    """Returns a text on the classes in the targets if at most half of all classes are there, else None.

    It is also None if the sample has many classes once: then others are missing because the sample is small.
    """
    if classes is None or len(targets) < MIN_TARGETS:
        return None
    counts = np.unique(targets, return_counts=True)[1]
    if 2 * len(counts) > classes or np.count_nonzero(counts == 1) > max(1, MAX_SINGLE * len(targets)):
        return None
    return f"the first {len(targets):,} have {len(counts)} of {classes} classes"


def explain_variance(windows: Array, classes: int | None) -> float:
    """Returns the share of the targets' variance that lies between windows, [windows, length] -> 0 to 1.

    For classes, it is the variance of their one-hot codes.
    """
    columns = [windows]
    if classes is not None:
        columns = [(windows == number).astype(np.float64) for number in np.unique(windows)]
    total = sum(float(column.var()) for column in columns)
    between = sum(float(column.mean(axis=1).var()) for column in columns)
    return between / total if total > 0 else 0.0
