"""Runs whose targets are drawn by a coin: validation and test figures above chance are a leak."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

#: Rows of each dataset, and how many standard errors a figure may be away from chance.
ROWS, ERRORS = 1200, 4.0

#: Rows of a group, in a table whose target is drawn for each group.
IN_GROUP = 3

#: The words of each dataset; its files are in a folder of that name.
DATASETS = {
    "table": ("dataset=table", "dataset.data_dir=table/rows.csv", "dataset.target=y"),
    "parquet": ("dataset=table", "dataset.data_dir=parquet/rows.parquet", "dataset.target=y"),
    "arrays": ("dataset=npz", "dataset.data_dir=arrays/all.npz"),
    "texts": ("dataset=text_folder", "dataset.data_dir=texts"),
    "pictures": ("dataset=image_folder", "dataset.data_dir=pictures", "dataset.size=[8,8]"),
}

MODELS = {
    "table": ("tabular", "mlp", "linear", "dlrm"),
    "parquet": ("tabular",),
    "arrays": ("mlp", "linear"),
    "texts": ("text", "transformer"),
    "pictures": ("cnn", "linear"),
}

#: How a run validates.
VALIDATIONS = {
    "auto": (),
    "fraction": ("dataset.validation=0.25",),
    "out_of_fold": ("dataset.validation=out_of_fold",),
    "fold": ("dataset.fold=2/4",),
}

#: What may be added; each has the datasets that take it.
EXTRAS = {
    "": (DATASETS, ()),
    "embed": (("table",), ("dataset.embed=true",)),
    "weights": (("table", "parquet"), ("dataset.weights=w",)),
    "stratum": (DATASETS, ("dataset.split=stratum",)),
    "random": (DATASETS, ("dataset.split=random",)),
    "group": (("table", "parquet", "arrays"), ("dataset.split={by: group, column: g}",)),
    "hash": (("table", "arrays"), ("dataset.split={by: hash, column: g}",)),
    "time": (("table",), ("dataset.split={by: time, column: day}",)),
    "not cached": (("table", "texts", "pictures"), ("dataset.cache=none",)),
    "augment": (("pictures",), ("dataset.augment={flip: true}",)),
    "turn": (("pictures",), ("dataset.augment={rotation: 20, contrast: 0.3, randaugment: 9, cutmix: 1.0}",)),
    "word dropout": (("texts",), ("dataset.augment={word_dropout: 0.2}",)),
    "fine-tuned": (("table", "texts"), ("model.init_from=FIRST",)),
    "balance": (DATASETS, ("dataset.balance=oversample",)),
    "shares": (("table", "arrays"), ("dataset.balance={0: 0.3}",)),
}


@dataclass(frozen=True)
class Case:
    """One run."""

    dataset: str
    model: str
    validation: str
    extra: str = ""
    by_group: bool = False  # the target is drawn for each group, not for each row

    @property
    def words(self) -> list[str]:
        words = [*DATASETS[self.dataset], f"model={self.model}", *VALIDATIONS[self.validation], *EXTRAS[self.extra][1]]
        words = [word.replace("table/", "groups/") for word in words] if self.by_group else words
        length = ["training.epochs=12", "optimizer.learning_rate=0.02"] if self.by_group else ["training.epochs=3"]
        return [*words, *length, "tracking=none", "evaluation=none", "checkpoint=none"]

    @property
    def is_possible(self) -> bool:
        """Whether it is no combination that scaleflow refuses."""
        has_folds = self.validation == "out_of_fold"
        is_taken = self.dataset in EXTRAS[self.extra][0]
        reads = self.extra in ("time", "not cached", "fine-tuned") or self.model != "tabular"
        embeds = self.model == "dlrm"
        return is_taken and not (has_folds and reads) and not (embeds and self.extra != "embed")


def list_cases() -> list[Case]:
    """Returns all cases: each dataset with each of its models, validations and extras, as far as they go together."""
    pairs = [(dataset, model) for dataset in DATASETS for model in MODELS[dataset]]
    cases = [
        Case(*pair, validation, extra) for pair, validation, extra in itertools.product(pairs, VALIDATIONS, EXTRAS)
    ]
    cases += [Case("table", "tabular", validation, "group", by_group=True) for validation in VALIDATIONS]
    return [case for case in cases if case.is_possible]


def write_datasets(folder: Path) -> None:
    """Writes the files of all datasets, with targets drawn by a coin: for each row, in `groups` for each group."""
    import tensorflow as tf
    from pyarrow import csv, parquet, table

    random = np.random.default_rng(7)
    groups = np.repeat(np.arange(ROWS // IN_GROUP), IN_GROUP)
    coins = random.integers(0, 2, ROWS)
    inputs = random.normal(size=(ROWS, 6)).round(4)
    words = np.array([f"word{n}" for n in range(200)])
    columns = {f"x{n}": inputs[:, n] for n in range(4)}
    columns |= {"c": random.choice(words[:40], ROWS), "text": [" ".join(random.choice(words, 6)) for _ in range(ROWS)]}
    days = np.datetime64("2024-01-01") + random.integers(0, 400, ROWS)
    columns |= {"g": groups, "day": days.astype(str), "w": random.uniform(0.1, 5, ROWS).round(3)}
    of_group = random.integers(0, 2, ROWS)[groups]
    known = {"name": np.char.add("name", groups.astype(str))}  # what a model may know a group by
    made = {"table": columns | {"y": coins}, "groups": {**columns, **known, "y": of_group}}
    for name, values in made.items():
        (folder / name).mkdir(parents=True)
        order = random.permutation(ROWS)
        rows = table({column: np.asarray(each)[order] for column, each in values.items()})
        csv.write_csv(rows, folder / name / "rows.csv")
        if name == "table":
            (folder / "parquet").mkdir()
            parquet.write_table(rows, folder / "parquet" / "rows.parquet", row_group_size=100)
    (folder / "arrays").mkdir()
    np.savez(folder / "arrays" / "all.npz", x=inputs.astype(np.float32), y=coins, g=groups)
    for number, coin in enumerate(coins):
        for kind in ("texts", "pictures"):
            (folder / kind / "ab"[coin]).mkdir(parents=True, exist_ok=True)
        (folder / "texts" / "ab"[coin] / f"{number}.txt").write_text(str(columns["text"][number]))
        picture = tf.io.encode_png(random.integers(0, 256, (8, 8, 3), np.uint8)).numpy()
        (folder / "pictures" / "ab"[coin] / f"{number}.png").write_bytes(picture)


def find_leaks(case: Case, folder: Path) -> Iterator[str]:
    """Runs a case in a folder with the datasets; yields each figure that is not at chance."""
    from scaleflow import run

    words = case.words
    if case.extra == "fine-tuned":
        first = run(*(word for word in words if not word.startswith("model.init_from")), folder=folder / "first")
        words = [word.replace("FIRST", str(first.folder / "model" / "model.keras")) for word in words]
    metrics = run(*words).metrics
    shares = {"val": 0.25 * 0.8 if case.validation in ("fraction", "fold") else 0.08, "test": 0.2}
    if case.validation == "out_of_fold" or (case.validation == "auto" and case.model == "tabular"):
        shares["val"] = 0.8 if case.extra not in ("time", "not cached", "fine-tuned") else 0.08
    for split, share in shares.items():
        count = share * ROWS / (IN_GROUP if case.by_group else 1)
        if case.extra == "weights":
            count *= 0.7  # the effective number for weights from 0.1 to 5
        allowed = ERRORS * 0.5 / math.sqrt(count)
        value = metrics[f"{split}/accuracy"]
        if abs(value - 0.5) > allowed:
            yield f"{split}/accuracy {value:.3f}, where a coin has 0.5 within {allowed:.3f}"
