from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dataset.files import examples, holds, names, options, prepared, refused, write

HOUSES = '''area,rooms,town,price
100, 3 ,Ulm,1.5
80,NA,"Köln, am ""Dom""",2.5e0
,2,Bonn,-3

60,1,Ulm,4
'''


def make(data_dir: Path | str, target: str = "price", **changes: Any) -> Any:
    from scaleflow.dataset.csv import Csv

    return Csv(str(data_dir), target, **changes)


def read(source: Any) -> dict[str, Any]:
    found = {split: examples(source, split) for split in source.splits}
    return {
        split: [([field.decode() for field in row], target.tolist()) for row, target in zip(*pairs, strict=True)]
        for split, pairs in found.items()
    }


def loaded(path: Path) -> Any:
    from scaleflow import dataset

    source = make(path, test=0)
    splits = dataset.prepare_splits(source, options(cache="memory"), 0)
    return source.inputs, source.outputs, read(source), names(source, "train"), splits.inputs, splits.train.inputs


def test_rows_are_strings_and_features_behind_the_preprocessing(isolated: Callable[..., Any], tmp_path: Path) -> None:
    path = write(tmp_path / "houses.csv", "\ufeff" + HOUSES.replace("\n", "\r\n"))
    inputs, outputs, rows, called, features, numbers = isolated(loaded, path)
    assert (inputs.shape, inputs.dtype) == ((3,), "string")
    assert (outputs.kind, outputs.shape, outputs.names) == ("regression", (1,), None)
    assert rows == {
        "train": [
            (["100", "3", "Ulm"], [1.5]),
            (["80", "NA", 'Köln, am "Dom"'], [2.5]),
            (["", "2", "Bonn"], [-3.0]),
            (["60", "1", "Ulm"], [4.0]),
        ]
    }
    assert called == [f"{path}, line {n}" for n in (2, 3, 4, 6)]
    assert (features.shape, features.dtype) == ((2 + 2 + 4,), "float32")
    assert numbers[2].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]  # the mean area, which is missing; Bonn
    assert abs(numbers.mean(axis=0)[:2]).max() < 1e-6


#: The target's values, what kind they are taken for, the names of the classes.
KINDS: dict[str, tuple[list[str], str, Any, str]] = {
    "words": (["b", "a", "c"] * 4, "classification", ("a", "b", "c"), "auto"),
    "two words": (["yes", "no"] * 6, "binary", ("no", "yes"), "auto"),
    "few whole numbers": (["10", "9", "2"] * 4, "classification", ("2", "9", "10"), "auto"),
    "0 and 1": (["1", "0"] * 6, "binary", ("0", "1"), "auto"),
    "many whole numbers": ([str(n) for n in range(30)], "regression", None, "auto"),
    "few numbers": (["0.5", "1.5"] * 6, "regression", None, "auto"),
    "two classes": (["0.5", "1.5"] * 6, "classification", ("0.5", "1.5"), "classification"),
    "counts": (["1", "2", "3"] * 4, "regression", None, "regression"),
}


def kinds(base: Path) -> dict[str, Any]:
    found = {}
    for name, (values, _, _, kind) in KINDS.items():
        path = write(base / f"{name}.csv", "x,price\n" + "".join(f"{n},{value}\n" for n, value in enumerate(values)))
        source = make(path, kind=kind, test=0)
        found[name] = source.outputs, [target for _, target in read(source)["train"]]
    return found


@pytest.mark.slow
def test_the_kind_follows_from_the_target(isolated: Callable[..., Any], tmp_path: Path) -> None:
    for name, (outputs, targets) in isolated(kinds, tmp_path).items():
        values, kind, classes, _ = KINDS[name]
        assert (outputs.kind, outputs.names) == (kind, classes), name
        if kind == "regression":
            assert targets == [[float(value)] for value in values], name
        else:
            numbers = [classes.index(value) for value in values]
            assert targets == ([[float(n)] for n in numbers] if kind == "binary" else numbers), name
            assert outputs.shape == ((1,) if kind == "binary" else (len(classes),)), name


