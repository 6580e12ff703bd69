"""One model, one number: the run's test, `evaluate`, `predict`, the loaded pyfunc and the served model agree."""

from __future__ import annotations

import base64
import csv
import datetime
import json
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chains.data import Table
from tests.conftest import Command
from tests.model.test_export import NAMES
from tests.tracking.servers import serve_model

#: The relative difference that single precision leaves between two orders of summation.
NEAR = 1e-6

LABELS = ("dataset.inputs=x", "dataset.targets=y", "dataset.kind=multi_label")


@dataclass(frozen=True)
class Examples:
    """The test split: what a command reads, and what a program sends.

    Attributes:
        words: of the run.
        file: with the test split, for `predict`.
        inputs: a column for each input, or a list of examples; a picture is the bytes of its file.
        answers: the target of each example.
    """

    words: Sequence[str]
    file: Path
    inputs: Any
    answers: Sequence[Any]


def make_table(folder: Path, kind: str, form: str) -> Examples:
    """Files of both splits; the columns of the test file are in another order."""
    data = Table.draw(7, kind, form)
    (folder / "data").mkdir()
    data.keep(slice(0, 60)).write(folder / "data" / "train")
    test = data.keep(slice(60, None)).change_rows(slice(0, 2), {"age": None, "town": "Rom"})
    file = (test if form == "headerless" else test.order_columns(reversed)).write(folder / "data" / "test")
    words = ("dataset=table", "dataset.data_dir=data", "dataset.target=answer", "model.units=[8]")
    return Examples(words, file, test.to_inputs(), test.answers)


def make_texts(folder: Path, kind: str, form: str) -> Examples:
    random = np.random.default_rng(0)
    texts, answers = [], []
    for n in range(60):
        name, split = ("bad", "fair", "good")[n % 3], "test" if n >= 45 else "train"
        text = f"it is {name if random.uniform() < 0.8 else 'so'} {random.choice(['here', 'there', 'now'])}"
        path = folder / "data" / split / name / f"{n}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if split == "test":
            texts.append(text)
            answers.append(name)
    words = ("dataset=text_folder", "dataset.data_dir=data", "dataset.tokens=6", "model=text")
    return Examples(words, write_column(folder / "texts.csv", "text", texts), texts, answers)


def write_column(path: Path, name: str, values: Sequence[Any]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[name], *([value] for value in values)])
    return path


