"""The baselines of whole runs: their metrics, their place in the results, and a process that is killed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import Command
from tests.event_log import events_in
from tests.launcher.test_supervisor import LongRun, processes, wait_for

WORDS = (
    *("model=mlp", "model.units=[8]", "training.batch_size=32", "training.epochs=2", "evaluation.importance=0"),
    *("dataset=table", "dataset.data_dir=noise.csv", "dataset.target=y", "tracking=none", "hardware=cpu"),
)


def write_noise(folder: Path) -> None:
    random = np.random.default_rng(0)
    lines = [",".join(f"{value:.4f}" for value in row) for row in random.normal(size=(200, 5))]
    (folder / "noise.csv").write_text("\n".join(["a,b,c,d,y", *lines, ""]))


def read_values(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for event in events_in(folder / "events.jsonl"):
        values |= event.get("values") or {}
    return values


def test_a_run_of_a_table_ends_with_its_baselines(command: Command) -> None:
    write_noise(command.folder)
    done = command(*WORDS, "evaluation.baselines=50", "hydra.run.dir=run")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = " ".join((done.stdout + done.stderr).split())
    assert re.search(r"test rmse .*; boosting [\d.]+; linear [\d.]+, both of 50 training rows\)", lines), lines
    values = read_values(command.folder / "run")
    assert {f"baseline/{name}/rmse" for name in ("boosting", "linear")} <= set(values)
    assert values["baseline/rows"] == 50
    kept = {path.name for path in (command.folder / "run").glob("baseline*")}
    assert kept == {"baselines.json"}


def test_a_run_whose_baselines_are_killed_goes_on_without_them(command: Command) -> None:
    write_noise(command.folder)
    run = LongRun(command, *WORDS, "training.epochs=40", "hydra.run.dir=run", only=True)
    fitting = wait_for(lambda: [child for each in processes(command.folder / "run") for child in each.children()])
    fitting[0].kill()
    assert run.end() == 0, run.err.read_text()
    events = events_in(command.folder / "run" / "events.jsonl")
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert any(note.endswith("(their process ended with exit code -9)") for note in notes), notes
    assert not any(name.startswith("baseline/boosting") for name in read_values(command.folder / "run"))
    assert not (command.folder / "run" / "baseline_data.npz").exists()
