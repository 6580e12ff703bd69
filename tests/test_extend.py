"""docs/extend.md is true: its examples, put where it says, train by its commands."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaleflow.testing import Events
from tests.processes import ROOT

PAGE = (ROOT / "docs" / "extend.md").read_text()
ALL_COMMANDS = re.findall(r"^    (?:python -m )?scaleflow (.*)$", PAGE, re.M)

#: Those of the feature that the page installs; and the others.
OF_THE_FEATURE = [line for line in ALL_COMMANDS if line.startswith("lines")]
COMMANDS = [line for line in ALL_COMMANDS if line not in OF_THE_FEATURE]

#: What each command is known by, and the accuracy that it reaches at least; guessing has a tenth on digits, else half.
TRAINED = {
    "dataset=pumps debug": 0.0,
    "dataset=points training": 0.85,
    "my_objects.as_iterator": 0.85,
    "my_objects.as_tf_data": 0.85,
    "dataset=pumps training": 0.85,
    "dataset=reviews": 0.85,
    "model=desk": 0.9,
    "model=sound": 0.85,
    "model=houses": 0.9,
    "model=tagger": 0.8,
    "my_steps.consistent": 0.8,
    "my_steps.TwoRates": 0.8,
    "my_callbacks.Halve": 0.8,
    "optimizer=signum": 0.8,
}

#: Commands that have a process of their own: two need two devices, and `make test` runs model=houses alone.
ALONE = ("model=houses", "my_steps.TwoRates", "optimizer=signum")
TOGETHER = {"one device": [name for name in TRAINED if name not in ALONE], **{name: [name] for name in ALONE}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the page shows, and the recordings that one of them makes."""
    folder = tmp_path_factory.mktemp("extend")
    for name, text in re.findall(r"<!-- test: (\S+) -->\n```\w+\n(.*?)```", PAGE, re.S):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (script,) = re.findall(r"^    python (\w+\.py)$", PAGE, re.M)
    subprocess.run([sys.executable, script], cwd=folder, check=True, timeout=240)
    return folder


def run_commands(folder: str, commands: list[list[str]]) -> list[tuple[int, str]]:
    """Commands in this process: (exit code, what it printed) of each."""
    from scaleflow.cli import main

    os.chdir(folder)
    results = []
    for words in commands:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = main(words)
        results.append((code, printed.getvalue()))
    return results


def test_every_command_is_tried() -> None:
    assert [[name for name in TRAINED if name in line] for line in COMMANDS] == [[name] for name in TRAINED]


def test_two_inputs_and_two_outputs_take_at_most_40_lines() -> None:
    blocks = re.findall(r"<!-- test: my_conf/\S*houses\.\w+ -->\n```\w+\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 3
    assert sum(len(block.splitlines()) for block in blocks) <= 40


def test_the_feature_takes_at_most_80_lines() -> None:
    blocks = re.findall(r"<!-- test: feature/\S+ -->\n```\w+\n# \S+\n(.*?)```", PAGE, re.S)
    assert len(blocks) >= 6
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]
    assert len(lines) <= 80


def test_every_block_of_code_is_tried() -> None:
    assert PAGE.count("<!-- test: ") == len(re.findall(r"^```(?:python|yaml|toml)$", PAGE, re.M))


def own_tests_and_app(folder: str, app: list[str]) -> None:
    """The page's own tests, and its Hydra app by its command, in this process."""
    os.chdir(folder)
    sys.path.insert(0, f"{folder}/my_conf")
    tests = runpy.run_path("my_conf/test_mine.py")
    called = [tests[name]() for name in tests if name.startswith("test_")]
    assert len(called) == 4
    sys.argv = [*app, "+train.debug.inline=true", "tracking@train.tracking=none", "train.dataset.examples=200"]
    runpy.run_path(app[0], run_name="__main__")


