"""A run's folder as a worker leaves it, written by hand: what is recorded of it needs no TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from scaleflow.interfaces import Inputs, LearnedState, Outputs
from scaleflow.runs.learned_state import write_learned_state
from tests.event_files import EventWriter

BEGAN = 1_700_000_000_000

#: What a finished run has in the store, beside its points.
FILES = {"config.yaml", "overrides.yaml", "environment.txt", "plot.txt"}


class MadeRun:
    """Writes what a command and its chief do, and knows what has to be in the store.

    Args:
        folder: made; the run's.
        tracking: the section of the config.
    """

    def __init__(self, folder: Path, **tracking: Any) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.events = folder / "events.jsonl"
        self.points: dict[str, list[int]] = {"train/loss": [], "val/loss": []}
        section = {"name": "mlflow", "experiment": folder.name, **tracking}
        (folder / "config.yaml").write_text(yaml.safe_dump({"tracking": section}))
        for name in ("overrides.yaml", "environment.txt"):
            (folder / name).write_text("[]\n")
        self.write = EventWriter(self.events)

    def ready(self, params: Mapping[str, str] | None = None, **more: Any) -> MadeRun:
        fields = {"params": params or {"model": "mlp"}, "tags": {"team": "vision"}, "steps": 9, "epochs": 3}
        self.write("ready", name=self.folder.name, began=BEGAN, **fields, **more)
        return self

    def train(self, first: int, last: int) -> MadeRun:
        """Points from step `first` to step `last`, each an event of its own."""
        for step in range(first, last + 1):
            values = {"train/loss": 1 / step, **({"val/loss": 2 / step} if step % 10 == 0 else {})}
            self.write("metrics", step=step, values=values)
            for key in values:
                self.points[key].append(step)
        return self

    def files(self, step: int = 9) -> MadeRun:
        """A file to keep, and a model."""
        (self.folder / "plot.txt").write_text("a plot")
        self.write("artifact", path=str(self.folder / "plot.txt"))
        export(self.folder / "model")
        self.write("model", path=str(self.folder / "model"), step=step)
        return self

    def end(self, status: str = "FINISHED", **more: Any) -> MadeRun:
        self.write("end", status=status, **more)
        return self

    @property
    def state(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "record.json").read_text()))


def export(folder: Path) -> None:
    """What `scaleflow.model.export` leaves, as far as it is looked into where it is logged."""
    (folder / "saved_model").mkdir(parents=True)
    (folder / "saved_model" / "saved_model.pb").write_bytes(b"graph" * 100)
    (folder / "model.keras").write_bytes(b"weights" * 100)
    np.save(folder / "input_example.npy", np.zeros((1, 4), "float32"))
    tensor = {"dtype": "float32", "shape": [-1, 4]}
    described = {"inputs": tensor, "outputs": tensor, "tensorflow": "2.21.0", "keras": "3.15.1"}
    (folder / "signature.json").write_text(json.dumps(described))
    write_learned_state(folder, LearnedState(Inputs((4,)), Outputs("regression", (4,))))


def only_run(uri: str, experiment: str) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return run


def steps_of(uri: str, run: Any, key: str) -> list[int]:
    """The steps of all points of a metric, as the store gives them."""
    from mlflow import MlflowClient

    return [point.step for point in MlflowClient(uri).get_metric_history(run.info.run_id, key)]


def assert_is_all_there(uri: str, made: MadeRun, status: str = "FINISHED", files: Sequence[str] = ()) -> Any:
    """One run, with its status, each point once and in order, its files and one model; gives the run."""
    from mlflow import MlflowClient

    client, run = MlflowClient(uri), only_run(uri, made.folder.name)
    assert run.info.status == run.data.tags["scaleflow.status"] == status
    for key, steps in made.points.items():
        if steps:
            assert steps_of(uri, run, key) == steps
    there = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert there >= {"config.yaml", "overrides.yaml", "environment.txt", *files}
    return run


def assert_has_one_model(uri: str, run: Any) -> Any:
    """The run has one logged model, whole; gives it."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (model,) = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
    assert [output.model_id for output in run.outputs.model_outputs] == [model.model_id]
    assert str(model.status) == "READY"
    return model
