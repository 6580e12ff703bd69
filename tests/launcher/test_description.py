"""What the description of a run says in the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from scaleflow.interfaces.events import CheckpointSaved, Event, MetricsLogged, RunEnded, RunReady, TagsSet
from scaleflow.launcher.recording.description import describe_run
from scaleflow.runs import RunFolder, RunState
from scaleflow.runs.state import make_length_tags

PARAMS = {"training.max_steps": "null", "resolved.examples.validation": "144"}
READY = RunReady("run", params=PARAMS, steps=82, epochs=2)
BASELINES = MetricsLogged(0, {"baseline/loss": 2.3055, "baseline/accuracy": 0.11, "baseline/test/loss": 2.3075})
MEASURED = MetricsLogged(82, {"train/loss": 2.0, "val/loss": 1.974, "val/accuracy": 0.5, "test/loss": 168401787944.96})
SAVED = CheckpointSaved(82, "step-82")
STORE = "sqlite:////work/mlflow.db"


class Described:
    """A run's folder, and the descriptions of what happened in it."""

    def __init__(self, folder: Path) -> None:
        self.files = RunFolder(folder)

    def command(self, command: str, *overrides: str) -> Described:
        tags = {"scaleflow.command": command, "scaleflow.host": "gpu1"}
        self.files.provenance.write_text(json.dumps(tags))
        self.files.overrides.write_text(yaml.safe_dump([*overrides]))
        return self

    def __call__(self, *events: Event, model: str | None = "models:/m-7") -> str:
        state = RunState()
        for event in events:
            state.apply(event)
        return describe_run(self.files, state, STORE, model)


@pytest.fixture
def described(tmp_path: Path) -> Described:
    return Described(tmp_path).command("python -m scaleflow training.epochs=2", "training.epochs=2")


def test_a_longer_run_is_described_with_its_length_of_now(described: Described) -> None:
    resumed = (RunReady("run", steps=123, epochs=3, resumed=82), TagsSet(make_length_tags({"training.epochs": 3})))
    text = described(READY, SAVED, RunEnded("FINISHED"), *resumed, RunEnded("FINISHED"))
    assert "Resumed with `training.epochs=3`: the params have the length with which the run began." in text
    assert f"resume={described.files.path} training.epochs=6\n" in text
    steps = RunReady("run", params={"training.max_steps": "4"}, steps=4, epochs=1)
    longer = (RunReady("run", steps=9, epochs=1, resumed=4), TagsSet(make_length_tags({"training.max_steps": 9})))
    text = described(steps, SAVED, RunEnded("FINISHED"), *longer, RunEnded("FINISHED"))
    assert f"resume={described.files.path} training.max_steps=18\n" in text


def test_a_finished_run_has_its_results_its_model_and_how_to_go_on(described: Described) -> None:
    assert (
        described(READY, BASELINES, MEASURED, SAVED, RunEnded("FINISHED"))
        == f"""\
**FINISHED** after 82 steps: test loss 1.68e+11.

Load the model:

```python
import mlflow

mlflow.set_tracking_uri("sqlite:////work/mlflow.db")
model = mlflow.pyfunc.load_model("models:/m-7")
outputs = model.predict(model.input_example)  # raw inputs, as the dataset has them
```

Train it longer, in the folder of the command below, on gpu1:

```sh
python -m scaleflow resume={described.files.path} training.epochs=4
```

| metric | value | baseline&emsp; |
|---|---|---|
| test/loss | 1.68e+11&emsp; | 2.308 |
| val/loss | 1.974 | 2.305 |
| val/accuracy&emsp; | 0.5 | 0.11 |

The baseline is the best constant prediction: the most frequent class, or the mean.

The command:

```sh
python -m scaleflow training.epochs=2
```"""
    )


