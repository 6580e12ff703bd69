"""What is told of a split: by a digest of all that is in memory, or of a sample, and by targets that are cheap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from scaleflow.interfaces import Arrays, Outputs, Stream


def change_one(array: np.ndarray[Any, Any], place: int) -> np.ndarray[Any, Any]:
    changed = array.copy()
    changed[place] += 1
    return changed


def write_table(path: Path, incomes: np.ndarray[Any, Any]) -> str:
    rows = (f"{income},{'ab'[n % 2]},{n}\n" for n, income in enumerate(incomes))
    path.write_text("income,word,price\n" + "".join(rows))
    return str(path)


def digests(folder: Path) -> dict[str, tuple[str, str]]:
    """(what the digest covers, the digest) of some splits."""
    import tensorflow as tf

    from scaleflow.dataset.batches import rows
    from scaleflow.dataset.batches.fingerprint import fingerprint_split
    from scaleflow.dataset.batches.records import cache_records
    from scaleflow.dataset.batches.rows import to_rows
    from scaleflow.dataset.table import Table

    inputs, targets = np.arange(1_200_000, dtype=np.float32).reshape(120_000, 10), np.arange(120_000, dtype=np.int32)
    texts = np.array([b"one", b"two", b"three"], object)
    pairs = tf.data.Dataset.from_tensor_slices((inputs, targets))

    def table(incomes: np.ndarray[Any, Any], **options: Any) -> Any:
        data_dir = write_table(folder / "t.csv", incomes)
        return Table(data_dir, "price", kind="regression", test=0.0, cache_dir=str(folder / "x"), **options)

    def records(last: int) -> Any:
        lines = tf.data.Dataset.from_tensor_slices([*"abcdefgh" * 10, str(last)])
        return cache_records("train", to_rows(Stream(lines, 81, lambda line: (tf.zeros(2), tf.strings.length(line)))))

    incomes = np.arange(3000)
    cases: dict[str, tuple[str, Any]] = {
        "arrays": ("train", Arrays(inputs, targets)),
        "again": ("train", Arrays(inputs.copy(), targets.copy())),
        "test": ("test", Arrays(inputs, targets)),
        "fewer": ("train", Arrays(inputs[:-1], targets[:-1])),
        "one value differs": ("train", Arrays(change_one(inputs, 54_321), targets)),
        "another dtype": ("train", Arrays(inputs.astype(np.int32), targets)),
        "texts": ("train", Arrays(texts, targets[:3])),
        "other texts": ("train", Arrays(np.array([b"on", b"etwo", b"three"], object), targets[:3])),
        "stream": ("train", Stream(pairs, 120_000)),
        "table": ("train", table(incomes).load("train")),
        "records": ("train", records(1)),
        "other records": ("train", records(2)),
    }
    found = {name: fingerprint_split(case[0], to_rows(case[1])) for name, case in cases.items()}
    found["str"] = fingerprint_split("train", to_rows(Arrays(texts.astype(str).astype(object), targets[:3])))
    found["other table"] = fingerprint_split("train", table(change_one(incomes, 1234)).load("train"))
    found["large table"] = fingerprint_split("train", table(incomes, learn_on=100).load("train"))
    for name, last in (("classes", "c"), ("a class renamed", "vip")):
        outputs = Outputs("classification", (3,), ("a", "b", last))
        found[name] = fingerprint_split("train", to_rows(Arrays(inputs, targets)), outputs)
    for name, dtype in (("weights", np.float32), ("weights of float64", np.float64)):
        weighted = Arrays(inputs[:9], targets[:9], np.arange(9).astype(dtype))
        found[name] = fingerprint_split("train", to_rows(weighted))
    assert found["large table"].paths == (str(folder / "t.csv"),)
    rows.WHOLE_BYTES, rows.SAMPLE_BYTES = 100_000, 44_000
    found["large arrays"] = fingerprint_split("train", to_rows(cases["arrays"][1]))
    return {name: (each.covers, each.digest) for name, each in found.items()}


def test_a_digest_covers_all_that_is_in_memory(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(digests, tmp_path)
    assert found.pop("again") == found["arrays"]
    assert found.pop("str") == found["texts"]
    assert found.pop("weights of float64") == found["weights"]
    assert len({digest for _, digest in found.values()}) == len(found)
    assert all(len(digest) == 16 for _, digest in found.values())
    others = {name: covers for name, (covers, _) in found.items() if covers != "all"}
    assert others == {
        "stream": "a sample of 32 examples",
        "records": "all records",
        "other records": "all records",
        "large table": "a sample of 32 examples",
        "large arrays": "a sample of 1000 examples",
    }


def of_records(folder: Path) -> Any:
    """Pictures that are not there, with labels that are."""
    import tensorflow as tf

    from scaleflow.dataset.batches.records import cache_records
    from scaleflow.dataset.batches.rows import to_rows

    def decode(path: Any, label: Any) -> Any:
        return tf.io.decode_png(tf.io.read_file(path), channels=3), label

    paths = [str(folder / f"{n}.png") for n in range(2500)]
    records = tf.data.Dataset.from_tensor_slices((paths, np.arange(2500) % 3))
    stream = cache_records("train", to_rows(Stream(records, 2500, decode))).check_targets(
        Outputs("classification", (3,))
    )
    plain = Stream(tf.data.Dataset.range(3).map(lambda n: (n, n)), 3)
    found = stream.read_cheap_targets()
    assert found is not None
    return found, to_rows(plain).read_cheap_targets()


def test_the_targets_of_records_are_had_without_reading_the_inputs(
    isolated: Callable[..., Any], tmp_path: Path
) -> None:
    (found, weights), plain = isolated(of_records, tmp_path)
    assert weights is None
    assert found.tolist() == (np.arange(2500) % 3).tolist()
    assert plain is None
