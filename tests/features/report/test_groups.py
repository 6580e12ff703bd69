"""The report of rows that belong together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from scaleflow.evaluation.outputs import analyse_output
from scaleflow.evaluation.predictions import GROUP
from scaleflow.features.report.slices import find_slices
from tests.evaluation.made import BINARY
from tests.evaluation.test_groups import make_visits
from tests.features.report.made import Reader, report_in


def test_the_report_says_what_is_drawn_and_that_few_groups_are_rough(tmp_path: Path) -> None:
    report = report_in(tmp_path, make_visits(np.arange(12) < 8), Reader())
    page = report.page
    assert "intervals over 12 groups of customer." in page
    assert json.loads((report.folder / "metrics.json").read_text())["intervals_over"] == "12 groups of customer"
    assert "few groups" not in {each.rule for each in report.findings}
    report = report_in(tmp_path, make_visits(np.arange(5) < 3), Reader())
    assert next(each.text for each in report.findings) == "intervals are rough, over 5 groups of customer"
    unequal = make_visits(np.arange(13) < 9, GROUP, np.repeat([0] * 12 + [1], 20))
    assert unequal.units is not None
    assert unequal.units.describe() == "2 groups of customer (unequal: as 1 of one size)"


def test_a_customer_is_no_weak_slice() -> None:
    """A slice of few customers that are all wrong may be chance; one of many is not."""
    made = make_visits(np.arange(60) % 6 > 0)
    analysis = analyse_output(made, "", BINARY, 0)
    customers = np.repeat(np.arange(60), 20)
    for column, is_weak in ((np.isin(customers, [0, 6]), False), (customers % 6 == 0, True)):
        plain = replace(made, table=made.table.drop_columns([GROUP]))
        columns, read = {"town": np.where(column, "b", "a")}, np.arange(1200)
        found = {row["slice"]: row["is_weak"] for row in find_slices(made, analysis, columns, read, 50)}
        assert found["b"] is is_weak
        assert {row["slice"]: row["is_weak"] for row in find_slices(plain, analysis, columns, read, 50)}["b"]