def several(base: Path) -> Any:
    for n in range(4):
        lines = "".join(f"{n * 10 + i},{'ab'[i % 2]};{n},{i / 3}\n" for i in range(10))
        write(base / f"parts/{n}.csv", "id,name,price\n" + lines)
        write(base / f"splits/{'train' if n < 3 else 'test'}/{n}.csv", "id,name,price\n" + lines)
        write(base / f"bare/{n}.tsv", lines.replace(",", "\t"))
    parts = {split: [int(row[0]) for row, _ in rows] for split, rows in read(make(base / "parts")).items()}
    again = {split: [int(row[0]) for row, _ in rows] for split, rows in read(make(f"{base}/parts/*.csv")).items()}
    splits = {split: [int(row[0]) for row, _ in rows] for split, rows in read(make(base / "splits")).items()}
    chosen = make(base / "splits", columns=["name", "id"], categorical=["id"], missing=["0"])
    bare = make(base / "bare", header=["id", "name", "price"], delimiter="\t", drop=["name"])
    called = dict(zip((row[0] for row, _ in read(bare)["train"]), names(bare, "train"), strict=True))
    learned = chosen.preprocessing.learn([])
    return parts, again, splits, read(chosen)["test"][0][0], list(learned["mean"]), len(learned["words"]), called


@pytest.mark.slow
def test_several_files_have_one_header_and_each_row_comes_once(isolated: Callable[..., Any], tmp_path: Path) -> None:
    parts, again, splits, row, numeric, categorical, called = isolated(several, tmp_path)
    assert sorted(parts["train"] + parts["test"]) == list(range(40))
    assert (len(parts["train"]), len(parts["test"])) == (32, 8)
    assert again == parts
    assert (sorted(splits["train"]), splits["test"]) == (list(range(30)), list(range(30, 40)))
    assert row == ["a;3", "30"]
    assert (numeric, categorical) == ([], 2)
    for number, name in called.items():
        assert name == f"{tmp_path}/bare/{int(number) // 10}.tsv, line {int(number) % 10 + 1}"


# ---------------------------------------------------------------------------------------------
# What cannot be read
# ---------------------------------------------------------------------------------------------

#: By what is wrong: a line among good ones, and what is said of it.
WRONG: dict[str, tuple[bytes, str]] = {
    "few": (b"1,2,3", "line 5: it has 3 column(s), expected 4"),
    "many": (b"1,2,3,4,5", "line 5: it has 5 column(s), expected 4"),
    "broken": (
        b'1,2,"a town\nwith two lines",4',
        "line 5: its quotes do not match; a field cannot contain a line break",
    ),
    "stray": (b'1,2,"a"b,4', "line 5: its quotes do not match"),
    "inner": (b'1,2,a "b" c,4', "line 5: its quotes do not match"),
    "latin": ("1,2,Köln,4".encode("latin-1"), "line 5: it is not UTF-8"),
    "missing": (b"1,2,Ulm,", "line 5: its target price is missing"),
    "number": (b"1,two,Ulm,4", "line 5: rooms is 'two', expected a number"),
    "target": (b"1,2,Ulm,four", "line 5: price is 'four', expected a number"),
}


GOOD = [f"{n},{n % 5},Ulm,{n / 7}".encode() for n in range(30)]


def faulty(base: Path) -> tuple[list[Any], Any, Any]:
    """The refusal of each wrong line, what is left of a file with all of them, and of one with a new class."""

    def of(name: str, wrong: list[bytes]) -> Callable[[], Any]:
        path = write(base / f"{name}.csv", b"\n".join([b"area,rooms,town,price", *GOOD[:3], *wrong, *GOOD[3:]]))
        return functools.partial(make, path, kind="regression", numeric=["rooms"], test=0)

    found = [prepared(of(name, [line])) for name, (line, _) in WRONG.items()]
    skipped = prepared(of("all", [line for line, _ in WRONG.values()]), on_bad_example="skip")
    write(base / "classes/train.csv", "x,price\n" + "1,a\n2,b\n" * 5)
    write(base / "classes/test.csv", "x,price\n1,a\n2,c\n")
    classes = functools.partial(make, base / "classes")
    return found, skipped, (prepared(classes), prepared(classes, on_bad_example="skip"))


