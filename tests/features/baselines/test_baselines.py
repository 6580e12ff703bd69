"""The models that are fitted beside a training."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
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
from scaleflow.features.baselines.data import report_baselines, write_baseline_data
from scaleflow.features.baselines.fit import fit_and_write
from scaleflow.features.baselines.models import BaselineData, fit_baselines, make_models
from scaleflow.features.baselines.process import BaselineProcess, fit_meanwhile
from scaleflow.interfaces import BOOSTING, FAILED_FIT, Arrays, Inputs, ObjectiveOptions, Outputs
from scaleflow.interfaces.events import Event, MetricsLogged, Note, PhaseBegan
from scaleflow.runs import RunFolder
from tests.launcher.test_supervisor import wait_for


def fit_here(files: RunFolder) -> None:
    fit_and_write(files.baseline_data, files.baselines, files.baseline_outputs)


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
    found = fit_baselines(data)
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
from scaleflow.features.baselines import models as baseline_models

def score_baseline(*_, **named):
    return {"threads": max(each["num_threads"] for each in threadpool_info() if each["user_api"] == "openmp")}

baseline_models.score_baseline = score_baseline
rows = np.zeros((1, 1))
print(baseline_models.fit_baselines(baseline_models.BaselineData(rows, rows[0], rows, rows[0], 0, unit=1.0)))
"""


def test_they_take_one_core() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT_THREADS], capture_output=True, text=True, timeout=120)
    assert done.stdout == "{'linear/threads': 1, 'boosting/threads': 1}\n", done.stderr


@pytest.mark.parametrize(
    ("classes", "features", "bins"),
    [(0, 1_960, 255), (0, 5_000, 100), (2, 5_000, 100), (10, 500, 100), (0, 30_000, 31)],
)
def test_boosting_takes_fewer_bins_of_many_features(classes: int, features: int, bins: int) -> None:
    assert make_models(classes, features)[BOOSTING].max_bins == bins


def test_a_class_that_no_training_row_has_leaves_out_the_loss() -> None:
    data = draw(3)
    found = fit_baselines(data)
    model = LogisticRegression(max_iter=1000).fit(data.features, data.targets)
    assert found["linear/loss"] == pytest.approx(log_loss(data.test_targets, model.predict_proba(data.test_features)))
    assert found["linear/accuracy"] == pytest.approx(model.score(data.test_features, data.test_targets))
    assert "rows" not in found
    assert fit_baselines(replace(data, is_sample=True)) == {**found, "rows": 200}
    data.test_targets[0] = 3
    unknown = fit_baselines(BaselineData(**{**vars(data), "classes": 4}))
    assert "linear/loss" not in unknown
    assert 0 < unknown["linear/accuracy"] < 1


def test_the_process_fits_them_and_deletes_the_rows(tmp_path: Path) -> None:
    files = RunFolder(tmp_path)
    draw(0).save(files.baseline_data)
    fit_here(files)
    assert set(json.loads(files.baselines.read_text())) >= {"boosting/rmse", "linear/r2"}
    assert not files.baseline_data.exists()
    files.baseline_data.write_bytes(b"no rows")
    files.baselines.unlink()
    fit_here(files)
    assert list(json.loads(files.baselines.read_text())) == [FAILED_FIT], "a failure leaves the run without baselines"
    assert not files.baseline_data.exists()


def make_spec(folder: Path, records: bool = True) -> Any:
    return SimpleNamespace(files=RunFolder(folder), records=records)


def test_the_end_of_a_run_waits_for_them_however_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, hours, events = RunFolder(tmp_path), iter(range(0, 10**9, 3600)), list[Event]()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(hours)))
    draw(0).save(files.baseline_data)
    with fit_meanwhile(make_spec(tmp_path), events.append) as process:
        report_baselines(files, process, events.append, lambda: False)
    began, logged = events
    assert isinstance(began, PhaseBegan)
    assert isinstance(logged, MetricsLogged)
    assert "baseline/boosting/rmse" in logged.values
    assert not files.baseline_data.exists()


def test_a_run_that_has_to_stop_ends_the_process_and_keeps_the_rows_for_a_resumed_run(tmp_path: Path) -> None:
    files, events = RunFolder(tmp_path), list[Event]()
    draw(0).save(files.baseline_data)
    with fit_meanwhile(make_spec(tmp_path), events.append) as process:
        report_baselines(files, process, events.append, lambda: True)
        assert process.is_alive
    assert not process.is_alive
    assert isinstance(events[-1], Note)
    assert events[-1].text.endswith("were not fitted, because the run was stopped")
    assert files.baseline_data.exists()
    with fit_meanwhile(make_spec(tmp_path), events.append) as process:
        report_baselines(files, process, events.append, lambda: False)
    assert isinstance(events[-1], MetricsLogged)


