"""Numbers and dates that are not written as in English: what is read, what is refused. No TensorFlow."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from scaleflow.dataset.tables.kinds import is_like_values
from scaleflow.dataset.tables.values import describe_bare_numbers, find_forms, infer_type
from scaleflow.errors import ConfigError
from scaleflow.serving.cells import ColumnReader

VALUES = np.random.default_rng(0).normal(0, 3000, 60).round(2)


def english(value: float) -> str:
    return f"{value:,.2f}"


def german(value: float) -> str:
    return english(value).translate(str.maketrans(",.", ".,"))


def read(words: Sequence[str | None], **options: Any) -> list[str | None]:
    """The words of a column in the form that models take."""
    import pyarrow

    columns = {"x": pyarrow.chunked_array([pyarrow.array(words, pyarrow.string())])}
    rewritten: list[str | None] = (
        ColumnReader(written=find_forms(columns, **options).get("x")).rewrite(columns["x"]).to_pylist()
    )
    return rewritten


WAYS: dict[str, Callable[[float], str]] = {
    "German": german,
    "decimal comma": lambda value: f"{value:.2f}".replace(".", ","),
    "English": english,
    "Swiss": lambda value: english(value).replace(",", "\u2019"),
    "French": lambda value: english(value).translate(str.maketrans(",.", "\u202f,")),
    "euros": lambda value: f"{german(value)} €",
    "dollars": lambda value: english(value).replace("-", "-$") if value < 0 else f"${english(value)}",
    "accounts": lambda value: f"({english(-value)})" if value < 0 else english(value),
    "per cent": lambda value: f"{value:.2f}%",
    "a minus behind": lambda value: f"{english(-value)}-" if value < 0 else english(value),
    "a code": lambda value: f"{english(value)} USD",
    "a code before": lambda value: f"EUR {german(value)}",
    "reais": lambda value: f"R$ {german(value)}",
    "crowns": lambda value: f"{german(value).replace('.', ' ')} kr",
    "rupees": lambda value: f"₹{english(value)}",
    "a minus": lambda value: english(value).replace("-", "\u2212"),
}


@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_read_as_they_are_written(way: str) -> None:
    found = read([*map(WAYS[way], VALUES), None])
    assert [float(each or "nan") for each in found[:-1]] == VALUES.tolist()
    assert found[-1] is None


def test_whole_numbers_with_spaces_and_signs_of_currencies() -> None:
    assert read(["1 200", "950", "12 000 000"]) == ["1200", "950", "12000000"]
    assert read(["$1,200", "$950"]) == ["1200", "950"]
    assert read(["12,34,567.25", "1,00,000.50"]) == ["1234567.25", "100000.50"]
    assert read(["0,125", "1,163"]) == ["0.125", "1.163"]  # no number begins with 0 and a thousand
    assert read(["1.163.200", "950"]) == ["1163200", "950"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["1,163", "12,500"],
            "1,163, which is 1163 with 'dataset.thousands=\",\"' or 1.163 with 'dataset.decimal=\",\"'",
        ),
        (["1.163 €", "2.500 €"], "1.163 €, which is 1.163 with 'dataset.decimal=\".\"' or 1163 with"),
        (["01/02/2024", "03/04/2024"], "dataset.dates='%d/%m/%Y' or dataset.dates='%m/%d/%Y'"),
    ],
)
def test_what_can_mean_two_things_is_refused(words: Sequence[str], reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read(words)
    assert reason in str(refusal.value)


def test_the_user_says_what_it_means() -> None:
    words = ["1,163", "12,500"]
    assert read(words, decimal=",") == ["1.163", "12.500"]
    assert read(words, thousands=",") == ["1163", "12500"]
    assert read(["1.163", "12.500", "7"], thousands=".") == ["1163", "12500", "7"]
    assert read(["01/02/2024", "03/04/2024"], dates="%m/%d/%Y")[0] == "2024-01-02T00:00:00"
    with pytest.raises(ConfigError, match="no column"):
        read(["a", "b"], dates="%m/%d/%Y")


def test_other_columns_of_the_file_decide() -> None:
    import pyarrow

    columns = {"a": ["1,163", "2,500"], "b": ["1.163", "12.500"], "c": ["12,5", "3,75"]}
    tables = {name: pyarrow.chunked_array([words]) for name, words in columns.items()}
    forms = find_forms(tables)
    assert [ColumnReader(written=forms[name]).rewrite(tables[name]).to_pylist() for name in columns] == [
        *(["1.163", "2.500"], ["1163", "12500"], ["12.5", "3.75"])
    ]
    del tables["c"]
    tables["b"] = pyarrow.chunked_array([["1.5", "12.25"]])
    assert find_forms(tables) == {"a": {"decimal": ".", "thousands": ",", "unit": ""}}


DAYS = (
    "%d.%m.%Y",
    "%d.%m.%Y %H:%M",
    "%m/%d/%Y %H:%M",
    "%m/%d/%Y %I:%M %p",
    "%d/%m/%Y",
    "%d-%b-%Y",
    "%B %d, %Y",
    "%Y/%m/%d",
)


@pytest.mark.parametrize("form", DAYS)
def test_dates_are_read_as_they_are_written(form: str) -> None:
    moments = [datetime.datetime(2023, 11, 20, 9, 7) + datetime.timedelta(days=n, hours=n % 24) for n in range(60)]
    has_time = "%M" in form
    expected = [each if has_time else each.replace(hour=0, minute=0) for each in moments]
    found = read([*(each.strftime(form) for each in moments), None])
    assert found == [*(each.isoformat() for each in expected), None]


@pytest.mark.parametrize(
    ("form", "word", "expected"),
    [
        ("%Y-%m-%d %H:%M", "2023-11-20 09:07", "2023-11-20T09:07:00"),
        ("%Y-%m-%d", "2023-11-20", "2023-11-20T00:00:00"),
        ("%Y-%m-%d", "2023-11-20 09:07", "2023-11-20T09:07:00"),
        ("%Y-%d-%m", "2023-03-11", "2023-11-03T00:00:00"),  # the user's word is more than ISO 8601
        ("%Y%m%d", "20231120", "2023-11-20T00:00:00"),
        ("%d.%m.%Y %H:%M:%S%z", "20.11.2023 09:07:00+0200", "2023-11-20T07:07:00"),
    ],
)
def test_the_user_names_the_form_of_dates(form: str, word: str, expected: str) -> None:
    assert read([word, word, None], dates=form) == [expected, expected, None]


@pytest.mark.parametrize(
    ("form", "reason"),
    [("%Q", "no form of Python's strptime"), ("%H:%M %H", "no form of Python's"), ("%d.%m.", "has no year")],
)
def test_a_form_that_no_date_can_have_is_refused(form: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"dataset.dates={form}: .*{reason}"):
        read(["20.11.", "21.11."], dates=form)


def test_dates_of_a_form_are_sought_in_the_columns_that_may_have_them() -> None:
    import pyarrow

    days, words = pyarrow.chunked_array([[datetime.date(2023, 11, 20)]]), pyarrow.chunked_array([["20.11.2023"]])
    assert find_forms({"day": days}, dates="%d/%m/%Y") == {}  # it has dates
    assert find_forms({}, dates="%d/%m/%Y", known={"day": {"dates": "%d/%m/%Y"}}) == {}
    with pytest.raises(ConfigError, match="no column"):
        find_forms({"day": words}, dates="%d/%m/%Y")


@pytest.mark.parametrize(
    "words",
    [
        ["1.5", "+2", "-3e-5"],
        ["2024-01-31", "2024-02-29"],
        ["01234", "12345"],
        ["a1", "b2"],
        ["1.2.3", "1.2.4"],
        ["Room 12, floor 3", "Room 1, floor 2"],
        ["true", "false"],
        ["12:30", "14:05"],
    ],
)
def test_other_columns_stay_as_they_are(words: Sequence[str]) -> None:
    assert read(words) == words


@pytest.mark.parametrize(
    ("words", "unit", "others"),
    [
        (["$100.00", "$1,250.00", "7.00"], "$", ["100.00 €", "£100", "USD 5.00", "5%"]),
        (["100,00 €", "7,50 EUR"], "EUR", ["$100,00", "100,00 USD", "7,50 %"]),
        (["12.5%", "3%"], "%", ["$3"]),
        (["120 kr", "80 kr."], "kr", ["120 SEK", "£80"]),
        (["R$ 5,50", "BRL 7,25"], "BRL", ["$5,50"]),
    ],
)
def test_a_unit_that_training_did_not_have_is_no_number(words: Sequence[str], unit: str, others: Sequence[str]) -> None:
    import pyarrow

    column = pyarrow.chunked_array([words])
    form = find_forms({"x": column})["x"]
    assert form["unit"] == unit
    assert None not in ColumnReader(written=form).rewrite(column).to_pylist()
    assert ColumnReader(written=form).count_other_units(column) == {}
    unknown = pyarrow.chunked_array([[*others, words[0], None, "word"]])
    *read_others, known, missing, text = ColumnReader(written=form).rewrite(unknown).to_pylist()
    assert (read_others, missing, text) == ([None] * len(others), None, "word")
    assert known == ColumnReader(written=form).rewrite(column).to_pylist()[0]
    assert ColumnReader(written=form).count_other_units(unknown).total() == len(others)


def test_a_unit_is_no_number_if_training_had_none() -> None:
    import pyarrow

    form = find_forms({"x": pyarrow.chunked_array([["1,5", "2,25"]])})["x"]
    assert (
        form["unit"],
        ColumnReader(written=form).rewrite(pyarrow.chunked_array([["1,5", "2,25 €"]])).to_pylist(),
    ) == (
        "",
        ["1.5", "2,25 €"],
    )


def test_columns_with_several_units_are_refused() -> None:
    import pyarrow

    columns = {"x": pyarrow.chunked_array([[f"${n}.25" for n in range(20)] + ["7.50 €"]])}
    with pytest.raises(ConfigError) as refusal:
        find_forms(columns, inputs=["x"])
    assert r"the column x has numbers with several units: $ (20), EUR (1); write" in str(refusal.value)
    assert "dataset.numeric" in str(refusal.value)
    with pytest.raises(ConfigError) as refusal:  # a target
        find_forms(columns)
    assert "dataset.numeric" not in str(refusal.value)
    form = find_forms(columns, numeric=["x"], inputs=["x"])["x"]
    assert ColumnReader(written=form).rewrite(columns["x"]).to_pylist()[-2:] == ["19.25", None]


def test_numbers_with_a_unit_in_some_rows_only_are_noted() -> None:
    import pyarrow

    columns = {"x": pyarrow.chunked_array([["12.5%", "3%", "0.125", "3%", None]])}
    (note,) = describe_bare_numbers(columns, find_forms(columns))
    assert note == "dataset: x: 1 of 4 numbers have no unit, and are read in %"


def infer(words: Sequence[str | None]) -> str:
    import pyarrow

    column = pyarrow.chunked_array([pyarrow.array(words, pyarrow.string())])
    return str(infer_type("x", column, lambda row: f"row {row}", "drop it").type)


def test_columns_of_values_with_a_mark_for_missing_ones_are_refused() -> None:
    gaps = lambda value, mark: [mark if n % 4 == 0 else value(n) for n in range(60)]  # noqa: E731
    with pytest.raises(ConfigError, match=r"the column x has '-' \(row 0\), and 45 of its 60 values are numbers; add"):
        infer(gaps(lambda n: f"{n}.5", "-"))
    with pytest.raises(ConfigError, match=r"has '0000-00-00' \(row 0\), and 45 of its 60 values are dates"):
        infer(gaps(lambda n: f"2024-03-{n // 2 + 1:02d}", "0000-00-00"))
    assert infer(["1", "2", "3", "A"] * 20) == "string"  # few different values: categories
    assert infer(["0x1F", "0x20"]) == "string"  # not a number in every door
    assert infer(["7", "-8", None]) == "int64"


@pytest.mark.parametrize(
    ("word", "is_like"),
    [("{n}.5 kg", True), ("{n}. Mai 2024", True), ("0.{n}k", True), ("Type {n}b", False), ("a1", False)],
)
def test_words_that_may_be_values_are_noticed(word: str, is_like: bool) -> None:
    import pyarrow

    assert is_like_values(pyarrow.chunked_array([[word.format(n=n) for n in range(60)]])) == is_like


@pytest.mark.parametrize(
    ("word", "is_like"),
    [
        ("{n}.5 kg", True),
        ("1,{n} km/h", True),
        ("{n} m\u00b2", True),
        ("{n}{n}A", True),
        ("B{n}", False),
        ("{n}:30", False),
    ],
)
def test_numbers_with_one_unit_are_noticed_also_if_they_repeat(word: str, is_like: bool) -> None:
    import pyarrow

    words = [word.format(n=n) for n in range(10, 60)] * 4
    assert is_like_values(pyarrow.chunked_array([words])) == is_like
    assert not is_like_values(pyarrow.chunked_array([["36 months", "60 months"] * 100]))  # few words: categories
