"""What a person sees of a sweep in MLflow's UI: a real server, and Chromium on its pages.

`make pictures` keeps what is seen as the pictures of docs/.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scaleflow.pages.charts import find_size
from tests.conftest import Command
from tests.tracking.browser import Pages, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred"),  # MLflow's own, where it is imported
]

SWEEP = ("model.units=16,64,256", "training.epochs=5", "training.batch_size=64", "tracking.register_as=digits")

#: Of the last job's run.
NAME = "units=256 digits-mlp-one_device-float32"


@dataclass(frozen=True)
class Swept:
    """A sweep, and where its pages are.

    Attributes:
        folder: the sweep's.
        link: to the parent, as the command printed it.
        experiment: the experiment's place in the UI.
        parent, child: the places of two runs; the child is the last job's.
        rows: of the report.
    """

    folder: Path
    link: str
    experiment: str
    parent: str
    child: str
    rows: list[dict[str, str]]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, server_uri: str) -> Swept:
    command = Command(tmp_path_factory.mktemp("swept"))
    ended = command("-m", *SWEEP, f"tracking.uri={server_uri}", "hydra.sweep.dir=s", timeout=400)
    assert ended.returncode == 0, ended.stderr
    (link,) = (line.split()[-1] for line in ended.stdout.splitlines() if line.startswith("look at it"))
    folder = command.folder / "s"
    rows = list(csv.DictReader((folder / "report.csv").read_text().splitlines()))
    experiment, _, parent = link.partition("#/")[2].partition("?")[0].rpartition("/runs/")
    runs = f"{experiment}/runs"
    (last,) = (row["run"] for row in rows if row["job"] == "2")
    return Swept(folder, link, experiment, f"{runs}/{parent}", f"{runs}/{last}", rows)


def test_the_table_of_runs_has_the_parent_and_its_children(swept: Swept, pages: Pages) -> None:
    pages.open(f"{swept.experiment}/runs")
    pages.sees("sweep of model.units")
    pages.click("[role=gridcell] button[data-component-id*=runnamecellrenderer]")
    pages.sees(*(f"units={row['model.units']} digits-mlp-one_device" for row in swept.rows))
    pages.photograph("runs")


def test_the_printed_link_leads_to_the_parent_with_its_children(swept: Swept, pages: Pages) -> None:
    pages.open(swept.link)
    pages.sees("sweep of model.units", "Child runs", "Finished", "scaleflow.swept", "scaleflow.command")
    assert "Evaluation runs" not in pages.text()


def test_the_sweep_is_described_by_its_table_and_its_best_model(swept: Swept, pages: Pages) -> None:
    pages.open(swept.link)
    best = swept.rows[0]
    pages.sees(f"Best: #{best['job']} model.units={best['model.units']}, val/loss", "Load the model of the best job")
    pages.sees("Metrics (10)", f"val/loss {float(best['val/loss']):.5g}"[:14], "test/accuracy")  # of the best job
    pages.click("button", "Show more")
    pages.sees("val/accuracy", *(f"{row['job']} {row['model.units']} FINISHED" for row in swept.rows))
    pages.sees("mlflow.pyfunc.load_model(", "The command:", f"hydra.sweep.dir={swept.folder}")
    pages.photograph("sweep", above=("p", "The command:"))


def test_a_job_is_described_by_its_result_and_its_model(swept: Swept, pages: Pages) -> None:
    pages.open(swept.child)
    pages.sees("FINISHED after 105 steps: test loss", "Load the model:", "baseline", "test/loss")
    pages.click("button", "Show more")
    pages.sees("mlflow.pyfunc.load_model(", "outputs = model.predict(model.input_example)", "training.epochs=10")


def test_a_job_shows_its_params_metrics_tags_and_data(swept: Swept, pages: Pages) -> None:
    pages.open(swept.child)
    pages.sees(NAME, "Parent run", "Finished", "digits (", "Logged models (1)")
    pages.sees("scaleflow.host", "scaleflow.folder", "scaleflow.version.tensorflow", "test/accuracy")
    pages.type("Search parameters", "resolved.")
    pages.sees("resolved.strategy", "resolved.replicas", "resolved.global_batch_size")


def test_a_jobs_curves_are_drawn(swept: Swept, pages: Pages) -> None:
    pages.open(f"{swept.child}/model-metrics")
    pages.type("Search metric charts", "^(train|val)/.*(loss|accuracy)")
    pages.sees("train (2)", "val (3)")

    def drawn() -> bool:
        lines = [line.get_attribute("d") or "" for line in pages.find(".scatterlayer path.js-line")]
        return len(lines) >= 2 and all(line.count("L") >= 4 for line in lines)

    pages.until(drawn, "curve of five epochs")
    pages.photograph("curves")


def test_the_config_is_shown(swept: Swept, pages: Pages) -> None:
    pages.open(f"{swept.child}/artifacts/config.yaml")
    config = (swept.folder / "2" / "config.yaml").read_text()
    pages.sees("_target_: scaleflow.dataset.digits.Digits", *config.splitlines()[:5])
    pages.sees("overrides.yaml", "environment.txt", "model_summary.txt")


def test_the_report_is_a_table(swept: Swept, pages: Pages) -> None:
    pages.open(f"{swept.parent}/artifacts/report.json")
    pages.sees("View as table", "val/accuracy", "test/accuracy")
    shown = [[cell.text for cell in row.find_elements("css selector", "[role=cell]")] for row in body(pages)]
    jobs = [[row["best"], row["job"], row["model.units"], "FINISHED"] for row in swept.rows]
    assert [row[:4] for row in shown] == jobs
    data = json.loads((swept.folder / "report.json").read_text())
    at = data["columns"].index("examples/s")
    assert [float(row[at]) for row in shown] == [row[at] for row in data["data"]]
    pages.photograph("report")


def body(pages: Pages) -> list[Any]:
    return [row for row in pages.find("[role=row]") if row.find_elements("css selector", "[role=cell]")]


@pytest.mark.parametrize("name", ["throughput", "curves", "over-model.units"])
def test_the_reports_pictures_are_shown(swept: Swept, pages: Pages, name: str) -> None:
    pages.open(f"{swept.parent}/artifacts/plots/{name}.svg")
    pages.sees(f"plots/{name}.svg")

    def size() -> Any:
        found = [image for image in pages.find("img") if (image.get_attribute("src") or "").startswith("blob:")]
        sizes = [(image.get_property("naturalWidth"), image.get_property("naturalHeight")) for image in found]
        return [size for size in sizes if all(size)]

    drawn = (swept.folder / f"{name}.svg").read_text()
    assert pages.until(size, "picture")[0] == find_size(drawn)
    if name == "curves":
        pages.photograph("report-curves")


def test_the_model_has_its_signature(swept: Swept, pages: Pages) -> None:
    pages.open("models/digits/versions/3")
    pages.sees("Schema", "Inputs (1)", "Outputs (12)", "newest")
    for part in ("Inputs (1)", "Outputs (12)"):
        pages.click("[role=row] [role=cell]", part)
    pages.sees("Tensor (dtype: float32, shape: [-1,8,8,1])", "probability_9")
    pages.photograph("model")
    pages.click("a", "model")
    pages.sees("About this logged model", "Ready", "Metrics (10)", NAME)
