"""The record of what a run learned: what is written is what is read."""

import json
from pathlib import Path

import pytest

from scaleflow.errors import ConfigError
from scaleflow.interfaces import (
    EarlierState,
    Inputs,
    LearnedPreprocessing,
    LearnedState,
    Outputs,
    extend_classes,
    name_class,
    to_plain,
)
from scaleflow.runs.learned_state import find_learned_state, read_learned_state, to_files, write_learned_state

SINGLE = LearnedState(Inputs((3,), scale=1 / 255), Outputs("regression", (1,), scaling=(1.5, 0.1)))
SEVERAL = LearnedState(
    {"age": Inputs(()), "words": {"title": Inputs((), "string")}},
    {"a": Outputs("binary", (1,), ("no", "yes")), "b": Outputs("classification", (4, 3), ignore=-1)},
    {"words/title": LearnedPreprocessing("x.Text", {"tokens": 3}, ["a", "b"])},
    "x.Table",
    {"columns": {"age": "numbers"}, "missing": ["", "NA"]},
    {"train": {"examples": 3, "digest": "0f"}},
)


@pytest.mark.parametrize("state", [SINGLE, SEVERAL])
def test_a_record_is_read_as_it_was_written(tmp_path: Path, state: LearnedState) -> None:
    write_learned_state(tmp_path, state)
    assert read_learned_state(tmp_path) == state
    assert [path.name for path in tmp_path.iterdir()] == ["learned_state.json"]


def test_long_lists_of_numbers_lie_beside_it(tmp_path: Path) -> None:
    means = [n / 3 for n in range(1001)]
    words = [str(n) for n in range(1001)]
    learned = {"mean": means, "few": [1.5], "words": words}
    write_learned_state(
        tmp_path, LearnedState(SINGLE.inputs, SINGLE.outputs, {"": LearnedPreprocessing("x", {}, learned)})
    )
    found = read_learned_state(tmp_path)
    assert found is not None
    assert found.preprocessing[""].learned == learned
    record = json.loads((tmp_path / "learned_state.json").read_text())
    assert record["preprocessing"][""]["learned"] == {"mean": {"array": "0"}, "few": [1.5], "words": words}
    assert (tmp_path / "learned_state.npz").is_file()


def test_unreadable_records_are_refused_in_words(tmp_path: Path) -> None:
    assert find_learned_state(tmp_path) is None
    with pytest.raises(ConfigError, match=r"learned_state.json: .* cannot be read: .*No such file"):
        read_learned_state(tmp_path)
    path = tmp_path / "learned_state.json"
    record = json.loads(to_files(SINGLE)[path.name])
    for content, reason in (
        (json.dumps({**record, "format": 2}), "it has the format 2, and this version reads up to 1"),
        (json.dumps({**record, "inputs": 3}), "it is not a record of scaleflow"),
        (json.dumps([]), "it is not a record of scaleflow"),
        ("{", "Expecting property name"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=reason):
            read_learned_state(tmp_path)


def test_options_are_masked_and_words_are_not(tmp_path: Path) -> None:
    learned = LearnedPreprocessing("x.Own", {"api_key": "hidden-value-1"}, ["api_key"])
    state = LearnedState(SINGLE.inputs, SINGLE.outputs, {"": learned}, reading={"password": "hidden-value-2"})
    content = b"".join(to_files(state).values()).decode()
    assert "hidden-value" not in content
    assert '"api_key"' in content


def test_classes_are_extended_after_the_known_ones() -> None:
    binary = Outputs("binary", (1,), ("no", "yes"))
    assert extend_classes(binary, ["yes", "no"]) is binary
    assert extend_classes(binary, ["maybe", "no"]) == Outputs("classification", (3,), ("no", "yes", "maybe"))
    several = Outputs("classification", (3,), ("b", "a", "c"))
    assert extend_classes(several, ["a", "x"]) == Outputs("classification", (4,), ("b", "a", "c", "x"))


def test_an_earlier_state_says_what_an_unknown_class_becomes() -> None:
    assert EarlierState(SEVERAL).find_outputs("a") == Outputs("binary", (1,), ("no", "yes"))
    assert EarlierState(SEVERAL, unknown_class=-1).find_outputs("a") == Outputs("binary", (1,), ("no", "yes"), -1)
    assert EarlierState(SINGLE, unknown_class=-1).find_outputs() == SINGLE.outputs
    assert EarlierState(SEVERAL).find_outputs() is None
    assert EarlierState(SEVERAL).find_reading(SINGLE) == {}
    assert name_class(SINGLE) == "scaleflow.interfaces.learned_state.LearnedState"
    plain = {"shape": [2], "dtype": "float32", "scale": None, "vocabulary": None, "quantiles": None, "kind": None}
    assert to_plain({"a": (1, Inputs((2,)))}) == {"a": [1, plain]}
