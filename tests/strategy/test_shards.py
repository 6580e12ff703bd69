"""`dataset.shards`: each worker opens only its own files, and the batches are those of any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Command
from tests.strategy.test_multi_worker import CPU, weights_of

#: A module that notes which files `dataset=table` opens while training, by the thread that reads for the training loop.
#: It adds no class: the first examples of a user's class would also be read before training, to see if they vary.
SPY = """
import json
import os
import threading
from pathlib import Path

from scaleflow.dataset import table
from scaleflow.dataset.tables import files as table_files

opens = table_files.open_file
worker = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]


def open_and_note(path):
    if threading.current_thread().name.startswith("scaleflow-blocks"):
        with Path(path).parents[1].joinpath(f"opened-{worker}").open("a") as notes:
            notes.write(path.split("/")[-2] + "/" + Path(path).stem + "\\n")
    return opens(path)


table_files.open_file = open_and_note


Rows = table.Table
"""

FILES, ROWS, GLOBAL = 8, 12, 16
STEPS = 2 * FILES * ROWS // GLOBAL  # two epochs

WORDS = (
    *("dataset=table", "dataset._target_=spy.Rows", "dataset.data_dir=rows", "dataset.target=price"),
    *("dataset.kind=regression", "dataset.cache=none", "dataset.learn_on=16", "dataset.validation=validation"),
    *(
        "dataset.shards=2",
        f"dataset.shuffle={2 * ROWS}",
        "model=linear",
        "tracking=none",
        "dataset.check=none",
        "evaluation=none",
    ),
    *(f"training.global_batch_size={GLOBAL}", "training.steps_per_loop=1", *CPU),
)


def make_files(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    draws = np.random.default_rng(0)
    for split, lengths in (("train", [ROWS] * FILES), ("validation", [12, 7])):
        (folder / "rows" / split).mkdir(parents=True)
        for n, rows in enumerate(lengths):
            area = draws.normal(size=rows)
            table = pyarrow.table({"area": area, "age": draws.normal(size=rows), "price": 3 * area + n})
            parquet.write_table(table, folder / "rows" / split / f"{n}.parquet")
    (folder / "spy.py").write_text(SPY)


def train(folder: Path, *words: str) -> Command:
    folder.mkdir()
    make_files(folder)
    command = Command(folder)
    ended = command(*WORDS, *words)
    assert ended.returncode == 0, ended.stderr
    return command


def values(command: Command, name: str) -> list[float]:
    return [event["values"][name] for event in command.events() if name in event.get("values", {})]


def opened(command: Command, worker: int, split: str) -> list[str]:
    lines = (command.folder / "rows" / f"opened-{worker}").read_text().splitlines()
    return [line.removeprefix(f"{split}/") for line in lines if line.startswith(f"{split}/")]


@pytest.mark.slow
def test_a_worker_opens_its_own_files_and_resumes_exactly(tmp_path: Path, isolated: Callable[..., Any]) -> None:
    two = train(tmp_path / "two", "strategy=multi_worker", f"training.max_steps={STEPS}")
    every = {str(n) for n in range(FILES)}
    epochs = []
    for first in (0, FILES // 2):  # an epoch of a worker: half of the files, each of them is a pool
        first_half, second_half = (opened(two, worker, "train")[first : first + FILES // 2] for worker in (0, 1))
        assert len({*first_half, *second_half}) == len(first_half) + len(second_half) == FILES
        assert {*first_half, *second_half} == every
        epochs.append(set(first_half))
    assert epochs[0] != epochs[1]
    assert set(opened(two, 0, "validation")) == {"0"}  # of 19 rows, the first 9
    assert set(opened(two, 1, "validation")) == {"0", "1"}

    one = train(tmp_path / "one", "strategy=one_device", f"training.max_steps={STEPS}")
    for name in ("train/loss", "val/loss"):
        assert values(two, name) == pytest.approx(values(one, name), rel=1e-5), name
    assert len(set(values(two, "val/loss"))) == 2

    stopped = train(tmp_path / "stopped", "strategy=multi_worker", f"training.max_steps={STEPS - 4}")
    ended = stopped(f"resume={stopped.run_folder()}", f"training.max_steps={STEPS}")
    assert ended.returncode == 0, ended.stderr
    weights, expected = (isolated(weights_of, each.run_folder() / "model") for each in (stopped, two))
    for found, wanted in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
