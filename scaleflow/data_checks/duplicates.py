"""Finds examples that occur twice: within a split, across splits, and with other targets; and blank pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np

from scaleflow.data_checks.drift import FAULT, HINT, DataFinding
from scaleflow.data_checks.sample import PICTURE, TEXT, SplitSample

#: The share of a split that repeats examples of another one, or of itself, from which that is told.
ACROSS, WITHIN = 0.01, 0.02

#: Pictures are equal if so few of the 64 bits of their hash differ, and their thumbnails correlate by so much.
BITS, ALIKE = 3, 0.997

#: A picture whose values hardly differ, as a share of the range of all.
BLANK = 1e-3

#: Pixels of the side of a thumbnail.
SIDE = 16

Array = np.ndarray[Any, Any]


def find_duplicates(splits: Mapping[str, SplitSample]) -> Iterator[DataFinding]:
    """Yields duplicates within the training split, across splits, and with other targets; and blank pictures."""
    names = list(splits)
    lengths = [len(splits[name]) for name in names]
    owner = np.repeat(np.arange(len(names)), lengths)
    first = splits[names[0]]
    pictures, chance = first.list_kind(PICTURE), 0.0
    if pictures:
        (column, *_) = pictures
        shown = [splits[name].columns[column] for name in names]
        yield from find_blank(shown)
        groups = group_pictures(np.concatenate([make_thumbnails(each) for each in shown]))
    elif is_telling(first):
        groups, chance = group_rows([splits[name] for name in names])
    else:
        return
    what = "pictures" if pictures else "texts" if len(first.columns) == 1 else "rows"
    for a, b in combinations(range(len(names)), 2):
        in_first = np.unique(groups[owner == a])
        count = int(np.isin(groups[owner == b], in_first).sum())
        if count >= max(1, ACROSS * lengths[b]) and count > allow_for(chance * lengths[a] * lengths[b]):
            text = f"{count:,} of the {lengths[b]:,} {what} of {names[b]} are in {names[a]}, too"
            yield DataFinding("duplicates across splits", FAULT, text, "at least 1 %; of pictures nearly equal ones")
    own = groups[owner == 0]
    repeats = len(own) - len(np.unique(own))
    if repeats >= WITHIN * len(own) and repeats > allow_for(chance * len(own) ** 2 / 2):
        text = f"{repeats:,} of the {len(own):,} {what} of {names[0]} repeat others"
        yield DataFinding("duplicates", HINT, text, "at least 2 %")
    yield from find_contradictions(splits, names, (groups, chance), what)


def find_contradictions(
    splits: Mapping[str, SplitSample], names: list[str], grouped: tuple[Array, float], what: str
) -> Iterator[DataFinding]:
    """Finds equal examples with different classes. `grouped` is what `group_rows` returns."""
    groups, chance = grouped
    for target in splits[names[0]].targets:
        answers = [splits[name].targets[target] for name in names if target in splits[name].targets]
        if len(answers) < len(names) or answers[0].dtype != object:
            continue
        classes = np.unique(np.concatenate(answers).astype(str), return_inverse=True)[1]
        pairs = np.unique(np.stack([groups, classes], axis=1), axis=0)
        twice = np.flatnonzero(np.bincount(pairs[:, 0]) > 1)
        count = int(np.isin(groups, twice).sum())
        if count >= max(2, 0.002 * len(groups)) and count > 2 * allow_for(chance * len(groups) ** 2 / 2):
            example = sorted(set(np.concatenate(answers)[groups == twice[0]].tolist()))
            text = f"{count:,} {what} are equal to one of another class, such as {' and '.join(example[:2])}"
            yield DataFinding("contradicting labels", FAULT, text, "equal examples of different classes")


def is_telling(sample: SplitSample) -> bool:
    """Returns whether two equal rows can hardly be chance: some column has many values."""
    if not len(sample):
        return False
    return any(
        values.ndim > 1 or sample.kinds[name] == TEXT or len(set(values.tolist())) > 0.5 * len(values)
        for name, values in sample.columns.items()
    )


def allow_for(expected: float) -> float:
    """Returns how many equal pairs may be chance if so many are expected of independent columns."""
    return 2 * expected + 4 * math.sqrt(expected)


def group_rows(splits: list[SplitSample]) -> tuple[Array, float]:
    """Groups equal examples.

    Returns:
        A number for each example of all splits, in turn, that equal ones share: [n] int64; and the chance that two
        examples are equal if their columns are independent; 0 for a single column.
    """
    codes, chance = [], 1.0
    for name in splits[0].columns:
        values = np.concatenate([split.columns[name] for split in splits])
        if values.dtype == object:
            values = np.array([" ".join(text.split()).casefold() for text in values])
        elif values.ndim > 1:
            flat = np.ascontiguousarray(values.reshape(len(values), -1))
            values = flat.view(np.dtype((np.void, flat.dtype.itemsize * flat.shape[1]))).ravel()
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        codes.append(places.reshape(len(values)))
        pairs = float((counts * (counts - 1.0)).sum())
        chance *= pairs / max(1.0, len(values) * (len(values) - 1.0))
    groups = np.unique(np.stack(codes, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    return groups, chance if len(codes) > 1 else 0.0


# ---------------------------------------------------------------------------------------------
# Pictures
# ---------------------------------------------------------------------------------------------


def find_blank(pictures: list[Array]) -> Iterator[DataFinding]:
    """Finds pictures of one colour."""
    top = max(float(each.max()) - float(each.min()) for each in pictures if len(each))
    count = sum(int((measure_contrast(each) <= BLANK * top).sum()) for each in pictures if len(each))
    total = sum(map(len, pictures))
    if count >= max(1, 0.001 * total):
        text = f"{count:,} of {total:,} pictures have one colour only"
        yield DataFinding("blank pictures", FAULT, text, "pixels that hardly differ, 0.1 %")


def measure_contrast(pictures: Array) -> Array:
    flat = pictures.reshape(len(pictures), -1)
    return np.asarray(flat.max(axis=1).astype(np.float64) - flat.min(axis=1))


def make_thumbnails(pictures: Array) -> Array:
    """Returns grey thumbnails [n, SIDE, SIDE] float32 of pictures [n, height, width, channels]."""
    grey = pictures.mean(axis=-1, dtype=np.float32)
    for axis in (1, 2):
        size = grey.shape[axis]
        starts = (np.arange(SIDE) * size) // SIDE
        if size >= SIDE:
            grey = np.add.reduceat(grey, starts, axis=axis) / np.diff(np.append(starts, size)).reshape(
                [-1 if n == axis else 1 for n in range(3)]
            )
        else:
            grey = np.take(grey, starts, axis=axis)
    return np.asarray(grey, np.float32)


def hash_thumbnails(thumbnails: Array) -> Array:
    """Returns the perceptual hash of each thumbnail: is each of 8 x 8 parts is darker than the next: [n, 64] bool."""
    small = thumbnails.reshape(len(thumbnails), SIDE // 2, 2, SIDE // 2, 2).mean(axis=(2, 4))
    return np.asarray((small < np.roll(small, -1, axis=2)).reshape(len(thumbnails), -1))


def group_pictures(thumbnails: Array) -> Array:
    """Returns a number for each picture that nearly equal ones share, [n] int64.

    Two hashes that differ in at most three bits have one of four parts in common: only such pairs are compared.
    """
    flat = thumbnails.reshape(len(thumbnails), -1)
    centred = flat - flat.mean(axis=1, keepdims=True)
    size = np.linalg.norm(centred, axis=1)
    unit = centred / np.maximum(size, 1e-6)[:, None]
    bits = hash_thumbnails(thumbnails)
    groups: list[int] = list(range(len(thumbnails)))

    def find(n: int) -> int:
        while groups[n] != n:
            n = groups[n]
        return n

    for part in range(4):
        keys = np.packbits(bits[:, 16 * part : 16 * part + 16], axis=1).view(np.uint16).ravel()
        order = np.argsort(keys, kind="stable")
        ends = np.flatnonzero(np.append(np.diff(keys[order].astype(np.int64)) != 0, True))
        start = 0
        for end in ends:
            members = order[start : end + 1]
            start = int(end) + 1
            for place, a in enumerate(members[:-1]):
                rest = members[place + 1 : place + 1001]
                is_near = (bits[rest] != bits[a]).sum(axis=1) <= BITS
                is_near[is_near] = unit[rest[is_near]] @ unit[a] >= ALIKE
                for b in rest[is_near & (size[rest] > 1e-3) & (size[a] > 1e-3)]:
                    low, high = sorted((find(int(a)), find(int(b))))
                    groups[high] = low
    return np.array([find(n) for n in range(len(groups))])
