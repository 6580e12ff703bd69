"""The simple models of a table: what they are fitted to, their process, and their metrics."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import f1_score, log_loss, roc_auc_score

from scaleflow import dataset
from scaleflow.errors import ConfigError
from scaleflow.features.baselines import hook, models
from scaleflow.features.baselines.data import leave_out_ignored, make_features, read_targets, write_baseline_data
from scaleflow.features.baselines.files import BaselineFiles
from scaleflow.features.baselines.fit import FAILED_FIT, fit_and_write
from scaleflow.features.baselines.hook import BaselinesHook, report_baselines
from scaleflow.features.baselines.models import BOOSTING, BaselineData, fit_baselines, make_models
from scaleflow.interfaces import Arrays, Inputs, ObjectiveOptions, Outputs
from scaleflow.interfaces.events import Event, MetricsLogged, Note, PhaseBegan
from scaleflow.interfaces.hooks import TrainedRun
from scaleflow.launcher.recording.description import format_results
from scaleflow.runs import RunFolder, RunState
from tests.launcher.test_supervisor import wait_for


def draw(classes: int) -> BaselineData:
    random = np.random.default_rng(0)
    features = random.normal(size=(300, 4)).astype("f")
    values = features[:, 0] * features[:, 1] + features[:, 2]
    targets = values if not classes else np.digitize(values, [-0.5, 0.5][: classes - 1])
    return BaselineData(features[:200], targets[:200], features[200:], targets[200:], classes, unit=2.0)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_metrics_are_those_of_scikit_learn(is_weighted: bool, tmp_path: Path) -> None:
    data, shares = draw(0), np.arange(300) % 4 / 2
    if is_weighted:
        replace(draw(0), weights=shares[:200], test_weights=shares[200:]).save(tmp_path / "rows.npz")
        data = BaselineData.load(tmp_path / "rows.npz")
    found = fit_baselines(data, {})
    for name, model in (("linear", Ridge()), ("boosting", HistGradientBoostingRegressor(random_state=0))):
        model.fit(data.features, data.targets, sample_weight=data.weights)
        predicted = model.predict(data.test_features)
        rmse = np.sqrt(np.average((predicted - data.test_targets) ** 2, weights=data.test_weights))
        assert found[f"{name}/r2"] == pytest.approx(
            model.score(data.test_features, data.test_targets, data.test_weights)
        )
        assert found[f"{name}/rmse"] == pytest.approx(rmse)
        assert found[f"{name}/loss"] == pytest.approx((rmse / 2) ** 2)
    assert found["boosting/rmse"] < found["linear/rmse"]


#: Prints how many threads OpenMP has where a model is fitted, in a process that has not loaded scikit-learn before.
COUNT_THREADS = """
import numpy as np
from threadpoolctl import threadpool_info
from scaleflow.features.baselines import models

def score_baseline(*_, **named):
    return {"threads": max(each["num_threads"] for each in threadpool_info() if each["user_api"] == "openmp")}