@pytest.mark.slow
def test_rows_that_cannot_be_read_are_named_or_left_out(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found, (counts, (note,)), (unknown, (left, (about_unknown,))) = isolated(faulty, tmp_path)
    for refusal, (name, (_, said)) in zip(found, WRONG.items(), strict=True):
        assert f"{tmp_path}/{name}.csv, {said}" in refusal
        assert "dataset.on_bad_example=skip" in refusal
    assert counts == {"train": len(GOOD)}
    assert f"{len(WRONG) + 1} of the {len(GOOD) + len(WRONG) + 1}" in note  # a broken line is two
    assert f"{tmp_path}/all.csv, line 5" in note
    assert (
        f"{tmp_path}/classes/test.csv, line 3: its target price is 'c', which is not a class of the training split"
        in unknown
    )
    assert left == {"train": 10, "test": 1}
    assert f"{tmp_path}/classes/test.csv, line 3" in about_unknown


def refusals(base: Path) -> list[str]:
    path = write(base / "good.csv", HOUSES)
    write(base / "empty.csv", "")
    write(base / "latin.csv", "größe,price\n1,2\n".encode("latin-1"))
    write(base / "quotes.csv", '"a,price\n1,2\n')
    write(base / "twice.csv", "a,a,price\n1,2,3\n")
    write(base / "differ/1.csv", HOUSES)
    write(base / "differ/2.csv", HOUSES.replace("rooms", "floors"))
    write(base / "differ/3.csv", "area,price\n")
    write(base / "mostly.csv", "x,price\n" + "1,2.5\n" * 30 + "one,2.5\n")
    write(base / "mostly_target.csv", "x,price\n" + "1,2.5\n" * 30 + "1,two\n")
    write(base / "same.csv", "x,price\n" + "1,a\n" * 9)
    write(base / "names.csv", "x,price\n" + "".join(f"1,name {n}\n" for n in range(9)))
    write(base / "no_rows.csv", "x,price\n")

    def of(name: str = "good", **changes: Any) -> Callable[[], Any]:
        return functools.partial(make, base / f"{name}.csv", **changes)

    assert path.is_file()
    return refused(
        [
            of("nowhere"),
            of("empty"),
            of("latin"),
            of("quotes"),
            of("twice"),
            functools.partial(make, base / "differ"),
            of(target="cost"),
            of(columns=["area", "price"]),
            of(columns=["area", "garden"]),
            of(columns=["area"], drop=["area"]),
            of(columns="area"),
            of(numeric=["price"]),
            of(numeric=["area"], categorical=["area"]),
            of(delimiter=", "),
            of(kind="multi_label"),
            of(most_values=1),
            of("mostly"),
            of("mostly_target"),
            of("same"),
            of("names", most_values=5),
            of("names", kind="binary"),
            of("no_rows"),
        ]
    )


def test_files_and_options_that_do_not_fit_are_refused(isolated: Callable[..., Any], tmp_path: Path) -> None:
    holds(
        isolated(refusals, tmp_path),
        [
            ["nowhere.csv: there is no such file or folder"],
            ["empty.csv is empty, expected a header"],
            ["latin.csv, line 1: it is not UTF-8"],
            ["quotes.csv, line 1: its quotes do not match"],
            ["two columns have the name 'a'"],
            [
                f"{tmp_path}/differ/2.csv and {tmp_path}/differ/1.csv have different headers",
                ": floors instead of rooms",
            ],
            ["dataset.target=cost: there is no such column; the columns are area, rooms, town, price"],
            ["dataset.columns: price is the target"],
            ["dataset.columns=garden: there is no such column"],
            ["dataset.columns: no column is left"],
            ["dataset.columns=area: expected a list such as [a, b]"],
            ["dataset.numeric: price is not an input column"],
            ["dataset.numeric: area is in dataset.categorical, too"],
            ["dataset.delimiter=, : expected a single character"],
            ["dataset.kind=multi_label: expected one of auto, classification, binary, regression"],
            ["dataset.most_values=1: expected an integer, at least 2"],
            ["the column x has 'one'", "mostly.csv, line 32", "30 of its 31 values", "dataset.missing", "categorical"],
            ["the column price has 'two'", "mostly_target.csv, line 32", "dataset.kind"],
            ["dataset.target=price: has 1 different value(s), expected at least 2 classes"],
            ["dataset.target=price: has more than 5 classes"],
            ["dataset.target=price: has 9 different value(s), expected 2 classes"],
            ["dataset.target=price: has 0 different value(s)"],
        ],
    )
