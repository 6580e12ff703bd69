"""Writes the rows to which baselines are fitted, and reports their metrics at the end of the run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from scaleflow.features.baselines.process import FITTED_BASELINES, BaselineProcess
from scaleflow.interfaces import BOOSTING, FAILED_FIT, FITTED, LINEAR, Arrays, Inputs, Objective, Outputs, name_leaves
from scaleflow.interfaces.events import Emit, MetricsLogged, Note, PhaseBegan
from scaleflow.runs import RunFolder

if TYPE_CHECKING:
    import numpy as np

    from scaleflow.dataset import Splits

    Array = np.ndarray[Any, Any]

#: The most values of all features, times the classes if there are several: boosting grows a tree for each. This bounds
#: the time, and no clock does: what a run records must not depend on the machine.
MOST_VALUES = 50_000_000

#: The most rows that are read only for the baselines, if the split is read while training.
MOST_STREAMED = 100_000

#: The fewest training rows for a useful baseline, and the most classes: with more, boosting takes minutes.
FEWEST_ROWS, MOST_CLASSES = 20, 50


def write_baseline_data(splits: Splits, outputs: Any, most: int, files: RunFolder, keeps_outputs: bool = False) -> None:
    """Writes the rows of a table, or a sample of more than `most`, for the baselines. Other data has none.

    `keeps_outputs` says whether the user asked for metrics that the process which fits does not compute.
    """
    test = splits.test or (None if splits.folds else splits.validation)
    if test is None or not is_table(splits.inputs) or not isinstance(outputs, Outputs):
        return
    if not (outputs.is_one_class or (outputs.kind == "regression" and outputs.shape == (1,))):
        return
    if texts := [name for name, each in name_leaves(splits.inputs).items() if each.dtype == "string"]:
        raise ValueError(f"the input {texts[0]} is text, and they take numbers")
    from scaleflow import dataset
    from scaleflow.features.baselines.models import BaselineData

    classes = {"classification": outputs.shape[-1], "binary": 2}.get(outputs.kind, 0)
    if classes > MOST_CLASSES or len(splits.train) < FEWEST_ROWS:
        return
    trees = classes if classes > 2 else 1
    most = min(most, MOST_STREAMED) if splits.train.place == "stream" else most
    columns = sum(each.vocabulary or sum(each.shape) or 1 for each in name_leaves(splits.inputs).values())
    if (count := min(most, MOST_VALUES // max(columns * trees, 1))) < FEWEST_ROWS:
        return
    rows, test_rows = (dataset.sample_rows(each, count, splits.transforms) for each in (splits.train, test))
    if rows is None or test_rows is None:
        return
    arrays = to_matrices(rows, splits.inputs, classes, outputs.ignore)
    test_arrays = to_matrices(test_rows, splits.inputs, classes, outputs.ignore)
    if len(arrays["targets"]) < FEWEST_ROWS or not len(test_arrays["targets"]):
        return
    arrays |= {f"test_{name}": each for name, each in test_arrays.items()}
    unit = math.nan if outputs.levels else 1.0 if outputs.scaling is None else outputs.scaling[1]
    try:
        is_sample = len(rows) < len(splits.train)
        data = BaselineData(**arrays, classes=classes, unit=unit, is_sample=is_sample, keeps_outputs=keeps_outputs)
        data.save(files.baseline_data)
    except OSError:  # a full disk, which the run itself will meet
        files.baseline_data.unlink(missing_ok=True)


def is_table(inputs: Any) -> bool:
    """Whether examples are rows: several inputs by name, each a value or a list of them."""
    return isinstance(inputs, Mapping) and all(len(each.shape) < 2 for each in name_leaves(inputs).values())


def to_matrices(rows: Arrays, inputs: Any, classes: int, ignore: int | None = None) -> dict[str, Any]:
    """Returns the features of rows as [n, features] float32, with a place for each word and category, the targets and
    the weights, as `BaselineData` names them. Rows whose target is `ignore` are left out.
    """
    import numpy as np

    def to_columns(values: Array, spec: Inputs) -> Array:
        if spec.vocabulary is None:
            return np.reshape(values, [len(values), -1]).astype(np.float32)
        places = np.zeros([len(values), spec.vocabulary], np.float32)
        np.put_along_axis(places, np.reshape(values, [len(values), -1]), 1, axis=1)
        return places

    values = name_leaves(rows.inputs)
    features = [to_columns(values[name], spec) for name, spec in name_leaves(inputs).items()]
    targets = np.ravel(rows.targets).astype(np.int64) if classes else np.ravel(rows.targets)
    found = {"features": np.concatenate(features, axis=1), "targets": targets, "weights": rows.weights}
    if ignore is None:
        return found
    is_used = np.ravel(rows.targets) != ignore
    return {name: None if each is None else each[is_used] for name, each in found.items()}


def report_baselines(
    files: RunFolder,
    process: BaselineProcess,
    emit: Emit,
    should_stop: Callable[[], bool],
    objective: Objective | None = None,
) -> None:
    """Waits for the baselines at the end of the run, unless it is told to stop, and reports their metrics.

    With an objective, these include its metrics, of the outputs that are kept.
    """
    if process.is_alive:
        emit(PhaseBegan("fitting boosting and a linear model, to compare with"))
    if not process.wait(should_stop):
        emit(Note(f"{FITTED_BASELINES}, were not fitted, because the run was stopped"))
        return
    if process.failure is not None:
        files.baseline_data.unlink(missing_ok=True)
        emit(Note(f"{FITTED_BASELINES}: missing, and the rest goes on ({process.failure})"))
        return
    try:
        values = json.loads(files.baselines.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if reason := values.pop(FAILED_FIT, None):
        emit(Note(f"{FITTED_BASELINES}: missing, and the rest goes on ({reason})"))
        return
    if objective is not None and files.baseline_outputs.exists():
        values = {**measure_kept_outputs(files, objective), **values}
        files.baseline_outputs.unlink(missing_ok=True)
    emit(MetricsLogged(0, {f"baseline/{name}": value for name, value in values.items()}))


def measure_kept_outputs(files: RunFolder, objective: Objective) -> dict[str, float]:
    """Returns the metrics of the baselines' outputs, such as `boosting/auc`, without the loss."""
    import numpy as np

    from scaleflow import training

    with np.load(files.baseline_outputs) as arrays:
        targets, *others = (arrays[name] for name in ("targets", BOOSTING, LINEAR))
        weights = arrays.get("weights")
    if others[0].shape[1] == 1:
        targets = targets.astype(np.float32)[:, None]
    found = {
        name: training.measure_outputs(objective, targets, each, weights=weights)
        for name, each in zip(FITTED, others, strict=True)
    }
    return {
        f"{model}/{name}": value
        for model, values in found.items()
        for name, value in values.items()
        if name != "loss" and np.isfinite(value)
    }
