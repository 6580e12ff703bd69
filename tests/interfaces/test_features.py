"""How features are found."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import features
from scaleflow.interfaces.features import Feature, find_taken_default, list_features, order_by_needs

MINE = Feature(name="mine")
DOCTOR = Feature(name="doctor")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """The entry points that installed packages have."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(features, "entry_points", lambda group: points)
    list_features.cache_clear()
    yield points
    list_features.cache_clear()


def point(value: str) -> EntryPoint:
    return EntryPoint("theirs", value, features.ENTRY_POINTS)


def test_an_installed_package_adds_a_feature(found: list[EntryPoint]) -> None:
    assert "mine" not in list_features()
    list_features.cache_clear()
    found.append(point(f"{__name__}:MINE"))
    assert list_features()["mine"] is MINE
    assert list(list_features())[-1] == "mine"  # after those of scaleflow
    names = list(list_features())
    assert names.index("checks") < names.index("predict") < names.index("language")


def test_a_feature_that_cannot_be_imported_is_named_and_skipped(
    found: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    found += [point("no_such_module:FEATURE"), point(f"{__name__}:point"), point(f"{__name__}:ABSENT")]
    names = set(list_features())
    assert {"doctor", "pipelines"} <= names
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    start = "scaleflow: the feature the entry point theirs"
    assert (
        lines[0]
        == f"{start} = no_such_module:FEATURE is skipped: it cannot be imported: No module named 'no_such_module'"
    )
    assert lines[1].endswith("it cannot be imported: function is no Feature")
    assert "has no attribute 'ABSENT'" in lines[2]


def test_two_features_with_one_name_are_refused(found: list[EntryPoint]) -> None:
    found.append(point(f"{__name__}:DOCTOR"))
    with pytest.raises(ConfigError, match="there is another feature 'doctor'"):
        list_features()


def test_a_feature_whose_needs_are_not_there_is_skipped_and_so_are_those_that_need_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {
        "first": Feature(name="first", needs=("absent",)),
        "other": Feature(name="other"),
        "second": Feature(name="second", needs=("first", "other")),
    }
    assert list(order_by_needs(given)) == ["other"]
    assert capsys.readouterr().err.splitlines() == [
        "scaleflow: the feature first is skipped: it needs absent, which is not there",
        "scaleflow: the feature second is skipped: it needs first, which is skipped",
    ]


def test_features_that_need_each_other_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    given = {
        "first": Feature(name="first", needs=("second",)),
        "other": Feature(name="other"),
        "second": Feature(name="second", needs=("first",)),
    }
    assert list(order_by_needs(given)) == ["other"]
    assert capsys.readouterr().err.splitlines() == [
        "scaleflow: the feature first is skipped: it needs second, which is skipped",
        "scaleflow: the feature second is skipped: it needs first, which is skipped",
    ]


def test_a_feature_comes_after_those_that_it_needs() -> None:
    given = {
        "again": Feature(name="again", needs=("base", "alone")),
        "alone": Feature(name="alone"),
        "base": Feature(name="base", needs=("tools",)),
        "last": Feature(name="last"),
        "tools": Feature(name="tools"),
    }
    assert list(order_by_needs(given)) == ["alone", "last", "tools", "base", "again"]


def test_what_a_package_prints_when_it_is_imported_is_no_answer_of_the_command(
    found: list[EntryPoint], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "loud_feature.py").write_text("print('hello')\nraise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    found.append(point("loud_feature:FEATURE"))
    assert "doctor" in list_features()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "hello",
        "scaleflow: the feature the entry point theirs = loud_feature:FEATURE is skipped: it cannot be imported: "
        "it calls sys.exit(3)",
    ]


def test_two_features_cannot_have_one_default_option() -> None:
    first = Feature(name="first", defaults=("options", {"first": "default"}))
    assert find_taken_default(Feature(name="second", defaults=("options",)), [first]) != ""
    assert find_taken_default(Feature(name="second", defaults=({"first": "usual"},)), [first]) != ""
    assert find_taken_default(Feature(name="second", defaults=({"second": "default"},)), [first]) == ""
