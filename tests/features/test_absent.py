"""Without the folder of a feature, everything else works, and the words of the feature are unknown."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path

import pytest

from scaleflow.interfaces.features import Feature, list_features

ROOT = Path(__file__).parents[2]

#: Runs commands in one process, each with its words in a line of standard input. Prints the exit code of each.
COMMANDS = """
import sys
from scaleflow.cli import main

for line in sys.stdin.read().splitlines():
    try:
        code = main(line.split())
    except SystemExit as leaving:
        code = leaving.code
    print("exit code", code, "of", line, flush=True)
"""

#: The table that a run is trained on.
ROWS = "\n".join(["area,price", *(f"{place % 17},{3 * (place % 17)}" for place in range(200))])

SMALL = "training.epochs=1 training.batch_size=64 debug.inline=true"

#: What has to work in any case.
ALWAYS = (
    "--help",
    "--cfg job",
    f"{SMALL} hydra.run.dir=first",
    f"{SMALL} dataset=csv dataset.data_dir=rows.csv dataset.target=price model=mlp",
    "-m training.epochs=1 training.batch_size=32,64 hydra.sweep.dir=sweep",
    "resume=first training.epochs=2 debug.inline=true",
)


def hide(names: Collection[str], folder: Path) -> Path:
    """Copies the package without some features; returns the folder of the copy."""
    package = folder / "package"
    for name in ("scaleflow", "hydra_plugins"):
        shutil.copytree(ROOT / name, package / name)
    for name in names:
        shutil.rmtree(package / "scaleflow" / "features" / name)
    return package


def run_commands(lines: Collection[str], package: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input="\n".join(lines),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(package), "SCALEFLOW_WARM": "0"},
        capture_output=True,
        text=True,
        timeout=400,
    )


def words_of(feature: Feature) -> list[str]:
    """Words that only this feature knows."""
    engines = [f"cluster={feature.name}"] if feature.engines else []
    placeholders = [f"{each.key}={each.word}" for each in feature.placeholders]
    keys = []
    if feature.section is not None:
        keys = [f"{feature.group or feature.name}.{each.name}=null" for each in fields(feature.section)]
    return [*(command.name for command in feature.commands), *engines, *placeholders, *keys]


def check_without(names: Collection[str], folder: Path) -> str:
    """Checks that all commands work without features, and returns what they wrote to standard error."""
    package, work = hide(names, folder), folder / "work"
    work.mkdir()
    (work / "rows.csv").write_text(ROWS)
    unknown = [word for name in names for word in words_of(list_features()[name])]
    ended = run_commands([*ALWAYS, *unknown], package, work)
    for line in ALWAYS:
        assert f"exit code 0 of {line}\n" in ended.stdout, ended.stdout[-3000:] + ended.stderr[-3000:]
    for word in unknown:
        assert f"exit code 2 of {word}\n" in ended.stdout
        name, _, value = word.partition("=")
        assert (value if name == "cluster" else name) in ended.stderr
    help_page = ended.stdout.partition("exit code 0 of --help")[0]
    assert "scaleflow sync " in help_page
    for word in unknown:
        assert f"  scaleflow {word} " not in help_page
    return ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", list_features())
def test_everything_else_works_without_a_feature(name: str, tmp_path: Path) -> None:
    written = check_without([name], tmp_path)
    dependents = [feature.name for feature in list_features().values() if name in feature.needs]
    for dependent in dependents:
        assert f"the feature {dependent} is skipped: it needs {name}, which is not there" in written


@pytest.mark.slow
def test_the_core_works_without_all_features(tmp_path: Path) -> None:
    check_without(list_features(), tmp_path)


@pytest.mark.slow
def test_without_the_report_a_run_keeps_its_figures(tmp_path: Path) -> None:
    package, work = hide(["report"], tmp_path), tmp_path / "work"
    work.mkdir()
    line = f"{SMALL} tracking=none hydra.run.dir=run"
    ended = run_commands([line], package, work)
    assert ended.stdout.endswith(f"exit code 0 of {line}\n"), ended.stderr
    assert {path.name for path in (work / "run" / "evaluation").iterdir()} == {"metrics.json", "predictions.parquet"}
    assert (work / "run" / "model" / "model.keras").exists()
    assert '"test/accuracy_low"' in (work / "run" / "events.jsonl").read_text()
    assert re.search(r"^test accuracy +\S+ \(\S+ to \S+; baseline ", ended.stdout, re.M)
    assert "note:" not in ended.stdout


@pytest.mark.slow
def test_no_stage_and_no_other_name_of_an_absent_feature_is_known(tmp_path: Path) -> None:
    package, work = hide(["predict"], tmp_path), tmp_path / "work"
    (work / "conf" / "pipeline").mkdir(parents=True)
    (work / "conf" / "pipeline" / "mine.yaml").write_text("stages:\n  say: {command: predict, run: a, input: b}\n")
    line = "pipeline mine --config-dir conf"
    ended = run_commands([line, "infer"], package, work)
    assert ended.stdout == f"exit code 2 of {line}\nexit code 2 of infer\n"
    assert "infer: there is no such command" in ended.stderr
    assert "scaleflow predict" not in ended.stderr
    assert (
        "pipeline/mine.yaml, line 2: stage say: command: predict: is no command of a stage "
        "(check, convert, evaluate, promote, python, sweep, train)"
    ) in ended.stderr
