"""Datasets that read what an earlier run learned, instead of learning it anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces import EarlierState, LearnedState, Outputs
from tests.dataset.files import options

FIRST = "age,town,born,bought\n" + "".join(
    f"{20 + n}.5,{('Ulm', 'Bonn')[n % 2]},2024-01-{1 + n % 28:02d},{('yes', 'no')[n % 2]}\n" for n in range(20)
)


def learn(source: Any, **changes: Any) -> LearnedState:
    """The record of a run with this source."""
    from scaleflow.dataset.batches.splits import prepare_splits

    learned = prepare_splits(source, options(), 0, **changes).learned
    assert learned is not None
    return learned


def learn_table(path: Path, content: str, earlier: EarlierState | None = None, target: str = "bought") -> LearnedState:
    from scaleflow.dataset.table import Table

    path.write_text(content)
    return learn(Table(str(path), target, test=0.0, earlier=earlier), earlier=earlier)


def read_again(folder: Path) -> dict[str, Any]:
    """A second file under the record of the first."""
    first = learn_table(folder / "first.csv", FIRST)
    assert learn_table(folder / "first.csv", FIRST, EarlierState(first)) == first
    # Columns in another order, one more, numbers that look like words, a single class, a word and a blank more
    second = "more,bought,born,town,age\n" + "1,no,2024-02-01,Rom,30\n" * 9 + "1,no,2024-02-01,Ulm,\n"
    strict = learn_table(folder / "second.csv", second, EarlierState(first))
    wider = learn_table(folder / "third.csv", second + "1,later,,Ulm,3\n", EarlierState(first, extends=True))
    other = learn_table(folder / "other.csv", FIRST, EarlierState(first, extends=True), target="age")
    return {"first": first, "strict": strict, "wider": wider, "other": other}


def read_with_and_without_a_header(folder: Path) -> list[list[str]]:
    """The same rows without a header line, with one, and with one in another order and one column more."""
    from scaleflow.dataset.table import Table

    files = {"none": "Ulm,1,yes\nBonn,2,no\n", "same": "town,age,bought\nUlm,1,yes\nBonn,2,no\n"}
    files["moved"] = "bought,more,age,town\nyes,0,1,Ulm\nno,0,2,Bonn\n"
    found = []
    for name, content in files.items():
        (folder / f"{name}.csv").write_text(content)
        header = ["town", "age", "bought"]
        table = Table(str(folder / f"{name}.csv"), "bought", test=0.0, header=header, columns=header[:2])
        found.append([str(values) for _, values in sorted(table.load("train").head(9).inputs.items())])
    return found


def test_a_header_line_is_recognised(isolated: Callable[..., Any], tmp_path: Path) -> None:
    none, same, moved = isolated(read_with_and_without_a_header, tmp_path)
    assert none == same == moved == ["[1. 2.]", "['Ulm' 'Bonn']"]


def words(state: LearnedState, name: str) -> Any:
    return state.preprocessing[name].learned


def test_a_table_is_read_as_the_first_one(isolated: Callable[..., Any], tmp_path: Path) -> None:
    found = isolated(read_again, tmp_path)
    first, strict, wider = found["first"], found["strict"], found["wider"]
    assert first.outputs == Outputs("binary", (1,), ("no", "yes"))
    assert first.reading["columns"] == {"age": "numbers", "town": "categories", "born": "dates"}
    assert (strict.outputs, strict.preprocessing, strict.reading["columns"]) == (
        first.outputs,
        first.preprocessing,
        first.reading["columns"],
    )
    assert wider.outputs == Outputs("classification", (3,), ("no", "yes", "later"))
    assert words(wider, "town") == ["Bonn", "Ulm", "Rom"]
    assert words(wider, "age") == {**words(first, "age"), "missing": True}
    assert wider.reading["columns"] == {"more": "numbers", "born": "dates", "town": "categories", "age": "numbers"}
    assert found["other"].outputs.kind == "regression"  # another target is learned anew


def refuse_again(folder: Path) -> list[str]:
    from scaleflow.dataset.table import Table
    from scaleflow.errors import ConfigError

    first = EarlierState(learn_table(folder / "first.csv", FIRST))
    refusals = []
    for content in ("age,born,bought\n1,2024-01-01,no\n", FIRST.replace("yes", "vip"), FIRST):
        (folder / "next.csv").write_text(content)
        try:
            found = Table(str(folder / "next.csv"), "bought", test=0.0, embed=content is FIRST, earlier=first)
            if content is FIRST:  # the same words for an embedding are the same words
                assert learn(found, earlier=first).preprocessing["town"].learned == ["Bonn", "Ulm"]
            else:
                learn(found, earlier=first)
            refusals.append("")
        except ConfigError as refusal:
            refusals.append(str(refusal))
    (folder / "vip.csv").write_text(FIRST.replace("no\n", "vip\n", 3))
    scaled = EarlierState(learn_table(folder / "scaled.csv", FIRST, target="age"))
    for path, target, more in (
        ("vip.csv", "bought", {"kind": "binary", "earlier": EarlierState(first.state, extends=True)}),
        ("first.csv", "town", {"earlier": first}),
        ("scaled.csv", "age", {"earlier": scaled, "scale_target": False}),
    ):
        try:
            Table(str(folder / path), target, **more)
        except ConfigError as refusal:
            refusals.append(str(refusal))
    unscaled = Table(
        str(folder / "scaled.csv"), "age", scale_target=False, earlier=EarlierState(scaled.state, extends=True)
    )
    described = scaled.find_outputs()
    assert unscaled.outputs == Outputs("regression", (1,), limits=described and described.limits)
    return refusals


@pytest.mark.slow
def test_columns_and_classes_that_the_record_does_not_have(isolated: Callable[..., Any], tmp_path: Path) -> None:
    column, unknown, nothing, several, is_input, is_scaled = isolated(refuse_again, tmp_path)
    assert "next.csv: has no column town, which the earlier run read; the columns are age, born, bought" in column
    assert "row 1: its target bought is vip, expected a class of the training split (no, yes)" in unknown
    assert nothing == ""
    assert several.startswith("dataset.kind=binary: bought has 3 classes with those of the earlier run (no, yes, vip)")
    assert is_input == "dataset.target=town: is an input of the earlier run; name another column"
    assert is_scaled == "dataset.scale_target=false: the earlier run scaled its target; leave it out"


def read_folders(base: Path) -> list[Any]:
    from scaleflow.dataset.text_folder import TextFolder

    def fill(name: str, classes: str) -> str:
        for each in classes:
            (base / name / each).mkdir(parents=True)
            (base / name / each / "text.txt").write_text(f"the {each}")
        return str(base / name)

    first = learn(TextFolder(fill("first", "bc"), test=0.0))
    fewer = TextFolder(fill("fewer", "c"), test=0.0, earlier=EarlierState(first))
    more = fill("more", "abc")
    wider = learn(
        TextFolder(more, test=0.0, earlier=(extending := EarlierState(first, extends=True))), earlier=extending
    )
    unknown = TextFolder(more, test=0.0, earlier=EarlierState(first, unknown_class=-1))
    records = [each.load("train").dataset.as_numpy_iterator() for each in (fewer, unknown)]
    labels = [sorted(label for _, label in each) for each in records]
    return [first.preprocessing[""].learned, wider.outputs.names, wider.preprocessing[""].learned, labels]


@pytest.mark.slow
def test_class_folders_keep_their_order(isolated: Callable[..., Any], tmp_path: Path) -> None:
    known, classes, learned, labels = isolated(read_folders, tmp_path)
    assert classes == ("b", "c", "a")
    assert learned[: len(known)] == known
    assert learned[len(known) :] == ["a"]
    assert labels == [[1], [-1, 0, 1]]