def make_arrays(folder: Path, kind: str, form: str) -> Examples:
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 3)).astype(np.float32)
    y = (x[:, :2] + random.normal(size=(60, 2)) > 0).astype(np.int64)
    np.savez(folder / "data.npz", x_train=x[:45], y_train=y[:45], x_test=x[45:], y_test=y[45:])
    with (folder / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b", "c"], *x[45:].tolist()])
    words = ("dataset=npz", "dataset.data_dir=data.npz", *LABELS, "model.units=[8]")
    return Examples(words, folder / "rows.csv", x[45:].tolist(), y[45:].tolist())


def make_pictures(folder: Path, kind: str, form: str) -> Examples:
    from PIL import Image

    random = np.random.default_rng(0)
    files, answers = [], []
    for n in range(40):
        name, split = ("cat", "dog")[n % 2], "test" if n >= 30 else "train"
        picture = random.integers(100 * (n % 2), 256, size=(8, 8, 3)).astype(np.uint8)
        path = folder / "data" / split / name / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
        if split == "test":
            files.append(path)
            answers.append(name)
    files, answers = zip(*sorted(zip(files, answers, strict=True)), strict=True)  # as `predict` lists them
    words = ("dataset=image_folder", "dataset.data_dir=data", "dataset.size=[8,8]", "model.units=[8]")
    return Examples(words, folder / "data" / "test", [path.read_bytes() for path in files], answers)


def make_names(folder: Path, kind: str, form: str) -> Examples:
    """A table whose columns have awkward names: numbers, words and a few texts."""
    random = np.random.default_rng(0)
    columns: dict[str, list[Any]] = {}
    for n, name in enumerate(NAMES):
        words = [f"w{number}" for number in random.integers(12, size=60)]
        texts = [" ".join(random.choice(words, 4)) for _ in range(60)]
        columns[name] = random.normal(size=60).tolist() if n % 2 else words if n % 10 else texts
    answers = (np.array(columns[NAMES[1]]) + random.normal(size=60)).tolist()
    (folder / "data").mkdir()
    for split, which in (("train", slice(0, 45)), ("test", slice(45, None))):
        with (folder / "data" / f"{split}.csv").open("w", newline="") as file:
            rows = zip(*columns.values(), answers, strict=True)
            csv.writer(file).writerows([[*columns, "answer"], *[*rows][which]])
    words = ("dataset=table", "dataset.data_dir=data", "dataset.target=answer", "model.members=2", "model.units=[8]")
    used = ("dataset.categorical=[__index_level_0__]", "training.max_steps=2")
    inputs = {name: values[45:] for name, values in columns.items()}
    return Examples((*words, *used), folder / "data" / "test.csv", inputs, answers[45:])


def make_german(folder: Path, kind: str, form: str) -> Examples:
    """Numbers, days and codes as Excel writes them in Germany. A program sends the cells as they are in the file."""
    random = np.random.default_rng(0)
    x, code = random.normal(0, 5000, 60), random.choice(["01067", "10115", "1E5"], 60)
    days = [datetime.date(2024, 1, 1) + datetime.timedelta(int(n)) for n in random.integers(0, 365, 60)]
    answers = (x + random.normal(0, 900, 60) + 1000 * (code == "01067")).round(2)
    columns = {
        "x": [f"{each:,.2f}".translate(str.maketrans(",.", ".,")) for each in x],
        "code": code.tolist(),
        "day": [f"{day:%d.%m.%Y}" for day in days],
    }
    columns["x"][0] = columns["x"][50] = ""
    (folder / "data").mkdir()
    for split, which in (("train", slice(0, 45)), ("test", slice(45, None))):
        lines = [
            ";".join(row) for row in zip(*columns.values(), (str(a).replace(".", ",") for a in answers), strict=True)
        ]
        text = "\n".join(["sep=;", ";".join([*columns, "answer"]), *lines[which]])
        (folder / "data" / f"{split}.csv").write_text(text)
    words = ("dataset=table", "dataset.data_dir=data", "dataset.target=answer", "model.members=2", "model.units=[8]")
    inputs = {name: values[45:] for name, values in columns.items()}
    return Examples(words, folder / "data" / "test.csv", inputs, answers[45:].tolist())


def make_rare(folder: Path, kind: str, form: str) -> Examples:
    """Words of which the most frequent three are used, and rows without a target, which no door counts."""
    random = np.random.default_rng(0)
    words = [f"w{min(int(n), 9)}" for n in random.geometric(0.3, size=75)]
    x = random.normal(size=75).tolist()
    answers = ["no" if word > "w2" and random.uniform() < 0.8 else "yes" for word in words]
    given = ["" if n % 5 == 4 else answer for n, answer in enumerate(answers)]
    (folder / "data").mkdir()
    kept = [n for n in range(50, 75) if given[n]]
    for path, rows in (("data/train", range(50)), ("data/test", range(50, 75)), ("rows", kept)):
        with (folder / f"{path}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["x", "word", "answer"], *([x[n], words[n], given[n]] for n in rows)])
    used = ("dataset=table", "dataset.data_dir=data", "dataset.target=answer", "model.members=2", "model.units=[8]")
    inputs = {"x": [x[n] for n in kept], "word": [words[n] for n in kept]}
    return Examples((*used, "dataset.most_values=3"), folder / "rows.csv", inputs, [answers[n] for n in kept])


CASES: Mapping[str, tuple[Callable[[Path, str, str], Examples], str, str, Sequence[str]]] = {
    "binary in CSV": (make_table, "binary", "csv", ()),
    "classification in Parquet": (make_table, "classification", "parquet", ()),
    "regression in JSON lines": (make_table, "regression", "jsonl", ()),
    # Of model=tabular, Keras's eager operations and a graph round bfloat16 in another way: 2e-4 here.
    "mixed precision, without a header": (make_table, "flag", "headerless", ("precision=mixed", "model=mlp")),
    "texts": (make_texts, "classification", "", ()),
    "labels in arrays": (make_arrays, "multi_label", "", ()),
    "pictures": (make_pictures, "binary", "", ()),
    "as Excel writes in Germany": (make_german, "regression", "", ()),
    "names of columns": (make_names, "regression", "", ()),
    "rare words and missing targets": (make_rare, "binary", "", ()),
}

#: Cases that are served over HTTP: one for each kind of target.
SERVED = (
    "binary in CSV",
    "classification in Parquet",
    "regression in JSON lines",
    "labels in arrays",
    "texts",
    "pictures",
    "as Excel writes in Germany",
    "names of columns",
)


def compute_metrics(kind: str, names: Sequence[str] | None, outputs: Any, answers: Sequence[Any]) -> dict[str, float]:
    """The metrics of logits or values [n, k], with scikit-learn."""
    from sklearn import metrics

    values = np.asarray(outputs, np.float64)
    if kind == "regression":
        return {"mae": float(metrics.mean_absolute_error(answers, values[:, 0]))}
    if kind == "multi_label":
        chances = 1 / (1 + np.exp(-values))
        targets = np.asarray(answers)
        losses = [metrics.log_loss(targets[:, n], chances[:, n]) for n in range(targets.shape[1])]
        return {"loss": float(np.mean(losses)), "accuracy": float(np.mean((chances >= 0.5) == targets))}
    assert names is not None
    logits = values if values.shape[1] > 1 else np.concatenate([np.zeros_like(values), values], axis=1)
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    targets = np.array([list(names).index(str(answer)) for answer in answers])
    return {
        "loss": float(metrics.log_loss(targets, chances, labels=range(len(names)))),
        "accuracy": float(metrics.accuracy_score(targets, chances.argmax(axis=1))),
    }


def score_rows(
    rows: Sequence[Mapping[str, Any]], kind: str, names: Sequence[str] | None, answers: Sequence[Any]
) -> dict[str, float]:
    """The metrics of predictions: of the file that `predict` wrote, of a DataFrame, or of JSON."""
    if kind == "regression":
        return compute_metrics(kind, names, [[float(row["prediction"])] for row in rows], answers)
    if kind == "multi_label":
        chances = np.array([[float(row[f"probability_{n}"]) for n in range(2)] for row in rows])
        return compute_metrics(kind, names, np.log(chances) - np.log1p(-chances), answers)
    assert names is not None
    logits = np.log([[float(row[f"probability_{name}"]) for name in names] for row in rows])
    found = compute_metrics(kind, names, logits, answers)
    right = sum(row["prediction"] == str(answer) for row, answer in zip(rows, answers, strict=True))
    assert found["accuracy"] == pytest.approx(right / len(rows))
    return found


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def load_and_answer(folder: str, inputs: Any) -> tuple[Any, Any]:
    """What the loaded pyfunc gives for a DataFrame of columns, or for a list of examples: predictions, and logits."""
    import mlflow
    import pandas as pd

    model = mlflow.pyfunc.load_model(folder)
    given = pd.DataFrame(inputs) if isinstance(inputs, dict) else np.array(inputs, example_dtype(inputs))
    logits = model.predict(given, params={"output": "logits"})
    return model.predict(given).to_dict("records"), np.asarray(logits).tolist()


def example_dtype(inputs: Any) -> Any:
    first = np.array(inputs[0])
    return {"U": object, "S": object}.get(first.dtype.kind, np.float32)


def ask(uri: str, inputs: Any) -> Any:
    """What the served model answers to JSON. The columns of a row are in another order than in training."""
    if isinstance(inputs, dict):
        plain = {name: [None if value != value else value for value in values] for name, values in inputs.items()}
        names = sorted(plain, reverse=True)
        records = [dict(zip(names, row, strict=True)) for row in zip(*map(plain.get, names), strict=True)]
        body: Any = {"dataframe_records": records}
    else:
        body = {"inputs": [base64.b64encode(x).decode() if isinstance(x, bytes) else x for x in inputs]}
    request = urllib.request.Request(
        f"{uri}/invocations", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=240) as response:
        return json.loads(response.read())["predictions"]


def check_same_rows(answered: Sequence[Mapping[str, Any]], predicted: Sequence[Mapping[str, str]]) -> None:
    """A model answers with the columns and the values that `predict` writes."""
    for row, written in zip(answered, predicted, strict=True):
        assert list(row) == [name for name in written if name != "file"]
        for name, value in row.items():
            if isinstance(value, float):
                assert value == pytest.approx(float(written[name]), rel=NEAR, abs=NEAR), name
            else:
                assert str(value).lower() == written[name].lower(), name


def run_json(command: Command, *words: str) -> dict[str, Any]:
    ended = command(*words, "--json")
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def last_parts(metrics: Mapping[str, float]) -> dict[str, float]:
    return {
        name.rpartition("/")[2]: value for name, value in metrics.items() if name.startswith(("test/", "evaluate/"))
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_door_gives_the_same_number(command: Command, isolated: Callable[..., Any], name: str) -> None:
    make, kind, form, words = CASES[name]
    data = make(command.folder, kind, form)
    header = ("dataset.header=[age,income,town,born,answer]",) if form == "headerless" else ()
    common = ("training.epochs=2", "optimizer.learning_rate=0.01", "hydra.run.dir=run")
    run = run_json(command, *data.words, *words, *header, *common)
    names = json.loads((command.folder / "run" / "learned_state.json").read_text())["outputs"][0]["names"]
    doors = {"run": last_parts(run["metrics"])}
    doors["evaluate"] = last_parts(run_json(command, "evaluate", run["run_id"])["metrics"])
    columns = ("--columns", "a,b,c") if kind == "multi_label" else ()
    where = ("--input", str(data.file), "--output", "out.csv", "--probabilities")
    run_json(command, "predict", run["run_id"], *where, *columns)
    predicted = read_rows(command.folder / "out.csv")
    doors["predict"] = score_rows(predicted, kind, names, data.answers)
    (logged,) = command.folder.glob("mlartifacts/*/models/*/artifacts/MLmodel")
    answered, logits = isolated(load_and_answer, str(logged.parent), data.inputs)
    check_same_rows(answered, predicted)
    doors["pyfunc"] = score_rows(answered, kind, names, data.answers)
    doors["logits"] = compute_metrics(kind, names, logits, data.answers)
    if name in SERVED:
        with serve_model(command, run["model"]) as uri:
            answered = ask(uri, data.inputs)
        check_same_rows(answered, predicted)
        doors["served"] = score_rows(answered, kind, names, data.answers)
    if make is make_names:
        resumed = run_json(command, "resume=run", "training.max_steps=4")
        assert resumed["status"] == "FINISHED"
    keys = ("mae",) if kind == "regression" else ("loss", "accuracy")
    for door, found in doors.items():
        for key in keys:
            assert found[key] == pytest.approx(doors["run"][key], rel=NEAR, abs=NEAR), (door, key, doors)
