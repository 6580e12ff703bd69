"""One hook object follows a process from its data to its export, and sees each epoch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from scaleflow.interfaces.features import Feature
from scaleflow.interfaces.hooks import ReadData, TrainedRun, WorkerHook
from scaleflow.testing import Events
from tests.features.installed import install_feature, run_installed

#: The features whose hooks were called, in order, with the phase.
CALLS: list[tuple[str, str]] = []


class Diary(WorkerHook):
    """Writes into the run's folder which of its methods were called, and with which epochs."""

    def __init__(self) -> None:
        self.pages: list[Any] = []

    def after_data(self, data: ReadData) -> Mapping[str, Any]:
        CALLS.append(("diary", "data"))
        self.pages.append("data")
        return {}

    def after_build(self, run: TrainedRun, export: Callable[[Path], object]) -> None:
        CALLS.append(("diary", "build"))
        self.pages.append("build")

    def after_epoch(self, run: TrainedRun, epoch: int, metrics: Mapping[str, float]) -> None:
        CALLS.append(("diary", "epoch"))
        self.pages.append([epoch, dict(metrics)])

    def after_export(self, run: TrainedRun, step: int) -> None:
        CALLS.append(("diary", "export"))
        (run.folder / f"diary-{os.getpid()}.json").write_text(json.dumps([*self.pages, "export"]))


class Reader(Diary):
    """Is called after the diary, though its name comes first in the alphabet. It fails in the second epoch."""

    def after_data(self, data: ReadData) -> Mapping[str, Any]:
        CALLS.append(("a_reader", "data"))
        return {}

    def after_build(self, run: TrainedRun, export: Callable[[Path], object]) -> None:
        CALLS.append(("a_reader", "build"))

    def after_epoch(self, run: TrainedRun, epoch: int, metrics: Mapping[str, float]) -> None:
        CALLS.append(("a_reader", "epoch"))
        if epoch == 2:
            raise ValueError("page torn")

    def after_export(self, run: TrainedRun, step: int) -> None:
        CALLS.append(("a_reader", "export"))


DIARY = Feature(name="diary", worker=f"{__name__}:Diary")
READER = Feature(name="a_reader", worker=f"{__name__}:Reader", needs=("diary",))


def train_with_hooks(folder: str, commands: list[str]) -> tuple[list[int], list[tuple[str, str]]]:
    """In a child: runs commands with the two features; returns their exit codes, and the calls of all hooks."""
    from scaleflow.cli import main
    from scaleflow.interfaces import features

    os.chdir(folder)
    points = [EntryPoint(name, f"{__name__}:{name}", features.ENTRY_POINTS) for name in ("DIARY", "READER")]
    features.entry_points = lambda group: points  # type: ignore[assignment, misc]
    features.list_features.cache_clear()
    codes = [
        main([*line.split(), "debug.inline=true", "tracking=none", "dataset=synthetic", "dataset.examples=500"])
        for line in commands
    ]
    return codes, CALLS


@pytest.mark.parametrize("engine", ["loop", "fit"])
def test_a_hook_sees_all_phases_and_each_epoch(isolated: Callable[..., Any], tmp_path: Path, engine: str) -> None:
    words = f"training.engine={engine} training.batch_size=64 hydra.run.dir=run training.epochs=3"
    codes, calls = isolated(train_with_hooks, str(tmp_path), [words])
    assert codes == [0]
    events = Events.of(tmp_path / "run")
    (diary,) = (tmp_path / "run").glob("diary-*.json")
    first, second, *epochs, last = json.loads(diary.read_text())
    assert [first, second, last] == ["data", "build", "export"]
    assert epochs == [[event["epoch"], event["values"]] for event in events.named("epoch")]
    assert [number for number, _ in epochs] == [1, 2, 3]
    for _, metrics in epochs:
        assert {"train/loss", "val/loss"} <= set(metrics)
        assert {type(value) for value in metrics.values()} == {float}
    # The reader needs the diary. After its error it sees no more epochs, but the export.
    assert calls == [
        *(("diary", "data"), ("a_reader", "data"), ("diary", "build"), ("a_reader", "build")),
        *(("diary", "epoch"), ("a_reader", "epoch"), ("diary", "epoch"), ("a_reader", "epoch"), ("diary", "epoch")),
        *(("diary", "export"), ("a_reader", "export")),
    ]
    notes = [text for text in events.notes if "a_reader" in text]
    (note,) = notes
    assert note.startswith("the feature a_reader: missing, and the rest goes on (ValueError: page torn")


@pytest.mark.slow
def test_a_resumed_run_shows_its_hooks_the_epochs_that_it_adds(isolated: Callable[..., Any], tmp_path: Path) -> None:
    codes, calls = isolated(
        train_with_hooks,
        str(tmp_path),
        ["hydra.run.dir=run training.batch_size=64 training.epochs=1", "resume=run training.epochs=4"],
    )
    assert codes == [0, 0]
    (diary,) = (tmp_path / "run").glob("diary-*.json")  # both commands ran in one process
    told = [page for page in json.loads(diary.read_text()) if isinstance(page, list)]
    assert [epoch for epoch, _ in told] == [2, 3, 4]
    assert calls.count(("diary", "epoch")) == 4
    assert calls.count(("diary", "data")) == 2


#: A package whose hook writes a line for each call, with the number of its object and process.
LOGGER = {
    "feature.py": "from scaleflow.interfaces.features import Feature\n"
    'FEATURE = Feature(name="logger", worker="logger.hook:Logger")\n',
    "hook.py": """
import os
from scaleflow.interfaces.hooks import WorkerHook

class Logger(WorkerHook):
    def after_build(self, run, export):
        self.path = run.folder / f"calls-{os.getpid()}"
        self.write("build", run)

    def after_epoch(self, run, epoch, metrics):
        self.write(f"epoch {epoch} {metrics['val/loss'] > 0}", run)

    def after_export(self, run, step):
        self.write("export", run)

    def write(self, text, run):
        with self.path.open("a") as file:
            file.write(f"{text} {run.is_chief}\\n")
""",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["strategy=multi_worker cluster.workers=2", "strategy=parameter_server cluster.workers=1"]
)
def test_only_the_chief_of_several_processes_sees_epochs(tmp_path: Path, words: str) -> None:
    install_feature(tmp_path / "packages", "logger", LOGGER)
    small = "tracking=none dataset=synthetic dataset.examples=500 training.epochs=2 hydra.run.dir=run"
    ended = run_installed(f"{words} {small}", tmp_path / "packages", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    logs = [path.read_text().splitlines() for path in (tmp_path / "run").glob("calls-*")]
    (chief,) = [log for log in logs if log[-1] != "build False"]
    assert chief == ["build True", "epoch 1 True True", "epoch 2 True True", "export True"]
    assert len(logs) == (2 if "multi_worker" in words else 1)
