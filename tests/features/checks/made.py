"""Data with and without faults, as the checks see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from scaleflow.dataset.column_kinds import CATEGORY, DATE, NUMBER, PICTURE, TEXT
from scaleflow.dataset.schema import SplitSample, make_schema
from scaleflow.features.checks.drift import DataFinding, compare_sample
from scaleflow.features.checks.rules import find_duplicates, find_faults
from scaleflow.features.checks.together import find_together
from scaleflow.interfaces import Split

Array = np.ndarray[Any, Any]
Splits = dict[str, SplitSample]
Plant = Callable[[Splits, np.random.Generator], Splits]

TOWNS = np.array(["Bern", "Chur", "Genf", "Thun", "Zug"], object)
WORDS = np.array(["red", "blue", "big", "small", "tree", "house", "river", "car", "walks", "sees", "likes", "finds"])


def find_everything(splits: Splits) -> list[DataFinding]:
    """What `scaleflow check` finds."""
    found = compare_sample(make_schema(splits["train"]), splits["test"], "test: ")
    if splits["train"].kinds == splits["test"].kinds:  # as the splits of one source are
        found += [*find_faults(splits["train"]), *find_duplicates(splits)]
        found += find_together(splits, sum(map(len, splits.values())), Split("auto"))
    return found


def make_table(seed: int, task: str = "classes", rows: int = 1500) -> Splits:
    """A table as they are: skewed numbers, counts, categories, missing values, dates in order."""
    random = np.random.default_rng(seed)
    age = random.normal(40, 12, rows)
    income = random.lognormal(10, 0.7, rows)
    rooms = random.poisson(3, rows).astype(np.float64)
    share = random.beta(2, 5, rows)
    share[random.random(rows) < 0.05] = np.nan
    town = random.choice(TOWNS, rows, p=[0.4, 0.3, 0.15, 0.1, 0.05])
    day = np.sort(random.integers(0, 700, rows))
    date = np.array([str(np.datetime64("2022-01-01") + int(each)) for each in day], object)
    signal = (age - 40) / 12 + 0.5 * np.log(income / 2e4) + (town == "Bern") + random.normal(size=rows)
    if task == "classes":
        target: Array = np.array(["no", "perhaps", "yes"], object)[np.digitize(signal, [-0.5, 0.9])]
    else:
        target = 100 + 20 * signal
    columns = {"age": age, "income": income, "rooms": rooms, "share": share, "town": town, "date": date}
    kinds = {"age": NUMBER, "income": NUMBER, "rooms": NUMBER, "share": NUMBER, "town": CATEGORY, "date": DATE}
    whole = SplitSample(columns, kinds, {"": target}, rows, is_table=True)
    return {"train": cut(whole, slice(0, rows * 2 // 3)), "test": cut(whole, slice(rows * 2 // 3, rows))}


def make_pictures(seed: int, count: int = 300) -> Splits:
    """Pictures of blobs, in three classes by their colour."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:24, 0:24] / 24
    classes = random.integers(0, 3, count)
    pictures = random.normal(60, 6, (count, 24, 24, 3))
    for n in range(count):
        for _ in range(3):
            a, b, size, light = *random.random(2), random.uniform(0.05, 0.3), random.uniform(40, 140)
            blob = light * np.exp(-((x - a) ** 2 + (y - b) ** 2) / size**2)
            pictures[n] += blob[..., None] * (np.arange(3) == classes[n])
    values = np.clip(pictures, 0, 255).astype(np.uint8)
    whole = SplitSample(
        {"input": values}, {"input": PICTURE}, {"": np.array(["ant", "bee", "cat"], object)[classes]}, count
    )
    return {"train": cut(whole, slice(0, count * 2 // 3)), "test": cut(whole, slice(count * 2 // 3, count))}


def make_texts(seed: int, count: int = 900) -> Splits:
    random = np.random.default_rng(seed)
    texts = np.array([" ".join(random.choice(WORDS, random.integers(6, 20))) for _ in range(count)], object)
    target = np.array(["bad", "good"], object)[random.integers(0, 2, count)]
    whole = SplitSample({"input": texts}, {"input": TEXT}, {"": target}, count)
    return {"train": cut(whole, slice(0, count * 2 // 3)), "test": cut(whole, slice(count * 2 // 3, count))}


def cut(sample: SplitSample, rows: Any) -> SplitSample:
    part = sample.select(rows)
    return replace(part, examples=len(part))


def put(splits: Splits, name: str, kind: str, make: Callable[[SplitSample], Array], *only: str) -> Splits:
    """The same data with a column of other values, in all splits or in some."""
    changed = {
        split: replace(each, columns={**each.columns, name: make(each)}, kinds={**each.kinds, name: kind})
        for split, each in splits.items()
        if split in (only or splits)
    }
    return splits | changed


def put_target(splits: Splits, make: Callable[[Array], Array]) -> Splits:
    return {name: replace(each, targets={"": make(each.targets[""])}) for name, each in splits.items()}


def replace_some(values: Array, random: np.random.Generator, share: float, value: Any) -> Array:
    changed = values.copy()
    changed[random.choice(len(values), max(1, round(share * len(values))), replace=False)] = value
    return changed


def copy_rows(splits: Splits, random: np.random.Generator, source: str, into: str, share: float) -> Splits:
    """The same data with rows of a split in place of some of another one, or of its own."""
    to = splits[into]
    own = random.permutation(len(to))
    count = max(1, round(share * len(to)))
    targets = own[:count]
    sources = own[count : 2 * count] if source == into else random.choice(len(splits[source]), count, replace=False)
    columns = {name: values.copy() for name, values in to.columns.items()}
    for name in columns:
        columns[name][targets] = splits[source].columns[name][sources]
    answers = {name: values.copy() for name, values in to.targets.items()}
    for name in answers:
        answers[name][targets] = splits[source].targets[name][sources]
    return splits | {into: replace(to, columns=columns, targets=answers)}


def contradict(splits: Splits, random: np.random.Generator) -> Splits:
    """Copies of 2 % of the training examples under another class, as wrong labels by folder make them."""
    train = copy_rows(splits, random, "train", "train", 0.02)["train"]
    first = splits["train"].targets[""]
    moved = {"": train.targets[""].copy()}
    changed = np.flatnonzero(
        [
            any(not np.array_equal(train.columns[k][n], splits["train"].columns[k][n]) for k in train.columns)
            for n in range(len(train))
        ]
    )
    names = sorted(set(first.tolist()))
    for n in changed:
        moved[""][n] = names[(names.index(moved[""][n]) + 1) % len(names)]
    return splits | {"train": replace(train, targets=moved)}


def brighten(splits: Splits, random: np.random.Generator) -> Splits:
    """Test pictures that are training pictures, saved a little brighter and with the noise of a JPEG file."""
    test = splits["test"].columns["input"].astype(np.float64)
    count = max(2, round(0.05 * len(test)))
    test[:count] = splits["train"].columns["input"][:count] * 1.06 + random.normal(0, 1.5, (count, 24, 24, 3))
    return put(splits, "input", PICTURE, lambda _: np.clip(test, 0, 255).astype(np.uint8), "test")


def blank(splits: Splits, random: np.random.Generator) -> Splits:
    pictures = splits["train"].columns["input"].copy()
    pictures[random.integers(len(pictures), size=3)] = 128
    return put(splits, "input", PICTURE, lambda _: pictures, "train")


def drop(splits: Splits, name: str) -> Splits:
    test = splits["test"]
    without = {key: values for key, values in test.columns.items() if key != name}
    return splits | {"test": replace(test, columns=without, kinds={key: test.kinds[key] for key in without})}


def shuffle(splits: Splits, random: np.random.Generator) -> Splits:
    """Drawn at random, from rows of which the later ones are of older people."""
    names = ("train", "test")
    joined = {key: np.concatenate([splits[n].columns[key] for n in names]) for key in splits["train"].columns}
    targets = {"": np.concatenate([splits[n].targets[""] for n in names])}
    joined["age"] = joined["age"] + 20 * (joined["date"] > "2023-04")
    whole = replace(splits["train"], columns=joined, targets=targets)
    order = random.permutation(len(whole))
    edge = len(splits["train"])
    return {"train": cut(whole, order[:edge]), "test": cut(whole, order[edge:])}


def to_words(values: Array) -> Array:
    return np.array([f"about {value:.0f}" for value in values], object)


#: Each planted fault: its rule, the data, what makes it.
FAULTS: dict[str, tuple[str, Callable[[int], Splits], Plant]] = {
    "a constant": ("constant column", make_table, lambda s, r: put(s, "x", NUMBER, lambda e: np.full(len(e), 7.0))),
    "a copy": ("duplicate columns", make_table, lambda s, r: put(s, "x", NUMBER, lambda e: e.columns["income"])),
    "few values": (
        "mostly missing",
        make_table,
        lambda s, r: put(s, "x", NUMBER, lambda e: replace_some(e.columns["age"], r, 0.7, np.nan)),
    ),
    "row numbers": (
        "id column",
        make_table,
        lambda s, r: put(s, "x", NUMBER, lambda e: 5000.0 + r.permutation(len(e))),
    ),
    "keys": (
        "id column",
        make_table,
        lambda s, r: put(
            s, "x", CATEGORY, lambda e: np.array([f"u{n:06d}" for n in r.permutation(99999)[: len(e)]], object)
        ),
    ),
    "the class, coded": (
        "leak",
        make_table,
        lambda s, r: put(
            s,
            "x",
            NUMBER,
            lambda e: (e.targets[""] == "yes") * 3.0 + (e.targets[""] == "no") + r.normal(0, 0.1, len(e)),
        ),
    ),
    "the value, in other units": (
        "leak",
        lambda seed: make_table(seed, "values"),
        lambda s, r: put(s, "x", NUMBER, lambda e: e.targets[""] * 1.19 + r.normal(0, 0.2, len(e))),
    ),
    "one class only": (
        "near-constant target",
        make_table,
        lambda s, r: put_target(s, lambda t: np.where(r.random(len(t)) < 0.98, "no", t).astype(object)),
    ),
    "a rare class": (
        "rare class",
        make_table,
        lambda s, r: put_target(s, lambda t: replace_some(t, r, 0.004, "never")),
    ),
    "typos": (
        "outliers",
        make_table,
        lambda s, r: put(s, "age", NUMBER, lambda e: replace_some(e.columns["age"], r, 0.003, 4e4), "train"),
    ),
    "-999": (
        "sentinel",
        make_table,
        lambda s, r: put(s, "age", NUMBER, lambda e: replace_some(e.columns["age"], r, 0.04, -999.0)),
    ),
    "two units": (
        "correlated columns",
        make_table,
        lambda s, r: put(s, "x", NUMBER, lambda e: e.columns["age"] * 12 + r.normal(0, 6, len(e))),
    ),
    "spelling": (
        "variants",
        make_table,
        lambda s, r: put(s, "town", CATEGORY, lambda e: replace_some(e.columns["town"], r, 0.05, "bern ")),
    ),
    "classes by spelling": (
        "variants",
        make_table,
        lambda s, r: put_target(s, lambda t: replace_some(t, r, 0.2, "Yes")),
    ),
    "drawn at random, with dates": ("time drift", make_table, shuffle),
    "test rows in train": (
        "duplicates across splits",
        make_table,
        lambda s, r: copy_rows(s, r, "train", "test", 0.03),
    ),
    "rows twice": ("duplicates", make_table, lambda s, r: copy_rows(s, r, "train", "train", 0.05)),
    "rows of two classes": ("contradicting labels", make_table, contradict),
    "texts without words": (
        "empty texts",
        make_texts,
        lambda s, r: put(s, "input", TEXT, lambda e: replace_some(e.columns["input"], r, 0.03, "  ")),
    ),
    "test texts in train": (
        "duplicates across splits",
        make_texts,
        lambda s, r: copy_rows(s, r, "train", "test", 0.03),
    ),
    "test pictures in train, brighter": ("duplicates across splits", make_pictures, brighten),
    "pictures in two folders": ("contradicting labels", make_pictures, contradict),
    "blank pictures": ("blank pictures", make_pictures, blank),
    "a column that is gone": ("column", make_table, lambda s, r: drop(s, "share")),
    "numbers as words": (
        "type",
        make_table,
        lambda s, r: put(s, "age", TEXT, lambda e: to_words(e.columns["age"]), "test"),
    ),
    "a new town": (
        "unseen",
        make_table,
        lambda s, r: put(s, "town", CATEGORY, lambda e: replace_some(e.columns["town"], r, 0.05, "Paris"), "test"),
    ),
    "another range": (
        "range",
        make_table,
        lambda s, r: put(s, "rooms", NUMBER, lambda e: replace_some(e.columns["rooms"], r, 0.03, 90.0), "test"),
    ),
    "older people": (
        "drift",
        make_table,
        lambda s, r: put(s, "age", NUMBER, lambda e: e.columns["age"] + 9, "test"),
    ),
    "other towns": (
        "drift",
        make_table,
        lambda s, r: put(s, "town", CATEGORY, lambda e: replace_some(e.columns["town"], r, 0.35, "Zug"), "test"),
    ),
    "gaps": (
        "missing",
        make_table,
        lambda s, r: put(s, "age", NUMBER, lambda e: replace_some(e.columns["age"], r, 0.2, np.nan), "test"),
    ),
    "darker pictures": (
        "drift",
        make_pictures,
        lambda s, r: put(s, "input", PICTURE, lambda e: (e.columns["input"] * 0.8).astype(np.uint8), "test"),
    ),
}
