"""Tables: the time to the first step, the rows per second of an epoch that is not cached, and the peak of the memory.

    python -m benchmarks.tables                    # a CSV file of 300,000 rows, Parquet files of up to 10 million
    python -m benchmarks.tables --rows 100000      # smaller files

All columns are numbers. Each command runs in a process of its own; the files are written before. A second run takes
from the cache what the first one has learned. The machine's load decides about times, so compare the rows of one table
only.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import environment

COLUMNS = 20

#: Rows of a row group of a Parquet file.
GROUP = 1_000_000

MODEL = ("model=mlp", "model.units=[64]", "tracking=none", "hardware=cpu", "checkpoint.every_epochs=null")


def write_files(folder: Path, rows: int) -> dict[str, Path]:
    """Writes a CSV file of `rows`, and Parquet files of a third of them and of 33 and 3 times as many."""
    import pyarrow
    from pyarrow import csv, parquet

    def make(count: int, seed: int) -> Any:
        random = np.random.default_rng(seed)
        x = random.standard_normal((count, COLUMNS), dtype=np.float32)
        columns = {f"x{n}": x[:, n] for n in range(COLUMNS)}
        return pyarrow.table({**columns, "y": x @ np.linspace(-1, 1, COLUMNS, dtype=np.float32)})

    files = {"csv": folder / "table.csv"}
    csv.write_csv(make(rows, 0), files["csv"])
    for name, count in (("small", rows // 3), ("middle", rows * 10 // 3), ("large", rows * 100 // 3)):
        files[name] = folder / f"{name}.parquet"
        with parquet.ParquetWriter(files[name], make(1, 0).schema) as writer:
            for group, first in enumerate(range(0, count, GROUP)):
                writer.write_table(make(min(GROUP, count - first), group))
    return files


def train(file: Path, folder: Path, *words: str) -> dict[str, float]:
    """Trains on a file, and returns the seconds to the first step, the rows per second and the peak memory in MB."""
    begin = time.time()
    data = (f"dataset.data_dir={file}", "dataset.target=y", f"dataset.cache_dir={file.parent / 'learned'}")
    command = ["-m", "scaleflow", "dataset=table", *data, *MODEL, *words]
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        line = (sys.executable, *command, f"hydra.run.dir={folder}")
        code = subprocess.run(line, cwd=folder.parent, env=environment(folder), stdout=output, stderr=output).returncode
    if code:
        raise SystemExit(f"a run failed: {log.read_text()}")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]

    def of(name: str) -> list[float]:
        return [float(event["values"][name]) for event in metrics if name in event["values"]]

    metrics = [event for event in events if event["event"] == "metrics"]
    return {
        "first step": metrics[0]["time"] / 1000 - begin,
        "rows/s": statistics.median(of("perf/examples_per_second") or [math.nan]),
        "peak MB": max(of("perf/peak_host_mb") or [math.nan]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300_000, help="rows of the CSV file")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="scaleflow-tables-") as name:
        base = Path(name)
        files = write_files(base, options.rows)
        once = ("training.max_steps=1", "training.batch_size=128")
        epochs = ("training.epochs=3", "training.batch_size=1024", "dataset.validation=null", "dataset.test=0")
        steps = ("training.max_steps=2000", "training.batch_size=1024", "dataset.validation=null", "dataset.test=0")
        for label, file, words in (
            (f"CSV, {options.rows:,} rows, first step", "csv", once),
            (f"CSV, {options.rows:,} rows, first step of the second run", "csv", once),
            (f"CSV, {options.rows:,} rows, in memory", "csv", epochs),
            (f"CSV, {options.rows:,} rows, not cached", "csv", (*epochs, "dataset.cache=none")),
            (f"Parquet, {options.rows // 3:,} rows, first step", "small", once),
            (f"Parquet, {options.rows * 100 // 3:,} rows, first step", "large", once),
            (f"Parquet, {options.rows * 100 // 3:,} rows, first step of the second run", "large", once),
            (
                f"Parquet, {options.rows * 10 // 3:,} rows, 2000 steps",
                "middle",
                (*steps, "dataset.cache=none"),
            ),
            (f"Parquet, {options.rows * 100 // 3:,} rows, 2000 steps", "large", steps),
        ):
            found = train(files[file], base / f"run-{len(list(base.iterdir()))}", *words)
            print(label, *(f"{key} {value:,.2f}" for key, value in found.items()), sep=" | ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
