"""What a person sees of a pipeline in MLflow's UI: two clicks from a registered version to its data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from scaleflow.runs.folder import read_json
from tests.conftest import Command
from tests.tracking.browser import Pages, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred"),  # MLflow's own, where it is imported
]

FILE = """
overrides: [dataset=digits, dataset.limit=400, model.units=8, training.epochs=2, evaluation=none, "tracking.uri=URI"]
stages:
  fit: {command: train}
  go:  {command: promote, run: "${stages.fit.run_id}", model: numbers}
"""


@dataclass(frozen=True)
class Finished:
    """A pipeline that has finished, its run's place in the UI, and the id of its training's run."""

    folder: Path
    place: str
    fit: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, server_uri: str) -> Finished:
    command = Command(tmp_path_factory.mktemp("pipeline"))
    (command.folder / "conf" / "pipeline").mkdir(parents=True)
    (command.folder / "conf" / "pipeline" / "mine.yaml").write_text(FILE.replace("URI", server_uri))
    ended = command("pipeline", "mine", "--config-dir", "conf", timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (link,) = (line.split()[-1] for line in ended.stdout.splitlines() if line.startswith("look at it"))
    folder = command.folder / "pipelines" / "mine"
    return Finished(
        folder, link.partition("#/")[2].partition("?")[0], read_json(folder / "fit/1/record.json")["run_id"]
    )


def test_two_clicks_lead_from_a_version_to_its_data_and_its_pipeline(finished: Finished, pages: Pages) -> None:
    pages.open("models/numbers/versions/1")
    pages.sees("Source Run", "champion")
    pages.click(f"a[href*='/runs/{finished.fit}']")
    pages.sees("Datasets", "digits (", "Train", "Parent run", "mine", "scaleflow.stage : fit")
    pages.click(f"a[href*='{finished.place.rpartition('/')[2]}']")
    pages.sees("Child runs", "FINISHED. Stages: 2 FINISHED", "scaleflow.command")


def test_the_page_of_a_pipeline_links_its_runs_and_its_version(finished: Finished, pages: Pages) -> None:
    pages.open(finished.place)
    pages.click("button", "Show more")
    pages.sees("stage command status", "fit train FINISHED", "digits train", "go promote FINISHED", "promoted")
    pages.photograph("pipeline")
    assert pages.find(f"a[href$='#/runs/{finished.fit}']")
    pages.click("a[href$='#/models/numbers/versions/1']")
    pages.until(lambda: len(pages.driver.window_handles) > 1 or "versions/1" in pages.driver.current_url, "the version")


def test_the_resolved_stages_are_an_artifact(finished: Finished, pages: Pages) -> None:
    pages.open(f"{finished.place}/artifacts/stages.yaml")
    pages.sees("graph.svg", "results.csv", "pipeline.yaml", "training.epochs=2", finished.fit, "made_of:")
