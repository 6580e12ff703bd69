"""How the time of the default run on a table grows with its columns and its rows; draws docs/pictures/sizes.svg.

    python -m benchmarks.sizes                            # ten minutes on two cores
    python -m benchmarks.sizes --columns 10 100 --rows    # some of the sizes, or none

Tables are CSV files of standard normal numbers. The target is a function of at most ten of them, and noise. Those of
several widths have 10,000 rows, those of several lengths 20 columns. Each is read for the first time.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import run_scaleflow
from scaleflow.pages.charts import Chart, choose_colours, compose_picture, draw_legend

#: The rows of tables of several widths, and the columns of tables of several lengths.
ROWS, COLUMNS = 10_000, 20

#: How the text of a stage begins, by the part that it counts for. Training has no stage.
PARTS = {
    "reading and learning": ("reading ",),
    "building and compiling": ("building", "compiling"),
    "training": (),
    "test and importance": ("evaluating", "measuring"),
    "export": ("exporting",),
}

PICTURE = Path("docs/pictures/sizes.svg")


def write_table(path: Path, rows: int, columns: int) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, columns)).astype("f")
    used = min(columns, 10)
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2 % used] + 0.5 * np.abs(x[:, 3 % used])
    y += x[:, :used] @ random.standard_normal(used) * 0.2 + 0.3 * random.standard_normal(rows)
    names = ",".join([*(f"c{n}" for n in range(columns)), "y"])
    np.savetxt(path, np.column_stack([x, y]), fmt="%.6g", delimiter=",", header=names, comments="")


def measure(rows: int, columns: int) -> dict[str, float]:
    """Returns the seconds of each part of a run, and of all of it as `run`."""
    with tempfile.TemporaryDirectory(prefix="scaleflow-sizes-") as temporary:
        folder = Path(temporary)
        write_table(folder / "table.csv", rows, columns)
        words = ["dataset=table", f"dataset.data_dir={folder / 'table.csv'}", "dataset.target=y"]
        events, seconds = run_scaleflow(words, folder)
    return {**sum_parts(events), "run": seconds}


def sum_parts(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the seconds of each part; one lasts until the next event of another kind."""
    found = dict.fromkeys(PARTS, 0.0)
    marks = [each for each in events if each["event"] in ("stage", "ready", "end")]
    for event, following in itertools.pairwise(marks):
        text = event.get("text", "")
        part = next((name for name, begins in PARTS.items() if begins and text.startswith(begins)), None)
        part = "training" if event["event"] == "ready" else part
        if part is not None:
            found[part] += (following["time"] - event["time"]) / 1000
    return found


def draw(measured: Mapping[str, Mapping[int, Mapping[str, float]]]) -> None:
    parts = ("run", *PARTS)
    colours = dict(zip(parts, ("var(--text)", *choose_colours(len(PARTS))), strict=True))
    seconds = [value for by_size in measured.values() for found in by_size.values() for value in found.values()]
    row = []
    for what, by_size in measured.items():
        sizes = list(by_size)
        ends = (min(sizes), max(sizes)), (min(seconds), max(seconds))
        x_ticks = {size: f"{size:,}" for size in sizes}
        chart = Chart(what, *ends, labels=(what, "seconds"), size=(400, 360), x_ticks=x_ticks, log="xy")
        for part, colour in colours.items():
            values = [found[part] for found in by_size.values()]
            chart.add_line(sizes, values, colour=colour).add_points(sizes, values, colour=colour)
        row.append(chart.to_svg())
    picture = compose_picture("seconds of the parts of a run", [[*row, draw_legend(list(colours.items()))]])
    PICTURE.write_text(picture, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--columns", nargs="*", type=int, default=[10, 100, 1_000])
    parser.add_argument("--rows", nargs="*", type=int, default=[1_000, 10_000, 100_000, 300_000])
    typed = parser.parse_args(argv)
    measured: dict[str, dict[int, dict[str, float]]] = {}
    print("| rows | columns |", *(f" {name} |" for name in (*PARTS, "run")), sep="")
    print("|---|---|", "---|" * (len(PARTS) + 1), sep="")
    sizes = [(f"columns, {ROWS:,} rows", columns, ROWS, columns) for columns in typed.columns]
    sizes += [(f"rows, {COLUMNS} columns", rows, rows, COLUMNS) for rows in typed.rows]
    for what, size, rows, columns in sizes:
        found = measured.setdefault(what, {})[size] = measure(rows, columns)
        print(f"| {rows:,} | {columns:,} | {' | '.join(f'{each:.1f}' for each in found.values())} |", flush=True)
    draw(measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
