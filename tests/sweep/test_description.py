"""What the description of a sweep says in the store."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from scaleflow.interfaces.events import MetricsLogged, RunReady
from scaleflow.runs import RunFolder
from scaleflow.runs.state import RunState
from scaleflow.sweep.ledger import LedgerEntry
from scaleflow.sweep.parent_run import describe_sweep
from scaleflow.sweep.sweep_report import SweepReport


def job(number: int, status: str = "FINISHED", reason: str = "") -> tuple[LedgerEntry, RunState]:
    run = RunState(RunReady("fake", params={"seed": str(number), "resolved.replicas": "1"}))
    if status == "FINISHED":
        run.last_status = "FINISHED"
        run.apply(MetricsLogged(9, {"val/loss": float(number), "test/loss": 2.0 * number}))
    run.record = {"model_uri": f"models:/m-{number}", "uri": "http://me:****@host:5000"}
    words = [f"seed={number}"]
    return LedgerEntry(number, str(number), words, str(number), status, reason), run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    RunFolder(tmp_path).provenance.write_text('{"scaleflow.command": "python -m scaleflow -m seed=3,1,2"}')
    return tmp_path


def test_it_has_the_table_the_best_model_and_how_to_go_on(folder: Path) -> None:
    text = describe_sweep(SweepReport([job(3), job(1), job(2, "FAILED", "worker 0 was killed")], ["seed"]), folder)
    assert (
        text
        == f"""\
**Best:** #1 seed=1, val/loss 1

Load the model of the best job:

```python
import mlflow

mlflow.set_tracking_uri("http://host:5000")
model = mlflow.pyfunc.load_model("models:/m-1")
outputs = model.predict(model.input_example)  # raw inputs, as the dataset has them
```

To run what is missing, or more values, repeat the command below with

```sh
hydra.sweep.dir={folder}
```

| best&emsp; | job&emsp; | seed&emsp; | status&emsp; | val/loss&emsp; | test/loss&emsp; |
|---|---|---|---|---|---|
| * | 1&emsp; | 1 | FINISHED&emsp; | 1 | 2 |
|  | 3&emsp; | 3 | FINISHED&emsp; | 3 | 6 |
|  | 2&emsp; | 2 | FAILED&emsp; |  |  |

- #2 FAILED: worker 0 was killed

The command:

```sh
python -m scaleflow -m seed=3,1,2
```"""
    )


def test_the_best_fifty_jobs_are_shown(folder: Path) -> None:
    report = SweepReport([job(number) for number in range(1060)], ["seed"])
    text = describe_sweep(report, folder)
    rows = [line for line in text.splitlines() if "FINISHED" in line]
    assert [int(row.split(" | ")[1].removesuffix("&emsp;")) for row in rows] == [*range(50)]
    assert "\n1,010 more rows are in report.md.\n" in text
    assert text.endswith("```sh\npython -m scaleflow -m seed=3,1,2\n```")
    shown = io.StringIO()
    report.show(shown)
    assert shown.getvalue().count("FINISHED") == 50
    assert "and 1,010 more rows in report.md" in shown.getvalue()
    assert report.markdown().count("FINISHED") == report.csv().count("FINISHED") == 1060


def test_rows_that_mlflow_does_not_take_are_left_out(folder: Path) -> None:
    jobs = [job(number) for number in range(300)]
    for entry, run in jobs:
        assert run.ready is not None
        run.ready = replace(run.ready, params={**run.params, "seed": f"{entry.number} {'long ' * 50}"})
    text = describe_sweep(SweepReport(jobs, ["seed"]), folder)
    assert 7500 < len(text) <= 8000
    rows = [line for line in text.splitlines() if "FINISHED" in line]
    assert 10 < len(rows) < 50
    assert f"\n{300 - len(rows)} more rows are in report.md.\n" in text
    assert rows[-1].split(" | ")[1].startswith(str(len(rows) - 1))


def test_many_long_reasons_leave_room_for_the_table(folder: Path) -> None:
    jobs = [job(0), *(job(number, "FAILED", "x" * 3000) for number in range(1, 100))]
    text = describe_sweep(SweepReport(jobs, ["seed"]), folder)
    assert len(text) <= 8000
    assert "- 94 more, in report.md" in text
    assert text.count("x" * 200) == 5
    assert "| * |" in text


def test_without_a_best_job_it_says_why(folder: Path) -> None:
    text = describe_sweep(SweepReport([job(1), job(2)], ["seed"], "val/f1"), folder)
    why = "no finished job has sweep.metric=val/f1; the metrics are val/loss, test/loss"
    assert text.startswith(f"no best job: {why}\n")
    assert "import mlflow" not in text