models.score_baseline = score_baseline
rows = np.zeros((1, 1))
print(models.fit_baselines(models.BaselineData(rows, rows[0], rows, rows[0], 0, unit=1.0), {}))
"""


def test_they_take_one_core() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT_THREADS], capture_output=True, text=True, timeout=240)
    assert done.stdout == "{'linear/threads': 1, 'boosting/threads': 1}\n", done.stderr


@pytest.mark.parametrize(
    ("classes", "features", "bins"),
    [(0, 1_960, 255), (0, 5_000, 100), (2, 5_000, 100), (10, 500, 100), (0, 30_000, 31)],
)
def test_boosting_takes_fewer_bins_of_many_features(classes: int, features: int, bins: int) -> None:
    assert make_models(classes, features)[BOOSTING].max_bins == bins


def test_a_class_that_no_training_row_has_leaves_out_the_loss() -> None:
    data = draw(3)
    found = fit_baselines(data, {})
    model = LogisticRegression(max_iter=1000).fit(data.features, data.targets)
    assert found["linear/loss"] == pytest.approx(log_loss(data.test_targets, model.predict_proba(data.test_features)))
    assert found["linear/accuracy"] == pytest.approx(model.score(data.test_features, data.test_targets))
    assert "rows" not in found
    assert fit_baselines(replace(data, is_sample=True), {}) == {**found, "rows": 200}
    data.test_targets[0] = 3
    unknown = fit_baselines(BaselineData(**{**vars(data), "classes": 4}), {})
    assert "linear/loss" not in unknown
    assert 0 < unknown["linear/accuracy"] < 1


def test_the_process_fits_them_and_deletes_the_rows(tmp_path: Path) -> None:
    files = BaselineFiles(tmp_path)
    draw(0).save(files.rows)
    fit_and_write(files)
    assert set(json.loads(files.metrics.read_text())) >= {"boosting/rmse", "linear/r2"}
    assert not files.rows.exists()
    files.rows.write_bytes(b"no rows")
    files.metrics.unlink()
    fit_and_write(files)
    assert list(json.loads(files.metrics.read_text())) == [FAILED_FIT], "a failure leaves the run without baselines"
    assert not files.rows.exists()


def make_run(
    folder: Path, events: list[Event], is_chief: bool = True, should_stop: Callable[[], bool] = lambda: False
) -> TrainedRun:
    nothing: Any = None
    return TrainedRun(
        plan=nothing,
        folder=folder,
        log=folder / "log",
        is_chief=is_chief,
        is_resumed=False,
        is_job=False,
        splits=nothing,
        objective=nothing,
        emit=events.append,
        should_stop=should_stop,
    )


@contextlib.contextmanager
def ready(run: TrainedRun) -> Iterator[BaselinesHook]:
    """Calls the hook as a run does, except for its end."""
    made = BaselinesHook()
    made.at_ready(run)
    try:
        yield made
    finally:
        made.close()


def list_children() -> set[psutil.Process]:
    return set(psutil.Process().children())


@pytest.mark.slow
def test_the_end_of_a_run_waits_for_them_however_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, hours, events = BaselineFiles(tmp_path), iter(range(0, 10**9, 3600)), list[Event]()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(hours)))
    draw(0).save(files.rows)
    run = make_run(tmp_path, events)
    with ready(run) as made:
        made.at_end(run)
    began, logged = events
    assert isinstance(began, PhaseBegan)
    assert isinstance(logged, MetricsLogged)
    assert "baseline/boosting/rmse" in logged.values
    assert not files.rows.exists()


@pytest.mark.slow
def test_a_run_that_has_to_stop_ends_the_process_and_keeps_the_rows_for_a_resumed_run(tmp_path: Path) -> None:
    files, events, others = BaselineFiles(tmp_path), list[Event](), list_children()
    draw(0).save(files.rows)
    run = make_run(tmp_path, events, should_stop=lambda: True)
    with ready(run) as made:
        made.at_end(run)
        assert list_children() - others
    assert not list_children() - others
    assert isinstance(events[-1], Note)
    assert events[-1].text.endswith("were not fitted, because the run was stopped")
    assert files.rows.exists()
    run = make_run(tmp_path, events)
    with ready(run) as made:
        made.at_end(run)
    assert isinstance(events[-1], MetricsLogged)


def test_a_process_that_is_killed_leaves_a_note_and_no_rows(tmp_path: Path) -> None:
    files, events, others = BaselineFiles(tmp_path), list[Event](), list_children()
    os.mkfifo(files.rows)  # nobody writes, so that the process reads until it is killed
    run = make_run(tmp_path, events)
    with ready(run) as made:
        (child,) = list_children() - others
        child.kill()
        made.at_end(run)
    assert isinstance(events[-1], Note)
    assert events[-1].text.endswith("missing, and the rest goes on (their process ended with exit code -9)")
    assert not files.rows.exists()


def test_a_process_that_cannot_start_leaves_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[Event]()
    draw(0).save(BaselineFiles(tmp_path).rows)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    run = make_run(tmp_path, events)
    with ready(run) as made:
        made.at_end(run)
    (note,) = events
    assert isinstance(note, Note)
    assert "missing, and the rest goes on (FileNotFoundError: " in note.text


def test_only_the_chief_starts_a_process_and_only_for_rows(tmp_path: Path) -> None:
    events, others = list[Event](), list_children()
    with ready(make_run(tmp_path, events)):
        assert list_children() == others
    draw(0).save(BaselineFiles(tmp_path).rows)
    with ready(make_run(tmp_path, events, is_chief=False)) as made:
        assert list_children() == others
        made.at_end(make_run(tmp_path, events))
    assert not events


@pytest.mark.parametrize(
    ("words", "is_new", "wanted"),
    [
        ([], True, [1_000_000]),
        (["evaluation=full", "evaluation.baselines=300"], True, [300]),
        (["evaluation.baselines=0"], True, []),
        (["evaluation=none"], True, []),
        (["debug=fast"], True, []),
        ([], False, []),
    ],
)
def test_only_a_new_run_with_an_evaluation_writes_their_rows(
    words: list[str], is_new: bool, wanted: list[int], plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(hook, "write_baseline_data", lambda splits, max_rows, *rest: written.append(max_rows))
    run = replace(make_run(tmp_path, []), plan=plan(*words))
    others = [replace(run, is_chief=False), replace(run, is_resumed=True), replace(run, is_job=True)]
    for each in [run] if is_new else others:
        BaselinesHook().after_build(each, print)
    assert written == wanted


def test_an_error_in_reading_their_rows_is_a_note_unless_a_row_cannot_be_used(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    events = list[Event]()
    monkeypatch.setattr(hook, "write_baseline_data", fail)
    run = replace(make_run(tmp_path, events), plan=plan())
    error: Exception = ValueError("odd")
    BaselinesHook().after_build(run, print)
    (note,) = events
    assert isinstance(note, Note)
    assert note.text.startswith("boosting and the linear model, to compare with: missing, and the rest goes on (Value")
    error = ConfigError("dataset: row 67 cannot be read")
    with pytest.raises(ConfigError, match="row 67"):
        BaselinesHook().after_build(run, print)


#: Starts the process, says its id, and is killed.
DIE = """
import os, sys
from pathlib import Path
import psutil
from scaleflow.features.baselines.process import start_process
process = start_process(Path(sys.argv[1]))
print(*(child.pid for child in psutil.Process().children()), flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_process_ends_with_its_worker(tmp_path: Path) -> None:
    os.mkfifo(BaselineFiles(tmp_path).rows)  # nobody writes, so that the process reads until it is ended
    done = subprocess.run([sys.executable, "-c", DIE, str(tmp_path)], stdout=subprocess.PIPE, text=True, timeout=240)
    with contextlib.suppress(psutil.NoSuchProcess):  # it is gone already
        child = psutil.Process(int(done.stdout))
        try:
            wait_for(lambda: child.status() == psutil.STATUS_ZOMBIE)
        finally:
            child.kill()


#: Fits in a process, and prints which of these libraries it has imported.
IMPORTED = """
import sys
from pathlib import Path
from scaleflow.features.baselines.files import BaselineFiles
from scaleflow.features.baselines.fit import fit_and_write
fit_and_write(BaselineFiles(Path(sys.argv[1])))
print({"tensorflow", "keras", "mlflow", "omegaconf", "sklearn"} & {*sys.modules})
"""


def test_the_process_imports_no_tensorflow(tmp_path: Path) -> None:
    draw(0).save(BaselineFiles(tmp_path).rows)
    done = subprocess.run([sys.executable, "-c", IMPORTED, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert done.stdout == "{'sklearn'}\n", done.stderr


def test_they_get_the_rows_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scaleflow.dataset.batches.rows import to_rows

    files = BaselineFiles(tmp_path)
    monkeypatch.setattr(dataset, "sample_rows", lambda each, count, _: each.map(lambda x: x[:count]), raising=False)

    def write(count: int, words: int, most: int, classes: int) -> Any:
        rows = {"a": np.arange(count, dtype="f")[:, None], "b": np.zeros(count, "i")}
        inputs = {"a": Inputs((1,)), "b": Inputs((), "int32", vocabulary=words)}
        outputs = Outputs("classification", (classes,)) if classes else Outputs("regression", (1,))
        train = to_rows(Arrays(rows, np.zeros(count, "i") if classes else np.zeros((count, 1), "f")))
        splits: Any = SimpleNamespace(train=train, test=train, inputs=inputs, outputs=outputs, transforms={})
        files.rows.unlink(missing_ok=True)
        write_baseline_data(splits, most, files.rows)
        data = BaselineData.load(files.rows) if files.rows.exists() else None
        return data and (len(data.targets), len(data.test_targets), data.is_sample, data.classes)

    assert write(12_000, 3, 10**6, 0) == (12_000, 12_000, False, 0)
    assert write(900, 3, 500, 3) == (500, 500, True, 3)
    assert write(1100, 5000, 10**6, 10) == (999, 999, True, 10), "50 million values, for each of ten classes"
    assert write(900, 3, 0, 0) is None


def measure_asked(folder: Path) -> dict[str, dict[str, float]]:
    """The metrics of fitted baselines that the user asked for, by kind."""
    from scaleflow import objective
    from scaleflow.config.targets import bind_target, locate_target

    found = {}
    for kind, classes, shape, names in (("binary", 2, (1,), ["auc"]), ("classification", 3, (3,), ["f1"])):
        files, events = BaselineFiles(folder), list[Event]()
        replace(draw(classes), keeps_outputs=True).save(files.rows)
        fit_and_write(files)
        loader = objective.Loader(locate_target, bind_target)
        goal = objective.make_objective(Outputs(kind, shape), ObjectiveOptions(metrics=names), loader=loader)
        report_baselines(files, None, goal, events.append)
        assert not files.outputs.exists()
        (logged,) = events
        found[kind] = dict(logged.values)
    return found


def test_metrics_that_the_user_asked_for_are_those_of_scikit_learn(
    tmp_path: Path, isolated: Callable[..., Any]
) -> None:
    found = isolated(measure_asked, tmp_path)
    two, three = draw(2), draw(3)
    model = LogisticRegression(max_iter=300).fit(two.features, two.targets)
    auc = roc_auc_score(two.test_targets, model.predict_proba(two.test_features)[:, 1])
    assert found["binary"]["baseline/linear/auc"] == pytest.approx(auc, abs=5e-3)  # Keras's has 200 thresholds
    assert 0.5 < found["binary"]["baseline/boosting/auc"] < 1
    model = LogisticRegression(max_iter=300).fit(three.features, three.targets)
    f1 = f1_score(three.test_targets, model.predict(three.test_features), average="macro")
    assert found["classification"]["baseline/linear/f1"] == pytest.approx(f1, abs=1e-6)


def test_a_text_has_no_baseline(tmp_path: Path) -> None:
    inputs = {"town": Inputs((), "string"), "size": Inputs((), "float32")}
    splits: Any = SimpleNamespace(test=object(), folds=0, inputs=inputs, outputs=Outputs("binary", (1,)))
    with pytest.raises(ValueError, match="the input town is text, and they take numbers"):
        write_baseline_data(splits, 100, tmp_path / "rows.npz")


def test_baselines_that_cannot_be_fitted_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise MemoryError("no memory")

    files, events = BaselineFiles(tmp_path), list[Event]()
    draw(0).save(files.rows)
    monkeypatch.setattr(models, "fit_baselines", fail)
    fit_and_write(files)
    assert not files.rows.exists()
    assert json.loads(files.metrics.read_text())[FAILED_FIT].startswith("MemoryError: no memory")
    report_baselines(files, None, make_run(tmp_path, events).objective, events.append)
    (note,) = events
    assert isinstance(note, Note)
    assert "missing, and the rest goes on (MemoryError: no memory" in note.text


def test_they_are_not_fitted_to_targets_that_do_not_count() -> None:
    rows = Arrays({"x": np.arange(4.0)}, np.array([[1.0], [-1], [0.0], [-1]]), np.arange(4.0) + 1)
    used = leave_out_ignored(rows, -1)
    assert make_features(used, {"x": Inputs((), "float32")}).tolist() == [[0], [2]]
    assert read_targets(used, classes=0).tolist() == [1, 0]
    assert used.weights is not None
    assert used.weights.tolist() == [1, 3]


def test_their_files_are_those_of_a_run(tmp_path: Path) -> None:
    files = BaselineFiles(tmp_path)
    for path in (files.rows, files.outputs, files.metrics):
        assert RunFolder(tmp_path).is_own(path.name)
    assert not RunFolder(tmp_path).is_own("baselines.csv")


def test_the_page_of_a_run_shows_them_next_to_its_metrics() -> None:
    state = RunState()
    state.apply(MetricsLogged(0, {"baseline/rmse": 8.0, "baseline/linear/rmse": 3.0, "baseline/boosting/rmse": 2.0}))
    state.apply(MetricsLogged(0, {"baseline/rows": 1000}))
    state.apply(MetricsLogged(9, {"test/rmse": 2.5}))
    text = format_results(state)
    rows = [[cell.strip() for cell in line.replace("&emsp;", "").split("|")[1:-1]] for line in text.splitlines()]
    assert rows[0] == ["metric", "value", "baseline", "boosting", "linear"]
    assert rows[2] == ["test/rmse", "2.5", "8", "2", "3"]
    assert text.endswith(
        "Boosting is scikit-learn's HistGradientBoosting, linear its logistic or ridge regression, fitted to 1,000 of "
        "these rows."
    )
