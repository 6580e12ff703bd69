from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from scaleflow.pages.charts import (
    MAX_TICKS,
    Chart,
    choose_log_ticks,
    choose_ticks,
    compose_picture,
    draw_confusion_matrix,
    draw_legend,
    draw_rates,
    find_size,
)

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3.2, 17), (1e-7, 3e-7), (0, 123_456)])
def test_ticks_are_few_and_within_the_axis(low: float, high: float) -> None:
    ticks = choose_ticks(low, high)
    assert 3 <= len(ticks) <= 7
    assert low <= min(ticks) + 1e-12
    assert max(ticks) <= high * (1 + 1e-9)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1, 100, [1, 2, 5, 10, 20, 50, 100]),
        (16, 300, [20, 50, 100, 200]),
        (1e-6, 1, [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1]),
    ],
)
def test_a_logarithmic_axis_has_round_ticks(low: float, high: float, ticks: list[float]) -> None:
    assert choose_log_ticks(low, high) == pytest.approx(ticks)


def test_a_wide_logarithmic_axis_has_few_ticks() -> None:
    ticks = choose_log_ticks(1e-20, 1e10)
    assert 3 <= len(ticks) <= MAX_TICKS


def test_equal_factors_are_equally_far_apart_on_a_logarithmic_axis() -> None:
    chart = Chart("t", (1, 100), (0, 1), labels=("x", "y"), log="x").add_line([1, 10, 100], [0, 0, 0])
    (line,) = ElementTree.fromstring(chart.to_svg()).iter(f"{SVG}polyline")
    places = [float(point.partition(",")[0]) for point in line.attrib["points"].split()]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2)


def test_stacked_bars_begin_where_those_before_end() -> None:
    chart = Chart("t", (0, 2), (0, 4), labels=("x", "y"))
    chart.add_bars([0, 1, 2], [1, 2]).add_bars([0, 1, 2], [1, 2], bottoms=[1, 2], colour="red")
    first, _, second, _ = ElementTree.fromstring(chart.to_svg()).iter(f"{SVG}rect")
    assert float(second.attrib["y"]) + float(second.attrib["height"]) == pytest.approx(float(first.attrib["y"]))
    assert second.attrib["style"] == "fill:red"


def test_the_cells_of_a_confusion_matrix_say_what_they_count() -> None:
    picture = ElementTree.fromstring(draw_confusion_matrix("m", [[3, 1], [0, 2]], ["cat", "<dog>"]))
    titles = [each.text for each in picture.iter(f"{SVG}title")]
    assert titles == [
        "m",
        "cat, predicted as cat: 3 (75.0%)",
        "cat, predicted as <dog>: 1 (25.0%)",
        "<dog>, predicted as <dog>: 2 (100.0%)",
    ]


def test_a_picture_holds_rows_of_charts_below_its_title() -> None:
    rates = draw_rates("rates", ["a", "b"], [(0.5, 0.4, 0.6), (math.nan, math.nan, math.nan)])
    legend = draw_legend([("one & all", "red")])
    picture = compose_picture("a < b", [[rates, legend], [rates]])
    root = ElementTree.fromstring(picture)
    charts = root.findall(f"{SVG}svg")
    width, height = find_size(rates)
    assert [int(each.attrib["x"]) for each in charts] == [0, width, 0]
    tops = [int(each.attrib["y"]) for each in charts]
    assert tops[1] == tops[0]
    assert tops[2] == tops[0] + max(height, find_size(legend)[1])
    assert int(root.attrib["height"]) == tops[2] + height
    assert "".join(root.itertext()).count("a < b") == 2, "read aloud and seen"


def test_what_is_no_chart_has_no_size() -> None:
    assert find_size('<img src="a" width="3">') == (0, 0)
