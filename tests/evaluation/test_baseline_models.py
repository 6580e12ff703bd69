"""The models that are fitted beside a training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss

from scaleflow.evaluation.baseline_models import BaselineData, fit_baselines
from scaleflow.launcher.baselines import fit_and_write
from scaleflow.runs import RunFolder


def draw(classes: int) -> BaselineData:
    random = np.random.default_rng(0)
    features = random.normal(size=(300, 4)).astype("f")
    values = features[:, 0] * features[:, 1] + features[:, 2]
    targets = values if not classes else np.digitize(values, [-0.5, 0.5][: classes - 1])
    return BaselineData(features[:200], targets[:200], features[200:], targets[200:], classes, unit=2.0)


def test_metrics_are_those_of_scikit_learn() -> None:
    data = draw(0)
    found = fit_baselines(data)
    for name, model in (("linear", Ridge()), ("boosting", HistGradientBoostingRegressor(random_state=0))):
        predicted = model.fit(data.features, data.targets).predict(data.test_features)
        rmse = np.sqrt(np.mean((predicted - data.test_targets) ** 2))
        assert found[f"{name}/rmse"] == pytest.approx(rmse)
        assert found[f"{name}/loss"] == pytest.approx((rmse / 2) ** 2)
    assert found["boosting/rmse"] < found["linear/rmse"]


def test_a_class_that_no_training_row_has_leaves_out_the_loss() -> None:
    data = draw(3)
    found = fit_baselines(data)
    model = LogisticRegression(max_iter=1000).fit(data.features, data.targets)
    assert found["linear/loss"] == pytest.approx(log_loss(data.test_targets, model.predict_proba(data.test_features)))
    assert found["linear/accuracy"] == pytest.approx(model.score(data.test_features, data.test_targets))
    data.test_targets[0] = 3
    unknown = fit_baselines(BaselineData(**{**vars(data), "classes": 4}))
    assert "linear/loss" not in unknown
    assert 0 < unknown["linear/accuracy"] < 1


def test_the_launcher_fits_them_and_deletes_the_rows(tmp_path: Path) -> None:
    files = RunFolder(tmp_path)
    draw(0).save(files.baseline_data)
    fit_and_write(files)
    assert set(json.loads(files.baselines.read_text())) >= {"boosting/rmse", "linear/r2"}
    assert not files.baseline_data.exists()
    files.baseline_data.write_bytes(b"no rows")
    files.baselines.unlink()
    fit_and_write(files)
    assert not files.baselines.exists(), "a failure leaves the run without baselines"
    assert not files.baseline_data.exists()
