"""`scaleflow.evaluate` on the data of a run and on new data: one model gives one number, classes keep their names."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

INLINE = ("debug=inline", "hardware=cpu")
SHORT = (*INLINE, "checkpoint=none", "training.batch_size=16")
WORDS = {"high": "good great fine", "low": "bad poor sad", "mid": "so fair fine sad"}


def said(*words: str) -> tuple[int, str]:
    """What `scaleflow.evaluate` returns and prints."""
    from scaleflow import evaluate

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = evaluate.main([*words, *INLINE])
    return code, printed.getvalue()


def metrics_of(run_id: str) -> dict[str, float]:
    from mlflow import MlflowClient

    return dict(MlflowClient("sqlite:///mlflow.db").get_run(run_id).data.metrics)


def own_test(run_id: str, name: str) -> tuple[int, str, dict[str, float], dict[str, float]]:
    """(exit code, text, the run's own test metrics, those of its evaluation)."""
    code, text = said(run_id)
    found = metrics_of(run_id)
    return (
        code,
        text,
        *(
            {key.removeprefix(start): value for key, value in found.items() if key.startswith(start)}
            for start in ("test/", f"evaluate/{name}/")
        ),
    )


def write_table(
    path: str, rows: int, high: str = "high", columns: str = "age,day,city,level", separator: str = ","
) -> None:
    """Rows of which each third has one of three levels; `age` decides."""
    lines = [columns.replace(",", separator)]
    for n in range(rows):
        row = {"age": 20 + 20 * (n % 3) + n % 7, "day": f"2024-01-{1 + n % 28:02}", "city": ("Köln", "Ulm")[n % 2]}
        row |= {"level": ("low", "mid", high)[n % 3], "extra": n, "flag": n % 3 > 0, "is": float(n % 3 > 0)}
        lines.append(separator.join(str(row[name.lower()]) for name in columns.split(",")))
    Path(path).write_text("\n".join(lines) + "\n", encoding="latin1")


def runs_of_a_table(folder: str, is_broad: bool) -> dict[str, Any]:
    import scaleflow

    os.chdir(folder)
    write_table("train.csv", 120, separator=";")
    options = ("dataset.delimiter=';'", "dataset.encoding=latin1", "dataset.target=level", "training.epochs=12")
    words = ("optimizer.learning_rate=0.01", "dataset.limit=90", "model=mlp", *SHORT)
    first = scaleflow.run("dataset=csv", "dataset.data_dir=train.csv", *options, *words)
    run = str(first.run_id)
    told: dict[str, Any] = {"own": own_test(run, "csv")}
    write_table("new.csv", 30, columns="level,extra,city,day,age", separator=";")
    write_table("vip.csv", 30, "vip", separator=";")
    told["new"] = said(run, "dataset.data_dir=new.csv")
    told["vip"] = said(run, "dataset.data_dir=vip.csv")
    told["counted"] = said(run, "dataset.data_dir=vip.csv", "--unknown-classes", "count")
    write_table("train.csv", 117, separator=";")
    told["changed"] = said(run)
    told["metrics"] = metrics_of(run)
    if is_broad:
        told |= evaluate_other_tables(run)
        write_table("flags.csv", 60, columns="age,is")
        told["binary"] = run_binary_target()
    return told


def evaluate_other_tables(run: str) -> dict[str, Any]:
    write_table("few.csv", 30, "mid", separator=";")
    write_table("columns.csv", 30, columns="Age,day,city,level", separator=";")
    Path("split").mkdir()
    write_table("split/train.csv", 30, separator=";")
    write_table("split/test.csv", 9, separator=";")
    return {
        "again": said(run, "dataset.data_dir=./new.csv", "--split", "all"),
        "few": said(run, "dataset.data_dir=few.csv"),
        "columns": said(run, "dataset.data_dir=columns.csv"),
        "kind": said(run, "dataset.data_dir=few.csv", "dataset.kind=regression"),
        "split": said(run, "dataset.data_dir=split"),
        "joined": said(run, "dataset.data_dir=split", "--split", "all"),
        "all": said(run, "--split", "all"),
        "part": said(run, "dataset.data_dir=new.csv", "dataset.test=0.5"),
        "whole": said(run, "dataset.test=1.0"),
    }


def run_binary_target() -> list[tuple[int, str]]:
    """A target of 1 and 0, which new files write as 1.0 and 0.0, as a boolean, and in another order."""
    import pandas as pd

    import scaleflow

    frame = pd.read_csv("flags.csv")
    frame.assign(**{"is": frame["is"].astype(int)}).to_csv("bits.csv", index=False)
    frame.to_parquet("flags.parquet")
    words = ("dataset=table", "dataset.data_dir=bits.csv", "dataset.target=is", "training.epochs=2", "model=mlp")
    run = str(scaleflow.run(*words, *SHORT).run_id)
    files = ("bits.csv", "flags.csv", "flags.parquet")
    own = said(run, "dataset.data_dir=bits.csv", "--split", "all")
    return [*(said(run, f"dataset.data_dir={name}") for name in files), own]


def shown(text: str, name: str) -> dict[str, float]:
    """The metrics of an evaluation as they are printed, by the last part of their names, without their intervals."""
    rows = (line.split() for line in text.splitlines() if line.startswith(f"evaluate/{name}"))
    return {key.rpartition("/")[2]: float(value) for key, value, *_ in rows}


def check_same(told: Any) -> None:
    """The run's own test split gives the run's own numbers."""
    code, text, test, evaluated = told
    assert code == 0, text
    assert test
    assert evaluated == pytest.approx(test, abs=1e-6)


@pytest.mark.parametrize("is_broad", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_table_is_read_as_the_run_read_its_own(isolated: Callable[..., Any], tmp_path: Path, is_broad: bool) -> None:
    told = isolated(runs_of_a_table, str(tmp_path), is_broad, timeout=280)
    check_same(told["own"])
    metrics, test = told["metrics"], told["own"][2]
    assert "note: the test split is not that of the run" not in told["own"][1]
    code, text = told["new"]
    assert code == 0, text
    assert "all 30 examples" in text, "a new file is scored whole, whatever dataset.limit is"
    new = shown(text, "csv-")
    assert new["accuracy"] > 0.9
    assert metrics["evaluate/csv/accuracy"] == pytest.approx(test["accuracy"]), "other data are recorded beside it"
    code, text = told["vip"]
    assert code == 2, text
    assert "vip.csv, row 3: its target level is vip, expected a class of the training split (high, low, mid)" in text
    assert "--unknown-classes count counts such examples as wrong" in text
    code, text = told["counted"]
    assert code == 0, text
    counted = shown(text, "csv-")
    assert counted["unknown_classes"] == 10
    assert counted["accuracy"] == pytest.approx(new["accuracy"] - 1 / 3, abs=0.04)
    assert counted["loss"] < 2 * new["loss"]
    assert not re.search(r"/accuracy +\S+ \(", text), "an interval of the known classes alone would be wrong"
    assert "note: the test split is not that of the run" in told["changed"][1]
    assert len({key.split("/")[1] for key in metrics if key.startswith("evaluate/")}) == 4
    if is_broad:
        check_other_tables(told, new)


def check_other_tables(told: dict[str, Any], new: dict[str, float]) -> None:
    assert shown(told["again"][1], "csv-") == new
    assert 0.5 < shown(told["few"][1], "csv-")["accuracy"] < 0.8, "a third is another class now"
    for name, expected in (
        ("columns", "dataset.data_dir=columns.csv: has no column age, which the earlier run read; did you mean Age?"),
        ("kind", "dataset.kind=regression: the earlier run has the kind classification"),
        ("whole", "scaleflow evaluate --split all evaluates every example"),
    ):
        code, text = told[name]
        assert code == 2, text
        assert expected in text
    assert "9 examples of test" in told["split"][1]
    assert "15 examples of test" in told["part"][1]
    assert "all 39 examples" in told["joined"][1]
    assert "all 117 examples" in told["all"][1]
    codes = told["binary"]
    assert [code for code, _ in codes] == [0, 0, 0, 0], codes
    assert all("all 60 examples" in text for _, text in codes[1:])
    printed = [shown(text, "table") for _, text in codes[1:]]
    assert printed[0] == printed[1] == printed[2]
    assert set(printed[0]) == {"loss", "accuracy", "balanced_accuracy"}


def write_folders(base: Path, names: dict[str, str], write: Callable[[Path, str], None], count: int = 10) -> str:
    """A folder for each class, by its name and what it really is."""
    for name, real in names.items():
        (base / name).mkdir(parents=True, exist_ok=True)
        for n in range(count):
            write(base / name / str(n), real)
    return str(base)


def write_picture(path: Path, real: str) -> None:
    from PIL import Image

    colour = {"high": (255, 0, 0), "low": (0, 255, 0), "mid": (0, 0, 255)}[real]
    Image.fromarray(np.full((8, 8, 3), colour, np.uint8)).save(f"{path}.png")


def write_text(path: Path, real: str) -> None:
    path.with_suffix(".txt").write_text(f"{WORDS[real]} {path.name}")


def runs_of_folders_and_arrays(folder: str, is_broad: bool) -> dict[str, Any]:
    import scaleflow

    os.chdir(folder)
    told: dict[str, Any] = {}
    same = {name: name for name in WORDS}
    kinds = (
        ("image_folder", write_picture, ["dataset.size=[8,8]", "model=linear"]),
        ("text_folder", write_text, ["dataset.tokens=5", "model=text"]),
    )
    for kind, write, options in kinds if is_broad else ():
        base = Path(kind)
        data = write_folders(base / "old", same, write)
        chosen = [f"dataset={kind}", f"dataset.data_dir={data}", "dataset.test=0.3", *options]
        run = str(scaleflow.run(*chosen, "training.epochs=8", "optimizer.learning_rate=0.02", *SHORT).run_id)
        told[kind] = own_test(run, kind)
        new = write_folders(base / "new", {"mid": "mid", "high": "high"}, write)
        told[f"{kind} fewer"] = said(run, f"dataset.data_dir={new}")
        renamed = write_folders(base / "renamed", {"mid": "mid", "high": "high", "Low": "low"}, write)
        told[f"{kind} renamed"] = said(run, f"dataset.data_dir={renamed}")
        told[f"{kind} counted"] = said(run, f"dataset.data_dir={renamed}", "--unknown-classes", "count")

    x = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    y = np.abs(x).argmax(axis=1)
    np.savez("old.npz", x=x, y=y)
    np.savez("new.npz", x=x[y < 2], y=y[y < 2])
    np.savez("more.npz", x=x, y=y + 1)
    words = ["dataset=npz", "dataset.data_dir=old.npz", *INLINE, "training.batch_size=16", "checkpoint.every_epochs=1"]
    first = scaleflow.run(*words, "training.epochs=1", "hydra.run.dir=arrays")
    told["arrays"] = own_test(str(first.run_id), "npz")
    scaleflow.run("resume=arrays", "training.epochs=3", *INLINE)
    told["longer"] = own_test(str(first.run_id), "npz")
    if not is_broad:
        return told
    told["fewer numbers"] = said(str(first.run_id), "dataset.data_dir=new.npz")
    told["more numbers"] = said(str(first.run_id), "dataset.data_dir=more.npz")
    return told


@pytest.mark.parametrize("is_broad", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_folders_and_arrays_keep_their_classes(isolated: Callable[..., Any], tmp_path: Path, is_broad: bool) -> None:
    told = isolated(runs_of_folders_and_arrays, str(tmp_path), is_broad, timeout=280)
    for name in ("arrays", "longer"):
        check_same(told[name])
    assert told["longer"][2] != told["arrays"][2]
    if not is_broad:
        return
    for kind in ("image_folder", "text_folder"):
        check_same(told[kind])
        code, text = told[f"{kind} fewer"]
        assert code == 0, text
        assert "all 20 examples" in text
        fewer = shown(text, f"{kind}-")
        assert fewer["accuracy"] > 0.9
        code, text = told[f"{kind} renamed"]
        assert code == 2, text
        assert "renamed/Low is not a class of the training split (high, low, mid)" in text
        assert "--unknown-classes count" in text
        code, text = told[f"{kind} counted"]
        assert code == 0, text
        counted = shown(text, f"{kind}-")
        assert counted["unknown_classes"] == 10
        assert counted["accuracy"] == pytest.approx(2 / 3 * fewer["accuracy"], abs=1e-4)
        assert counted["loss"] == pytest.approx(fewer["loss"], rel=1e-3)
    code, text = told["fewer numbers"]
    assert code == 0, text
    code, text = told["more numbers"]
    assert code == 2, text
    assert "targets of 'train' have 4 (example " in text
