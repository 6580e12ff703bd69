"""What features do in workers: which hooks are called, and what their errors do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from scaleflow.errors import ConfigError, RunError
from scaleflow.interfaces.features import Feature
from scaleflow.interfaces.hooks import DrawnExamples, ReadData, TrainingData, WorkerHook
from scaleflow.worker import hooks as worker_hooks
from scaleflow.worker.hooks import (
    call_after_data,
    call_report_examples,
    change_feed,
    draw_examples,
    explain_no_folds,
    load_hooks,
)


class Keeper(WorkerHook):
    def after_data(self, data: ReadData) -> Mapping[str, Any]:
        return {"kept": len(data.splits)}


class Broken(WorkerHook):
    def after_data(self, data: ReadData) -> Mapping[str, Any]:
        raise ValueError("odd data")


class Strict(WorkerHook):
    def after_data(self, data: ReadData) -> Mapping[str, Any]:
        raise ConfigError("dataset.limit=1: too few")


def make_data(emit: Callable[[Any], None]) -> ReadData:
    nothing: Any = None
    return ReadData(
        plan=nothing,
        source=nothing,
        splits={"train": nothing},
        raw_sample=None,
        workers=nothing,
        emit=emit,
        emit_late=emit,
    )


def declare(monkeypatch: pytest.MonkeyPatch, *features: Feature) -> None:
    by_name = {feature.name: feature for feature in features}
    monkeypatch.setattr(worker_hooks, "list_features", lambda: by_name)


def test_an_error_of_a_hook_is_told_and_the_others_are_called() -> None:
    notes: list[Any] = []
    hooks = {"idle": WorkerHook(), "broken": Broken(), "keeper": Keeper()}
    assert call_after_data(hooks, make_data(notes.append)) == {"kept": 1}
    (note,) = notes
    assert note.text.startswith("the feature broken: missing, and the rest goes on (ValueError: odd data")


def test_a_hook_can_refuse_the_run() -> None:
    with pytest.raises(ConfigError, match="too few"):
        call_after_data({"strict": Strict()}, make_data(print))


def test_the_hooks_of_used_features_are_loaded(monkeypatch: pytest.MonkeyPatch, plan: Any) -> None:
    notes: list[Any] = []
    declare(
        monkeypatch,
        Feature(name="keeper", worker=f"{__name__}:Keeper"),
        Feature(name="absent", worker="no.such.module:Hook"),
        Feature(name="unused", worker="no.such.module:Hook", is_used=lambda plan: plan.debug.overfit),
        Feature(name="without a hook"),
    )
    assert list(load_hooks(plan(), notes.append)) == ["keeper"]
    declare(monkeypatch, Feature(name="absent", worker="no.such.module:Hook", changes_training=True))
    with pytest.raises(ConfigError, match="the feature absent: it changes what the model is trained on"):
        load_hooks(plan(), notes.append)
    (note,) = notes
    assert note.text.startswith("the feature absent: missing, and the rest goes on (ModuleNotFoundError: ")


class Drawing(WorkerHook):
    def draw_examples(self, data: TrainingData) -> DrawnExamples | None:
        nothing: Any = None
        return DrawnExamples(order=nothing, outputs=nothing, note="half of them")


class ExampleFeed:
    def __init__(self, text: str) -> None:
        self.text = text

    def fetch(self) -> None:
        """Makes it a feed for the check of what a hook returns."""


class Changing(WorkerHook):
    def __init__(self, text: str) -> None:
        self.text = text

    def explain_no_folds(self, plan: Any) -> str:
        return self.text

    def change_feed(self, data: TrainingData, feed: Any) -> Any:
        return ExampleFeed(f"{feed.text} {self.text}")

    def report_examples(self, data: TrainingData, feed: Any, folder: Path, emit: Callable[[Any], None]) -> None:
        raise ValueError(f"cannot show {feed}")


class Failing(WorkerHook):
    def draw_examples(self, data: TrainingData) -> DrawnExamples | None:
        raise ValueError("no classes")

    def change_feed(self, data: TrainingData, feed: Any) -> Any:
        raise ValueError("no images")


NO_DATA: Any = None


def test_one_feature_says_which_examples_an_epoch_has() -> None:
    assert draw_examples({"idle": WorkerHook()}, NO_DATA) == ("", None)
    drawing, drawn = draw_examples({"idle": WorkerHook(), "half": Drawing()}, NO_DATA)
    assert drawing == "half"
    assert drawn is not None
    assert drawn.note == "half of them"
    with pytest.raises(ConfigError, match="the features half and other both say which examples an epoch has"):
        draw_examples({"half": Drawing(), "other": Drawing()}, NO_DATA)


def test_features_change_the_feed_one_after_the_other() -> None:
    feed: Any = ExampleFeed("feed")
    hooks = {"first": Changing("with a"), "idle": WorkerHook(), "second": Changing("and b")}
    changed: Any = change_feed(hooks, NO_DATA, feed)
    assert changed.text == "feed with a and b"


def test_an_error_in_what_changes_the_training_is_not_passed_over() -> None:
    with pytest.raises(RunError, match=r"the feature failing: it changes what the model is trained on.*no classes"):
        draw_examples({"failing": Failing()}, NO_DATA)
    with pytest.raises(RunError, match=r"the feature failing: it changes what the model is trained on.*no images"):
        change_feed({"failing": Failing()}, NO_DATA, NO_DATA)


def test_a_feature_can_say_why_no_fold_is_left_out() -> None:
    notes: list[Any] = []
    assert explain_no_folds({"idle": WorkerHook()}, NO_DATA, notes.append) == ""
    hooks = {"idle": WorkerHook(), "mixing": Changing("it mixes them")}
    assert explain_no_folds(hooks, NO_DATA, notes.append) == "it mixes them"
    assert not notes


def report_with_an_error() -> list[Any]:
    """In a child, as errors are compared with those of TensorFlow."""
    notes: list[Any] = []
    feed: Any = "feed"
    call_report_examples({"changing": Changing("")}, NO_DATA, feed, Path(), notes.append)
    return notes


def test_an_error_in_a_report_of_examples_is_a_note(isolated: Callable[..., Any]) -> None:
    (note,) = isolated(report_with_an_error)
    assert note.text.startswith("the feature changing: missing, and the rest goes on (ValueError: cannot show feed")


def look_without_features() -> dict[str, Any]:
    """In a child: what is kept and told of data if no feature looks at data."""
    import numpy as np

    from scaleflow import dataset
    from scaleflow.config.compose import compose_config
    from scaleflow.config.policies import Policy
    from scaleflow.dataset.batches.splits import SingleProcess
    from scaleflow.interfaces import Arrays, Inputs, Outputs
    from scaleflow.launcher.prepare import make_plan
    from scaleflow.worker.data import make_look

    class Points:
        inputs = Inputs((2,), "float32")
        outputs = Outputs("regression", (1,))
        splits = ("train",)

        def load(self, split: str) -> Arrays:
            return Arrays(np.ones((200, 2), "float32"), np.ones((200, 1), "float32"))

    found: dict[str, Any] = {}
    for check in ("warn", "none", "refuse"):
        plan = make_plan(
            compose_config([f"dataset.check={check}", "dataset.validation=null"]), Policy(work="data checks")
        )
        events: list[Any] = []
        source = Points()
        try:
            look = make_look(
                plan, {"other": WorkerHook()}, source, None, False, SingleProcess(), events.append, events.append
            )
        except ConfigError as error:
            found[check] = str(error)
            continue
        learned = dataset.prepare_splits(source, plan.dataset, 0, look=look).learned
        assert learned is not None
        found[check] = (list(learned.schema), events)
    return found


def test_without_features_a_run_keeps_the_schema_of_its_data_alone(isolated: Callable[..., Any]) -> None:
    found = isolated(look_without_features)
    assert found["warn"] == (["rows", "columns", "targets"], [])
    assert found["none"] == ([], [])
    assert found["refuse"] == ("dataset.check=refuse: there is no feature that looks at data; use dataset.check=none")