@pytest.mark.slow
def test_the_pages_tests_pass_and_its_hydra_app_trains(isolated: Callable[..., Any], folder: Path) -> None:
    (line,) = re.findall(r"^    python (app/.*)$", PAGE, re.M)
    isolated(own_tests_and_app, str(folder), shlex.split(line), timeout=240)
    (run,) = folder.glob("outputs/*/*/training")
    told = Events.of(run)
    assert told.status == "FINISHED"
    assert (told.params["model"], told.params["dataset.seed"], told.params["training.epochs"]) == ("linear", "3", "3")
    assert told.params["optimizer"] == "sgd"


def words_of(name: str, folder: Path) -> list[str]:
    (line,) = [line for line in COMMANDS if name in line]
    own = ["tracking=none", "checkpoint=none", "debug=inline"]
    place = f"hydra.run.dir={folder}/runs/{list(TRAINED).index(name)}"
    return list(dict.fromkeys([*shlex.split(line), *own, place]))


@pytest.mark.parametrize("names", TOGETHER.values(), ids=TOGETHER)
def test_a_command_trains(isolated: Callable[..., Any], folder: Path, names: list[str]) -> None:
    results = isolated(run_commands, str(folder), [words_of(name, folder) for name in names], timeout=480)
    for name, (code, printed) in zip(names, results, strict=True):
        assert code == 0, printed
        (accuracy,) = re.findall(r"test (?:sold |team )?accuracy +(\S+)", printed)
        assert float(accuracy) >= TRAINED[name], (name, printed)
        if name == "my_callbacks.Halve":
            assert "learning rate 0.01" in printed


def install(folder: Path, environment: Path) -> Path:
    """Makes an environment with what this one has and the page's feature; returns its Python."""
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/*/site-packages")
    inherited = [str(ROOT), *(path for path in sys.path if path.endswith("-packages"))]
    packages.joinpath("inherited.pth").write_text("\n".join(inherited))
    for name in ("metric_lines", "metric_lines/conf"):
        (folder / "feature" / name / "__init__.py").touch()
    options = ["--no-build-isolation", "--no-deps", "--quiet", "--disable-pip-version-check", "--target", str(packages)]
    command = [sys.executable, "-m", "pip", "install", *options, str(folder / "feature")]
    subprocess.run(command, check=True, timeout=400)
    return python


@pytest.mark.slow
def test_the_pages_feature_is_installed_and_works(folder: Path, tmp_path: Path) -> None:
    python, work = install(folder, tmp_path / "environment"), tmp_path / "work"
    work.mkdir()

    def run(words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-m", "scaleflow", *shlex.split(words)], cwd=work, capture_output=True, text=True, timeout=400
        )

    train, show = OF_THE_FEATURE
    trained = run(f"{train} tracking=none")
    assert trained.returncode == 0, trained.stderr
    lines = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    assert any("test/loss" in line for line in lines)
    assert lines[0]["run"]
    losses = [line["train/loss"] for line in lines if "perf/step_ms" in line]
    progress = [line["train/progress"] for line in lines if "train/progress" in line]
    assert progress == [losses[0] - losses[1]]
    (page,) = work.glob("outputs/*/*/evaluation/report.html")
    assert "<h2>Widths of the intervals</h2>" in page.read_text()
    shown = run(show)
    assert json.loads(shown.stdout) == lines[-1]

    refused = run("lines.every=2")
    assert (refused.returncode, refused.stderr.strip()) == (
        2,
        "scaleflow: lines.every=2 with lines.file=null: there is no file to write to; set lines.file=PATH",
    )
    assert "expected an integer, at least 1" in run("lines.every=0").stderr
    assert "did you mean lines.file" in run("lines.fil=a").stderr
    assert "scaleflow lines " in run("--help").stdout
    failed = run("lines.file=no/such/folder/x training.max_steps=2 tracking=none")
    assert failed.returncode == 0, failed.stderr
    assert failed.stdout.count("note: the feature lines: missing") == 1
