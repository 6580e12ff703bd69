"""`scaleflow.run(..., data=frame)`: a table from Python trains as its file does, and is refused if it has no place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import scaleflow
from scaleflow.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

WORDS = ("dataset=table", "dataset.target=price", "tracking=none", "hardware=cpu")


def table(rows: int = 300) -> pd.DataFrame:
    import pandas as pd

    number = np.arange(rows)
    area = np.where(number % 11 == 0, np.nan, number % 37)
    town = np.array(["Ulm", "Bonn", None], object)[number % 3]
    sold = pd.Timestamp("2024-01-01") + pd.to_timedelta(number, unit="D")
    return pd.DataFrame({"area": area, "town": town, "sold": sold, "price": (number % 37) * 1000.5 + number % 3})


def refuse(*words: str, data: Any) -> str:
    with pytest.raises(ConfigError) as refusal:
        scaleflow.run(*words, data=data)
    return str(refusal.value)


def test_a_table_that_has_no_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame = table(9)
    assert "run(data=list): expected a pandas DataFrame or a pyarrow Table" in refuse(*WORDS, data=[1])
    assert "there is also dataset.data_dir=x" in refuse(*WORDS, "dataset.data_dir=x", data=frame)
    assert "add dataset=table" in refuse("dataset=digits", data=frame)
    assert "leave out data" in refuse("resume=x", data=frame)
    assert "the column 5 needs a name" in refuse(*WORDS, data=frame.rename(columns={"area": 5}))
    assert "values of several types" in refuse(*WORDS, data=frame.assign(x=["a", 1, 2] * 3))
    assert list(tmp_path.iterdir()) == []


def train(folder: str) -> Any:
    import pyarrow

    os.chdir(folder)
    frame = table()
    short = (*WORDS, "debug=inline", "training.max_steps=3", "dataset.test=0.1")
    frame.to_csv("table.csv", index=False)
    frame.to_parquet("table.parquet")
    files = ("table.csv", "table.parquet")
    results = [
        *(scaleflow.run(*short, f"dataset.data_dir={name}", folder=f"{name}-run") for name in files),
        scaleflow.run(*short, data=frame, folder="frame"),
        scaleflow.run(*short, data=pyarrow.Table.from_pandas(frame.set_index("area").reset_index()), folder="arrow"),
    ]
    resumed = scaleflow.run("resume=frame", "training.max_steps=4")
    try:
        scaleflow.run(*short, data=frame.assign(town=[[1]] * len(frame)), folder="refused")
    except ConfigError as error:
        refused = str(error)
    names = [[path.name for path in Path(folder).glob("data-*")] for folder in ("frame", "arrow", "refused")]
    return [dict(result.metrics) for result in results], resumed.status, refused, names


@pytest.mark.slow
def test_a_csv_file_a_parquet_file_and_a_frame_have_equal_losses(isolated: Callable[..., Any], tmp_path: Path) -> None:
    metrics, resumed, refused, (frame, arrow, none) = isolated(train, str(tmp_path))
    first, *others = ([each[f"{split}/loss"] for split in ("train", "test")] for each in metrics)
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-6)
    assert resumed == "FINISHED"
    assert "the column town has the type list" in refused
    assert frame == arrow
    assert len(frame) == 1
    assert none == []
