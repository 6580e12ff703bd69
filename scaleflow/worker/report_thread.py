"""Makes the report of kept predictions in a thread, while the model is exported, and measures what the model uses.

Permutation importance of columns, and occlusion of pictures and texts, need the model. So the worker measures them,
within `evaluation.seconds`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.errors import read_reason
from scaleflow.interfaces import Inputs, Outputs, map_named, name_leaves
from scaleflow.interfaces.events import ArtifactWritten, Emit, EpochEnded, MetricsLogged, Note, PhaseBegan
from scaleflow.interfaces.formatting import OF_STEPS
from scaleflow.interfaces.quantiles import weighted_quantiles
from scaleflow.runs import EventReader
from scaleflow.runs.run_name import make_run_name
from scaleflow.runs.state import BASELINE
from scaleflow.worker.failures import guard
from scaleflow.worker.kept_predictions import KeptSplit, has_pixels, keep_predictions

if TYPE_CHECKING:
    import numpy as np

    from scaleflow.evaluation.findings import KnownOfRun
    from scaleflow.evaluation.model_report import ModelReport
    from scaleflow.evaluation.predictions import Predictions
    from scaleflow.training import Engine, SessionResult
    from scaleflow.worker.build import TrainingSetup
    from scaleflow.worker.trainer import Trainer

    Array = np.ndarray[Any, Any]
    Curves = Mapping[str, Sequence[tuple[float, float]]]

#: The most points of the curve of a value of single steps.
MOST_POINTS = 200

#: Seconds that the end of a run waits for the user's code that makes the layers of a model again.
LOAD_SECONDS = 30.0

#: How often each column is permuted, if there is time.
REPEATS = 5

#: A column is unused if the whole interval of its importance is within this share of what a constant loses.
LEAST = 0.01


def list_permuted(inputs: Any) -> dict[str, tuple[str, int | None]]:
    """Returns the columns of a table by their names: the input, and the place in it; empty if there is no table."""
    from scaleflow.dataset.column_kinds import list_input_columns

    named: Mapping[str, Inputs] = name_leaves(inputs)
    if len(named) > 1:
        return {name: (name, None) for name in named} if all(not each.shape for each in named.values()) else {}
    columns = ((name, list_input_columns(name, each)) for name, each in named.items())
    return {column: (name, n) for name, places in columns for column, n in places.items() if n is not None}


def measure_columns(engine: Engine, kept: KeptSplit, predictions: Predictions) -> list[dict[str, Any]]:
    """Returns a row for each column of a table, the most important first; empty if it is none.

    It uses `evaluation.importance` examples, and permutes no further column after `evaluation.seconds`.
    """
    import numpy as np

    from scaleflow.evaluation.collector import EXAMPLE, choose_form
    from scaleflow.evaluation.slices import score_column
    from scaleflow.interfaces.figure import Figure

    columns = list_permuted(kept.reader.inputs)
    name, described = next(iter(name_leaves(kept.outputs).items()))
    most = kept.options.importance
    if not columns or not most or choose_form(described) == "positions":
        return []
    count = len(predictions.table)
    used = np.sort(np.random.default_rng(0).choice(count, min(count, most), replace=False))
    places = predictions.column(EXAMPLE)[used]
    raw, targets = kept.reader.read_examples(places)
    target = name_leaves(targets)[name]
    has_target = np.ones(target.reshape(len(target), -1).shape, bool)
    if described.ignore is not None:
        has_target = (target != described.ignore).reshape(len(target), -1)
        rows = np.flatnonzero(has_target.any(axis=1))
        if not len(rows):
            return []
        raw, target = map_named(lambda _, values: values[rows], raw), target[rows]
        has_target, used = has_target[rows], used[rows]
    inputs = kept.reader.preprocess(raw)
    deadline = time.monotonic() + kept.options.seconds

    def score(changed: Any) -> Array:
        return score_outputs(described, target, name_leaves(engine.predict(changed))[name], has_target)

    whole, random = score(inputs), np.random.default_rng(1)
    losses: dict[str, list[Array]] = {column: [] for column in columns}
    for _ in range(REPEATS):
        for column, (key, place) in columns.items():
            if time.monotonic() < deadline:
                losses[column].append(whole - score(permute(inputs, key, place, order=random.permutation(len(target)))))
    intervals = predictions.make_intervals(used)
    is_class = described.is_one_class
    weights = intervals.weights
    measure, constant_loss = measure_constant(described, target, weights, has_target)
    found, values_of = [], name_leaves(raw)
    for column, (key, place) in columns.items():
        importance = Figure(np.nan) if not losses[column] else intervals.mean(np.mean(losses[column], axis=0))
        row: dict[str, Any] = {"column": column, "importance": importance, "measure": measure}
        row["is_useless"] = max(-importance.low, importance.high) < LEAST * constant_loss
        if is_class or target.size == len(target):
            values, flat = values_of[key], target.reshape(len(target))
            answers = flat.astype(np.int64) if is_class else flat.astype(np.float64)
            values = values if place is None else values[:, place]
            row["alone"], constant = score_column(values, answers, is_class, weights=weights)
            gain = row["alone"] - constant if is_class else constant - row["alone"]
            row["tells"] = bool(gain > max(0.01 if is_class else 0.0, 0.03 * abs(constant)))
        found.append(row)
    return sorted(found, key=lambda row: -np.nan_to_num(row["importance"].value, nan=-np.inf))


def score_outputs(described: Outputs, target: Array, outputs: Array, has_target: Array | None = None) -> Array:
    """Returns how good outputs are, [n]: minus the log loss, the mean over labels, or minus the absolute error.

    Not whether they are right: if one class is rare, a useful model may always predict the other one.

    Args:
        has_target: which labels or values of each example have a target, [n, k], at least one; None: all.
    """
    import numpy as np

    from scaleflow.evaluation.calibration import compute_losses
    from scaleflow.serving.prediction_columns import take_prediction

    outputs = take_prediction(described, outputs.astype(np.float64))
    flat, wanted = outputs.reshape(len(target), -1), target.reshape(len(target), -1)
    if described.kind == "classification":
        return -compute_losses(wanted[:, 0].astype(np.int64), flat)
    losses = (
        np.abs(flat - wanted)
        if described.kind == "regression"
        else np.logaddexp(0, np.where(wanted > 0.5, -flat, flat))
    )
    return np.asarray(-np.average(losses, axis=1, weights=has_target))


def measure_constant(
    described: Outputs, target: Array, weights: Array, has_target: Array | None = None
) -> tuple[str, float]:
    """Returns the measure of an importance, and how much of it the best constant loses, by the weights [n].

    `has_target` is as for `score_outputs`.
    """
    import numpy as np

    flat = target.reshape(len(target), -1)
    used = np.ones(flat.shape, bool) if has_target is None else has_target
    shares_of = weights[:, None] * used
    if described.kind == "regression":
        is_known = shares_of.any(axis=0)
        middle = np.zeros(flat.shape[1])
        for n in np.flatnonzero(is_known):
            middle[n] = weighted_quantiles(flat[used[:, n], n], [0.5], weights[used[:, n]])[0]
        errors = np.average(np.abs(flat - middle), axis=1, weights=used)
        return "mae", float(np.average(errors, weights=weights))
    if described.kind == "classification":
        sums = np.bincount(np.unique(flat, return_inverse=True)[1].ravel(), weights)
        shares = sums[sums > 0] / sums.sum()
        return "log loss", float(-(shares * np.log(shares)).sum())
    totals = shares_of.sum(axis=0)
    is_known = totals > 0
    shares = np.clip(((flat > 0.5) * shares_of).sum(axis=0)[is_known] / totals[is_known], 1e-12, 1 - 1e-12)
    losses = -(shares * np.log(shares) + (1 - shares) * np.log(1 - shares))
    return "log loss", float(np.average(losses, weights=totals[is_known]))


def permute(inputs: Any, key: str, place: int | None, order: Array) -> Any:
    """Returns inputs with one column in another order."""

    def change(name: str, values: Any) -> Any:
        if name != key:
            return values
        if place is None:
            return values[order]
        changed = values.copy()
        changed[:, place] = values[order, place]
        return changed

    return map_named(change, inputs)


# Occlusion -----------------------------------------------------------------------------------


def explain_mistakes(engine: Engine, kept: KeptSplit, predictions: Predictions) -> dict[int, Any]:
    """Returns what mattered in the pictures or texts of the worst mistakes, by the index of the example.

    A part matters as much as its loss takes from the probability of the prediction (occlusion, Zeiler and Fergus 2014).
    After `evaluation.seconds` no further example is explained.

    Returns:
        For a picture [GRID, GRID] shares of 1; for a text (word, share) in its order. Empty if there are no classes.
    """
    import numpy as np

    from scaleflow.evaluation.collector import EXAMPLE, choose_form
    from scaleflow.evaluation.outputs import analyse_output
    from scaleflow.serving.prediction_columns import compute_probabilities
    from scaleflow.serving.reasons import GRID

    name, described = next(iter(name_leaves(kept.outputs).items()))
    inputs = name_leaves(kept.reader.inputs)
    key = next((n for n, each in inputs.items() if has_pixels(each) or each.dtype == "string"), None)
    if key is None or choose_form(described) not in ("class", "best"):
        return {}
    analysis = analyse_output(predictions, name, described)
    examples = np.sort(predictions.column(EXAMPLE)[analysis.rows[analysis.worst[: kept.options.worst]]])
    raw = kept.reader.read_examples(examples)[0] if len(examples) else {}
    deadline, found = time.monotonic() + kept.options.seconds, {}
    for n, example in enumerate(examples):
        if time.monotonic() > deadline:
            break
        value = name_leaves(raw)[key][n]
        parts, variants = occlude(value, has_pixels(inputs[key]))
        if len(variants) == 1:  # a text without words
            continue
        repeated = {
            each: np.repeat(values[n : n + 1], len(variants), axis=0) for each, values in name_leaves(raw).items()
        }
        repeated[key] = np.array(variants, object if parts else value.dtype)
        batch = kept.reader.preprocess(map_named(lambda name, _, of=repeated: of[name], raw))  # type: ignore[misc]
        chances = compute_probabilities(described, name_leaves(engine.predict(batch))[name])
        assert chances is not None
        losses = np.maximum(0, chances[0].max() - chances[1:, chances[0].argmax()])
        shares = losses / max(float(losses.max()), 1e-12)
        found[int(example)] = list(zip(parts, shares.tolist(), strict=True)) if parts else shares.reshape(GRID, GRID)
    return found


def occlude(value: Any, is_picture: bool) -> tuple[list[str], list[Any]]:
    """Returns the first words of a text, none of a picture; and the value, and copies of it that each lack a part."""
    from scaleflow.serving.cells import decode_text
    from scaleflow.serving.reasons import GRID, MOST_WORDS, cover_part, drop_word

    if is_picture:
        return [], [value, *(cover_part(value, place) for place in range(GRID**2))]
    text = decode_text(value)
    words = text.split()[:MOST_WORDS]
    return words, [text, *(drop_word(text, n) for n in range(len(words)))]


class ReportThread:
    """Makes the report of predictions in the background.

    Args:
        context: what is known of the run besides; None: nothing.
        folder: for the files; it exists.
        read_curves: returns points of metrics, and what their first numbers count.

    Attributes:
        prefix: of the metrics of a run's split.
    """

    def __init__(
        self,
        predictions: Predictions,
        kept: KeptSplit,
        context: KnownOfRun | None = None,
        *,
        folder: Path,
        title: str,
        read_curves: Callable[[], tuple[Curves, str]] | None = None,
    ) -> None:
        self._predictions, self._kept, self._context = predictions, kept, context
        self._folder, self._title, self._read_curves = folder, title, read_curves
        self.prefix = "test/" if predictions.split == "test" else "val/"
        self._report: ModelReport | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._make, name="report", daemon=True)
        self._thread.start()

    def _make(self) -> None:
        from scaleflow.evaluation.model_report import make_report

        context = self._context
        try:
            if context is not None and self._read_curves is not None:
                curves, unit = self._read_curves()
                context = replace(context, curves=curves, curve_unit=unit)
            self._report = make_report(
                self._predictions,
                self._kept.options,
                context,
                reader=self._kept.reader,
                folder=self._folder,
                title=self._title,
                metrics=self._kept.metrics,
            )
        except Exception as error:  # a report that cannot be made ends no run
            traceback.print_exc()
            self._error = error

    def finish(self, step: int, metrics: Mapping[str, float], prefix: str, emit: Emit) -> None:
        """Waits for the report, and reports its files, and the intervals of metrics, whose names have a prefix."""
        self._thread.join()
        if self._report is None:
            error = self._error or RuntimeError("it was not made")
            emit(Note(f"evaluation: there is no report ({type(error).__name__}: {read_reason(error)})"))
            return
        for path in self._report.files:
            emit(ArtifactWritten(str(self._folder / path), str(Path(self._folder.name) / path.parent)))
        emit_intervals(self._report, step, metrics, prefix=prefix, emit=emit)


class LoadCheck(threading.Thread):
    """Loads the exported Keras file in the background, as `evaluate` will."""

    def __init__(self, folder: Path) -> None:
        super().__init__(name="load", daemon=True)
        self._folder = folder
        self._fault: str | None = None
        self.start()

    def run(self) -> None:
        from scaleflow.model import find_load_fault

        self._fault = find_load_fault(self._folder)

    def finish(self, emit: Emit) -> None:
        """Waits for it, and reports what `evaluate` will say."""
        self.join(LOAD_SECONDS)
        if self._fault:
            emit(Note(f"model: scaleflow evaluate and model.init_from cannot load its .keras file: {self._fault}"))


def begin_report(trainer: Trainer, result: SessionResult) -> ReportThread | None:
    """Keeps the predictions of the test, and begins their report, on the chief. All workers must call it."""
    spec = trainer.spec
    setup = trainer.setup
    emit = trainer.emit
    if setup.kept is None:
        return None
    facts = setup.facts
    predictions = keep_predictions(
        setup.kept,
        spec.files.evaluation,
        trainer.worker_sync,
        worker=spec.worker,
        described=facts.learned.splits,
        emit=emit,
    )
    if predictions is None:
        return None
    from scaleflow.evaluation.findings import KnownOfRun

    baseline = {} if facts.metadata is None else facts.metadata.baseline
    prefix = f"{BASELINE}test/" if any(name.startswith(f"{BASELINE}test/") for name in baseline) else BASELINE
    columns, mattered = ask_model(setup, predictions, emit)
    context = KnownOfRun(
        train={name.removeprefix("train/"): value for name, value in result.train.items()},
        baseline={k.removeprefix(prefix): v for k, v in baseline.items() if k.startswith(prefix)},
        together=facts.learned.schema.get("together", ()),
        doubts=facts.doubts,
        columns=columns,
        mattered=mattered,
    )
    title, folder = make_run_name(spec.plan, facts.resolved, spec.label), spec.files.evaluation
    read = functools.partial(read_curves, spec.files.events)
    return ReportThread(predictions, setup.kept, context, folder=folder, title=title, read_curves=read)


def read_curves(events: Path) -> tuple[Curves, str]:
    """Returns points (epoch, value) of the metrics of training and validation, and "epoch".

    A run of one epoch has those of its calls, by step.
    """
    calls: dict[str, list[tuple[float, float]]] = {}
    epochs: dict[str, list[tuple[float, float]]] = {}
    ends: list[int] = []
    for event in EventReader(events).read():
        if isinstance(event, MetricsLogged):
            for name, value in event.values.items():
                calls.setdefault(name, []).append((event.step, value))
        elif isinstance(event, EpochEnded):
            ends.append(event.step)
            for name, value in event.values.items():
                epochs.setdefault(name, []).append((event.step, value))
    is_by_epoch = len(ends) > 1
    curves = {n: points for n, points in (epochs if is_by_epoch else calls).items() if n.startswith("train/")}
    curves |= {name: points for name, points in calls.items() if name.startswith("val/")}
    curves |= {name: points[:: -(-len(points) // MOST_POINTS)] for name in OF_STEPS if (points := calls.get(name))}
    unit = ends[0] if is_by_epoch else 1
    scaled = {name: [(step / unit, value) for step, value in points] for name, points in curves.items()}
    return scaled, "epoch" if is_by_epoch else "step"


def ask_model(
    setup: TrainingSetup, predictions: Predictions, emit: Emit
) -> tuple[list[dict[str, Any]], dict[int, Any]]:
    """Returns the importance of columns, and with `evaluation=full` what mattered in the worst mistakes."""
    assert setup.kept is not None
    options = setup.kept.options
    columns: list[dict[str, Any]] = []
    mattered: dict[int, Any] = {}
    with guard("what the model uses, in the report", emit):
        if list_permuted(setup.kept.reader.inputs) and options.importance:
            emit(PhaseBegan("measuring the importance of the columns"))
            columns = measure_columns(setup.engine, setup.kept, predictions)
        if options.name == "full":
            emit(PhaseBegan("looking for what mattered in the worst mistakes"))
            mattered = explain_mistakes(setup.engine, setup.kept, predictions)
    return columns, mattered


def import_ahead(setup: TrainingSetup) -> None:
    """Imports the modules of a report in the background while the run trains, so that its end need not wait."""

    def load() -> None:
        with contextlib.suppress(Exception):
            importlib.import_module("scaleflow.evaluation.model_report")
            importlib.import_module("scaleflow.evaluation.predictions")
            importlib.import_module("PIL.PngImagePlugin")

    if setup.kept is not None and setup.facts.metadata is not None:  # on the chief
        threading.Thread(target=load, name="import", daemon=True).start()


def emit_intervals(report: ModelReport, step: int, metrics: Mapping[str, float], prefix: str, emit: Emit) -> None:
    """Reports the ends of the intervals of metrics, such as `test/accuracy`, that are figures of the report, too."""
    values: dict[str, float] = {}
    own = {f"{prefix}{name}": report.figures[name].value for name in report.own if f"{prefix}{name}" not in metrics}
    values |= own
    metrics = {**metrics, **own}
    for name, value in metrics.items():
        figure = report.figures.get(name.removeprefix(prefix))
        if figure is not None and figure.low == figure.low and abs(figure.value - value) <= 0.02 * abs(value) + 1e-6:
            values |= {f"{name}_low": figure.low, f"{name}_high": figure.high}
    if values:
        emit(MetricsLogged(step, values))
