"""What `rerun --exact` allows, and what it refuses before anything is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scaleflow.config.compose import CommandWords
from scaleflow.errors import ConfigError
from scaleflow.features.compare.exact import (
    check_repeatable,
    compare_with_here,
    describe_categories,
    list_lengths,
    list_resolved_changes,
    parse_despite,
    refuse_differences,
)
from scaleflow.runs import RunFolder
from scaleflow.runs.provenance.record import Provenance
from scaleflow.runs.run import Run
from tests.features.compare import fake_run
from tests.runs.test_provenance import FIRST

PARAMS = {
    "model": "mlp",
    "model.units": "[64]",
    "seed": "0",
    "training.epochs": "2",
    "dataset": "table",
    "dataset.data_dir": "a.csv",
    "dataset.delimiter": "null",
    "checkpoint.export": "last",
    "resolved.strategy": "one_device",
}


def make_run(*states: Provenance, **params: str) -> Run:
    return fake_run(Path("gone"), settings={**PARAMS, **params}, states=states or [FIRST])


@pytest.mark.parametrize(
    "word",
    [
        *("hydra.run.dir=x", "tracking.uri=sqlite:///x.db", "tracking=none", "checkpoint.folder=/x", "checkpoint=none"),
        *("profiler=trace", "dataset.data_dir=/elsewhere/a.csv", "seed=0", "model.units=[64]", "training.epochs=2"),
        "dataset.delimiter=null",
    ],
)
def test_places_and_the_config_of_the_run_are_allowed(word: str) -> None:
    check_repeatable(make_run(), CommandWords([word]))


@pytest.mark.parametrize(
    "word",
    [
        *(
            "training.epochs=3",
            "model.units=[32]",
            "model=mlp",
            "seed=1",
            "checkpoint.export=best",
            "strategy=mirrored",
        ),
        *("dataset.delimiter=/", "dataset=csv", "~dataset.delimiter", "+training.more=1"),
    ],
)
def test_another_config_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--exact repeats a run with its own config"):
        check_repeatable(make_run(), CommandWords([word]))


def test_runs_that_cannot_be_repeated_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="no run repeats one with strategy=parameter_server exactly: its workers"):
        check_repeatable(make_run(**{"resolved.strategy": "parameter_server"}), CommandWords())
    with pytest.raises(ConfigError, match="this run looked for a setting, which depends on the speed"):
        check_repeatable(make_run(find="lr"), CommandWords())


def test_categories_are_words_with_commas() -> None:
    assert parse_despite("") == ()
    assert parse_despite("code, data") == ("code", "data")
    with pytest.raises(ConfigError, match="--despite machines: expected code, packages, data, machine; did you mean"):
        parse_despite("machines")


def test_differences_are_listed_and_refused_unless_they_may_be() -> None:
    here = replace(FIRST, packages={**FIRST.packages, "numpy": "2.2"}, machine={"CPU": "y"}, data={"files": {}})
    first = replace(FIRST, data={"files": {}})
    later = replace(
        first, resume=2, packages={**FIRST.packages, "numpy": "2.2"}, data={"files": {"a": ["all:1", 1, 0]}}
    )
    run = make_run(first, later)
    found = compare_with_here(run, here)
    assert list(describe_categories(found, [])) == [
        "code: the same",
        "packages: numpy 2.1 -> 2.2",
        "data: a, since its resume 2, is gone",
        "machine: CPU x -> y",
    ]
    with pytest.raises(ConfigError, match=r"packages: numpy 2\.1 -> 2\.2; machine: CPU x -> y") as refused:
        refuse_differences(run, found, ("data",), can_check_out=True)
    assert str(refused.value).endswith("or add --despite data,packages,machine to run all the same")
    refuse_differences(run, found, ("data", "packages", "machine"), can_check_out=True)
    with pytest.raises(ConfigError, match="code: not known; packages: not known; data: not known; machine: not known"):
        refuse_differences(make_run(Provenance()), compare_with_here(make_run(Provenance()), here), (), False)


def test_a_run_that_was_trained_longer_is_repeated_as_long(tmp_path: Path) -> None:
    files = RunFolder(tmp_path)
    assert list_lengths(fake_run(tmp_path)) == []
    for number, words in ((1, "- training.epochs=4\n- checkpoint=none\n"), (2, "[]"), (3, "- training.epochs=6\n")):
        files.resume_overrides(number).write_text(words)
    run = fake_run(tmp_path, settings=PARAMS, states=[FIRST])
    assert list_lengths(run) == ["training.epochs=6"]
    check_repeatable(run, CommandWords())
    with pytest.raises(ConfigError, match=r"with training\.epochs=6, and the rate of optimizer\.schedule=cosine"):
        check_repeatable(fake_run(tmp_path, settings={**PARAMS, "optimizer.schedule": "cosine"}), CommandWords())


def test_what_auto_stood_for_explains_other_results() -> None:
    second: dict[str, Any] = {**PARAMS, "resolved.strategy": "mirrored", "seed": "1"}
    assert list_resolved_changes(PARAMS, second) == ["strategy was one_device and is mirrored"]
