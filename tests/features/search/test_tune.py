"""`scaleflow tune`: what it searches, what it refuses, and a real search that the same command continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError
from scaleflow.features.search.tune import choose_space, search
from tests.conftest import Command

MODEL = {"units": [32, 16], "dropout": 0.0}


@pytest.mark.parametrize(
    ("config", "typed", "space"),
    [
        (
            {"optimizer": {"learning_rate": 0.001}, "training": {"batch_size": 32}, "model": MODEL},
            set(),
            [
                "optimizer.learning_rate=tag(log,interval(0.0001,0.01))",
                "training.batch_size=32,64,128,256",
                "model.dropout=interval(0.0,0.5)",
                "model.units=[32,16],[64,32],[128,64]",
            ],
        ),
        (
            {
                "optimizer": {"learning_rate": 0.003, "weight_decay": 0.004},
                "training": {"batch_size": "by_size"},
                "model": {"units": "by_size", "members": "by_size"},
            },
            {"optimizer.learning_rate"},
            [
                "optimizer.weight_decay=tag(log,interval(1e-5,1e-1))",
                "training.batch_size=64,128,256,512",
                "model.units=[64,64,64],[128,128,128],[256,256,256]",
            ],
        ),
        (
            {"optimizer": {}, "training": {"batch_size": "auto"}, "model": {"width": 64, "blocks": 2, "units": None}},
            set(),
            ["model.width=64,128,256", "model.blocks=2,4,6"],
        ),
    ],
)
def test_what_is_searched_follows_from_the_config(config: Any, typed: set[str], space: list[str]) -> None:
    assert choose_space(config, typed) == space


@pytest.mark.parametrize(
    ("words", "minutes", "trials", "reason"),
    [
        ((), 0, None, "--minutes 0: expected a number above 0"),
        ((), 10, 0, "--trials 0: expected a number from 1"),
        (("hydra/sweeper=grid",), 10, None, "hydra/sweeper: this command chooses it"),
        (("hydra.sweep.dir=x",), 10, None, "hydra.sweep.dir: this command chooses it; leave it out, or use --folder"),
        (("model.unist=3",), 10, None, "model.unist"),
    ],
)
def test_a_search_that_cannot_begin_is_refused(words: Any, minutes: float, trials: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        search(words, minutes, trials, None, ())


@pytest.mark.slow
def test_the_best_job_is_trained_once_more_and_the_same_command_continues(command: Command) -> None:
    words = ("dataset=digits", "training.max_steps=8", "training.batch_size=64", "checkpoint=none", "hardware=cpu")
    own = ("model.units=8,[16,8]", "optimizer.learning_rate=0.01", "evaluation=none")
    typed = ("tune", *words, *own, "--minutes", "5", "--json")
    first = command.python("-m", "scaleflow", *typed, "--trials", "2", "--folder", "found")
    assert first.returncode == 0, first.stderr
    assert "jobs    2 of 2 FINISHED" in first.stdout
    answer = json.loads(first.stdout.splitlines()[-1])
    assert answer["status"] == "FINISHED"
    best = json.loads(command.python("-m", "scaleflow", "best", "found", "--json").stdout.splitlines()[-1])
    config = Path(command.folder, answer["folder"], "config.yaml").read_text()
    assert "validation: null" in config
    (dropout,) = (word.partition("=")[2] for word in best["overrides"] if word.startswith("model.dropout="))
    assert f"dropout: {dropout}" in config
    again = command.python("-m", "scaleflow", *typed, "--trials", "3", "--folder", "found", "--no-refit")
    assert again.returncode == 0, again.stderr
    assert "jobs    1 of 1 FINISHED" in again.stdout