def test_a_run_that_failed_has_the_reason_and_how_to_resume(described: Described) -> None:
    metrics = MetricsLogged(41, {"train/loss": 2.0, "train/accuracy": 0.5})
    reason = "NotFinite: the loss is not finite at step 42"
    saved = CheckpointSaved(40, "step-40")
    text = described(READY, BASELINES, metrics, saved, RunEnded("FAILED", reason), model=None)
    assert text.startswith(f"**FAILED** at step 41:\n\n```text\n{reason}\n```\n\nResume it from step 40, in the folder")
    resume = f"```sh\npython -m scaleflow resume={described.files.path}\n```"
    assert f"Resume it from step 40, in the folder of the command below, on gpu1:\n\n{resume}\n\n| metric |" in text
    assert "baseline" not in text
    assert "mlflow" not in text


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((), "**RUNNING.** The results follow when the run ends."),
        ((), "If it is interrupted, resume it from its newest checkpoint, or from the beginning"),
        ((RunEnded("KILLED", "stopped by SIGINT"),), "**KILLED** at step 0:\n\n```text\nstopped by SIGINT\n```"),
        ((RunEnded("KILLED", "stopped"),), "\n\nResume it from its newest checkpoint, or from the beginning, in"),
        ((RunEnded("KILLED", "a ``` in it"),), "````text\na ``` in it\n````"),
        ((RunEnded("KILLED", "stopped"), RunReady("run", resumed=40)), "**RUNNING.**"),
    ],
)
def test_it_says_how_the_run_stands(described: Described, events: tuple[Event, ...], expected: str) -> None:
    assert expected in described(READY, *events)


@pytest.mark.parametrize(
    ("params", "longer"),
    [({}, "training.epochs=4"), ({"training.max_steps": "82"}, "training.max_steps=164")],
)
def test_a_finished_run_is_made_twice_as_long(described: Described, params: dict[str, str], longer: str) -> None:
    ready = RunReady("run", params={**PARAMS, **params}, steps=82, epochs=2)
    assert f" {longer}\n" in described(ready, SAVED, RunEnded("FINISHED"))


def test_a_finished_run_without_a_checkpoint_cannot_be_made_longer(described: Described) -> None:
    assert "resume=" not in described(READY, RunEnded("FINISHED"))


@pytest.mark.parametrize(
    ("command", "overrides", "shown"),
    [
        ("python -m scaleflow -m seed=1,2 'a.b=[1, 2]'", ["seed=1", "a.b=[1, 2]"], "seed=1"),
        ("python train.py", ["seed=1", "tracking.tags={team: vision}"], "seed=1 'tracking.tags={team: vision}'"),
        ("python -m scaleflow tracking.uri=http://h:1", ["tracking.uri=http\\://h\\:1"], None),
        ("python -m scaleflow --overrides 'cut", ["seed=1"], "seed=1"),
    ],
)
def test_overrides_that_the_command_does_not_show_are_added(
    described: Described, command: str, overrides: list[str], shown: str | None
) -> None:
    text = described.command(command, *overrides)(READY)
    assert f"The command:\n\n```sh\n{command}\n```" in text
    assert (f"This run's overrides:\n\n```sh\n{shown}\n```" in text) if shown else "overrides:" not in text


def test_description_too_long_for_mlflow_is_cut_and_says_so(described: Described) -> None:
    described.command("python -m scaleflow " + "x" * 3900, *(f"model.layer{n}.units={n}" for n in range(300)))
    values: dict[str, Any] = {f"test/metric{n}": n / 7 for n in range(50)}
    text = described(READY, MetricsLogged(1, values), RunEnded("FAILED", "because " * 1000))
    assert len(text) <= 8000
    assert "... (cut; the tag scaleflow.error has more)" in text
    assert "... (cut; the tag scaleflow.command has more)" in text
    assert "... (cut; the file overrides.yaml has more)" in text
    assert "and 30 more metrics" in text
    assert text.count("```") % 2 == 0


def test_a_part_that_does_not_fit_is_left_out_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 200) / ("e" * 200)
    folder.mkdir(parents=True)
    described = Described(folder).command("python -m scaleflow " + "x" * 3900, *["y" * 1900])
    values = {f"test/{'metric' * 30}{n}": 1.0 for n in range(20)}
    text = described(READY, MetricsLogged(1, values), RunEnded("FAILED", "z" * 1900))
    assert len(text) <= 8000
    assert text.endswith("*The rest is omitted: MLflow accepts at most 8,000 characters.*")
    assert text.count("```") % 2 == 0


def test_a_run_without_files_or_metrics_is_described(tmp_path: Path) -> None:
    text = Described(tmp_path)(READY, RunEnded("FINISHED"), model=None)
    assert text == "**FINISHED** after 0 steps."