def test_a_process_that_is_killed_leaves_a_note_and_no_rows(tmp_path: Path) -> None:
    files, events = RunFolder(tmp_path), list[Event]()
    draw(0).save(files.baseline_data)
    others = set(psutil.Process().children())  # of other tests of this process
    with fit_meanwhile(make_spec(tmp_path), events.append) as process:
        (child,) = set(psutil.Process().children()) - others
        child.kill()
        report_baselines(files, process, events.append, lambda: False)
    assert isinstance(events[-1], Note)
    assert events[-1].text.endswith("missing, and the rest goes on (their process ended with exit code -9)")
    assert not files.baseline_data.exists()


def test_a_process_that_cannot_start_leaves_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, events = RunFolder(tmp_path), list[Event]()
    draw(0).save(files.baseline_data)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with fit_meanwhile(make_spec(tmp_path), events.append) as process:
        report_baselines(files, process, events.append, lambda: False)
    (note,) = events
    assert isinstance(note, Note)
    assert "missing, and the rest goes on (FileNotFoundError: " in note.text


def test_only_the_chief_starts_a_process_and_only_for_rows(tmp_path: Path) -> None:
    with fit_meanwhile(make_spec(tmp_path), print) as process:
        assert not process.is_alive
    draw(0).save(RunFolder(tmp_path).baseline_data)
    with fit_meanwhile(make_spec(tmp_path, records=False), print) as process:
        assert not process.is_alive
        assert process.wait(lambda: False)


#: Starts the process, says its id, and is killed.
DIE = """
import os, sys
from pathlib import Path
from scaleflow.runs import RunFolder
from scaleflow.features.baselines.process import start_process
print(start_process(RunFolder(Path(sys.argv[1]))).pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_process_ends_with_its_worker(tmp_path: Path) -> None:
    os.mkfifo(RunFolder(tmp_path).baseline_data)  # nobody writes, so that the process reads until it is ended
    done = subprocess.run([sys.executable, "-c", DIE, str(tmp_path)], stdout=subprocess.PIPE, text=True, timeout=120)
    with contextlib.suppress(psutil.NoSuchProcess):  # it is gone already
        child = psutil.Process(int(done.stdout))
        try:
            wait_for(lambda: child.status() == psutil.STATUS_ZOMBIE, timeout=60)
        finally:
            child.kill()


#: Fits in a process, and prints which of these libraries it has imported.
IMPORTED = """
import sys
from pathlib import Path
from scaleflow.features.baselines.fit import fit_and_write
fit_and_write(*(Path(path) for path in sys.argv[1:]))
print({"tensorflow", "keras", "mlflow", "omegaconf", "sklearn"} & {*sys.modules})
"""


def test_the_process_imports_no_tensorflow(tmp_path: Path) -> None:
    names = [str(tmp_path / name) for name in ("rows.npz", "metrics.json", "outputs.npz")]
    draw(0).save(tmp_path / "rows.npz")
    done = subprocess.run([sys.executable, "-c", IMPORTED, *names], capture_output=True, text=True, timeout=120)
    assert done.stdout == "{'sklearn'}\n", done.stderr


def test_they_get_the_rows_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scaleflow.dataset.batches.rows import to_rows

    files = RunFolder(tmp_path)
    monkeypatch.setattr(dataset, "sample_rows", lambda each, count, _: each.map(lambda x: x[:count]), raising=False)

    def write(count: int, words: int, most: int, classes: int) -> Any:
        rows = {"a": np.arange(count, dtype="f")[:, None], "b": np.zeros(count, "i")}
        inputs = {"a": Inputs((1,)), "b": Inputs((), "int32", vocabulary=words)}
        outputs = Outputs("classification", (classes,)) if classes else Outputs("regression", (1,))
        train = to_rows(Arrays(rows, np.zeros(count, "i") if classes else np.zeros((count, 1), "f")))
        splits: Any = SimpleNamespace(train=train, test=train, inputs=inputs, transforms={})
        files.baseline_data.unlink(missing_ok=True)
        write_baseline_data(splits, outputs, most, files)
        data = BaselineData.load(files.baseline_data) if files.baseline_data.exists() else None
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
        files, events = RunFolder(folder), list[Event]()
        replace(draw(classes), keeps_outputs=True).save(files.baseline_data)
        fit_here(files)
        loader = objective.Loader(locate_target, bind_target)
        goal = objective.make_objective(Outputs(kind, shape), ObjectiveOptions(metrics=names), loader=loader)
        report_baselines(files, BaselineProcess(None), events.append, lambda: False, objective=goal)
        assert not files.baseline_outputs.exists()
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
