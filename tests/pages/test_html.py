"""The parts of pages, the CSV files beside them, and contact sheets."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scaleflow.interfaces.estimate import Estimate, describe_estimate
from scaleflow.pages.files import to_csv, write_files
from scaleflow.pages.html import MAX_CHARACTERS, compose_section, make_page, make_table, shorten_value
from scaleflow.pages.pictures import SIDE, draw_sheet


def test_a_figure_is_written_with_its_interval() -> None:
    assert describe_estimate(Estimate(0.98051, 0.9671, 0.9899)) == "0.9805 (0.967 to 0.99)"
    assert describe_estimate(Estimate(0.98051)) == "0.9805"


def test_a_table_shows_values_by_their_kind_and_leaves_empty_columns_out() -> None:
    rows = [
        {"name": "<a>", "rows_read": 12345, "rate": Estimate(0.5, 0.4, 0.6), "empty": None, "is_new": True},
        {"name": "b", "rows_read": 1, "rate": Estimate(float("nan")), "empty": "", "is_new": False},
    ]
    table = make_table(rows)
    assert '<th>name</th><th class="number">rows read</th><th class="number">rate</th><th>is new</th>' in table
    assert (
        '<td>&lt;a&gt;</td><td class="number">12,345</td><td class="number">0.5 (0.4 to 0.6)</td><td>yes</td>' in table
    )
    assert '<td>b</td><td class="number">1</td><td class="number"></td><td></td>' in table
    assert make_table(rows, ["rate", "name"]).count("<th") == 2
    assert make_table([]) == make_table([{"a": None}]) == ""


def test_a_section_without_parts_is_left_out() -> None:
    page = make_page("A & B", "about", [compose_section("Empty", "", ""), compose_section("Full", "", "<p>text</p>")])
    assert "<title>A &amp; B</title>" in page
    assert "Empty" not in page
    assert "<section><h2>Full</h2><p>text</p></section>" in page


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, ""), (b"word", "word"), (np.str_("word"), "word"), (np.float32(0.5), 0.5), (np.int64(3), 3), (7, 7)],
)
def test_values_of_arrays_become_plain_ones(value: object, shown: object) -> None:
    assert shorten_value(value) == shown
    assert not isinstance(shorten_value(value), np.generic) or isinstance(value, np.str_)


def test_long_texts_are_cut() -> None:
    assert shorten_value("x" * MAX_CHARACTERS) == "x" * MAX_CHARACTERS
    assert shorten_value("x" * (MAX_CHARACTERS + 1)) == "x" * (MAX_CHARACTERS - 1) + "…"


def test_a_figure_has_three_columns_in_a_csv_file_and_nan_is_empty(tmp_path: Path) -> None:
    text = to_csv([{"name": "a", "rate": Estimate(0.5, 0.4, 0.6)}, {"name": "b", "rate": float("nan"), "more": 1}])
    write_files(tmp_path, {"tables/rates.csv": text, "sheet.png": b"png"})
    assert (tmp_path / "tables" / "rates.csv").read_text().splitlines() == [
        "name,rate,rate_low,rate_high,more",
        "a,0.5,0.4,0.6,",
        "b,,,,1",
    ]
    assert (tmp_path / "sheet.png").read_bytes() == b"png"


def test_a_contact_sheet_has_rows_of_pictures() -> None:
    pictures = [np.full((2, 4, 1), 40 * n, np.uint8) for n in range(5)]
    sheet = Image.open(io.BytesIO(draw_sheet(pictures, in_a_row=3)))
    assert sheet.size == (3 * SIDE, 2 * SIDE)
    assert sheet.getpixel((SIDE // 2, SIDE + SIDE // 2)) == (120, 120, 120)
    assert sheet.getpixel((SIDE // 2, SIDE + 2)) == (0, 0, 0)
