"""Describes the data and the model of a run when it is ready, and its confusion matrix at the end."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.interfaces import Objective, Outputs, OutputStructure, Plan, map_leaves
from scaleflow.interfaces.events import ArtifactWritten, ConfusionWritten, DatasetDescribed, Emit, MetricsLogged, Note
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.runs import RunFolder
from scaleflow.runs.run_name import describe_name
from scaleflow.worker.data_changes import digest_splits
from scaleflow.worker.earlier import describe_seen_rows

if TYPE_CHECKING:
    import keras
    import numpy as np

    from scaleflow.dataset import Splits
    from scaleflow.training import Engine, Evaluation

CONFUSION = "confusion_matrix.csv"

#: The width of the lines of a summary.
SUMMARY_WIDTH = 120


@dataclass(frozen=True)
class RunMetadata:
    """The description of a run's data and model."""

    data: DatasetDescribed  # the event `data`
    summary: str  # the layers of the model, as text
    baseline: Mapping[str, float]  # the metrics of a predictor that knows only the training targets
    notes: Sequence[str] = field(default_factory=list)  # notes for the user


def collect_metadata(
    plan: Plan, outputs: OutputStructure, splits: Splits, model: keras.Model, objective: Objective
) -> RunMetadata:
    """Describes a run's data and model. It reads targets only if they are in memory or cheap to read."""
    from scaleflow import training

    examples_of = dict(splits.by_name())
    if splits.test is splits.validation:
        examples_of.pop("test", None)
    read = {name: examples.read_cheap_targets() for name, examples in examples_of.items()}
    known = {name: each for name, each in read.items() if each is not None}
    baseline: Mapping[str, float] = {}
    notes = []
    if len(known) < len(read):
        advice = "; use dataset.cache=memory to get one" if plan.dataset.shards == 1 else ""
        notes.append(f"no baseline: the dataset's targets are known only after its examples are read{advice}")
    else:
        targets, weights = ({name: each[i] for name, each in known.items()} for i in range(2))
        baseline = training.baselines(outputs, targets, plan.objective, weights, objective.replaced)
    data = describe_data(plan, outputs, splits)
    notes += filter(None, [describe_seen_rows(plan, splits.learned, data.splits)])
    return RunMetadata(data, summarize_model(model), baseline, notes)


def describe_data(plan: Plan, outputs: OutputStructure, splits: Splits) -> DatasetDescribed:
    """Describes the dataset: its name, its source, and the size and digest of each split."""
    digests = digest_splits(plan, splits.fingerprints)
    fingerprints = {
        split: {
            "examples": fingerprint.examples,
            **digests[split],
            "inputs": map_leaves(to_description, fingerprint.inputs),
            "targets": map_leaves(to_description, fingerprint.targets),
        }
        for split, fingerprint in splits.fingerprints.items()
    }
    kinds, names = (map_leaves(pick, outputs) for pick in (lambda each: each.kind, lambda each: list(each.names or ())))
    return DatasetDescribed(describe_name(plan), describe_source(plan), kinds, names, fingerprints)


def to_description(spec: tuple[str, Sequence[int]]) -> dict[str, Any]:
    """Converts (dtype, shape) to plain values with names."""
    return {"dtype": spec[0], "shape": list(spec[1])}


def describe_source(plan: Plan) -> dict[str, Any]:
    """Returns the dataset's path, if it has one, and the class and arguments that read it, with secrets masked."""
    target = plan.dataset.target
    data_dir = target.arguments.get("data_dir")
    path = data_dir if isinstance(data_dir, str) else None
    if path is not None and "://" not in path:
        path = str(Path(path).expanduser().absolute())
    return {"path": path, "target": target.path, "arguments": mask_secrets(dict(target.arguments))}


def summarize_model(model: keras.Model) -> str:
    lines: list[str] = []
    model.summary(line_length=SUMMARY_WIDTH, expand_nested=True, print_fn=lambda text, **more: lines.append(text))
    return "\n".join(lines)


def report_metadata(metadata: RunMetadata, files: RunFolder, emit: Emit) -> None:
    """Reports the data and the model after `ready`, and writes the model's summary to the run's folder."""
    emit(metadata.data)
    files.model_summary.write_text(metadata.summary, encoding="utf-8")
    emit(ArtifactWritten(str(files.model_summary)))
    if metadata.baseline:
        emit(MetricsLogged(0, metadata.baseline))
    for note in metadata.notes:
        emit(Note(note))


def report_confusion(
    engine: Engine | Evaluation, splits: Mapping[str, Any], outputs: OutputStructure, files: RunFolder, emit: Emit
) -> None:
    """Writes the confusion matrix of the last evaluation of the test split, or else of the validation split.

    `splits` has the feeds by the name of the split, and `outputs` the names of the classes.
    """
    split, feed = next(((name, splits[name]) for name in ("test", "validation") if splits.get(name)), (None, None))
    counts = None if feed is None else engine.read_confusion(feed)
    if counts is None or not isinstance(outputs, Outputs):
        return
    path = files.plots / CONFUSION
    path.parent.mkdir(exist_ok=True)
    write_confusion_matrix(path, counts, outputs.names)
    assert split is not None
    emit(ConfusionWritten(str(path), files.plots.name, split))
    if importlib.util.find_spec("matplotlib") is None:
        emit(Note(f"no picture of {files.plots.name}/{CONFUSION}: matplotlib is not installed; pip install matplotlib"))


def write_confusion_matrix(path: Path, counts: np.ndarray[Any, Any], names: Sequence[str] | None) -> None:
    """Writes counts as CSV: a row for each true class, a column for each predicted class."""
    labels = list(names) if names is not None and len(names) == len(counts) else [str(n) for n in range(len(counts))]
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["true \\ predicted", *labels])
        rows.writerows([label, *row] for label, row in zip(labels, counts.tolist(), strict=True))
