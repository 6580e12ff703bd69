"""What a run tells of its data and its model beside the numbers: before the first step, and behind the last."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.interfaces import Emit, Outputs, Plan
from scaleflow.secret_masking import mask_secrets

if TYPE_CHECKING:
    import keras
    import numpy as np

    from scaleflow.dataset import Splits
    from scaleflow.training import Engine, Evaluation

SUMMARY = "model_summary.txt"
PLOTS = "plots"
CONFUSION = "confusion_matrix.csv"

#: A summary's lines are so wide.
SUMMARY_WIDTH = 120


@dataclass(frozen=True)
class RunMetadata:
    """What is told once there is a run.

    Attributes:
        data: the event `data`.
        summary: the model's layers, as text.
        baseline: metrics of what knows the training targets alone.
        notes: what the user should know of these.
    """

    data: Mapping[str, Any]
    summary: str
    baseline: Mapping[str, float]
    notes: Sequence[str] = field(default_factory=list)


def collect_metadata(plan: Plan, outputs: Outputs, splits: Splits, model: keras.Model) -> RunMetadata:
    """Looks at a run's data and model, at a few examples or what is in memory."""
    from scaleflow import dataset, training

    there = dict(splits.by_name())
    if splits.test is splits.validation:
        there.pop("test", None)
    targets = {name: dataset.read_cheap_targets(examples) for name, examples in there.items()}
    baseline: Mapping[str, float] = {}
    notes = []
    if any(found is None for found in targets.values()):
        notes.append(
            "no baseline: the dataset's targets are known only once its examples are read; with dataset.cache=memory "
            "there is one"
        )
    elif targets["train"] is not None:
        baseline = training.baselines(outputs, targets["train"], targets.get("validation"), targets.get("test"))
    return RunMetadata(describe_data(plan, outputs, splits), summarize_model(model), baseline, notes)


def describe_data(plan: Plan, outputs: Outputs, splits: Splits) -> dict[str, Any]:
    """Which dataset it is, where it comes from, and each split's size and digest."""
    return {
        "name": describe_name(plan),
        "source": describe_source(plan),
        "kind": outputs.kind,
        "classes": list(outputs.names or ()),
        "splits": {
            split: {
                "examples": look.examples,
                "digest": look.digest,
                "inputs": {"dtype": look.inputs[0], "shape": list(look.inputs[1])},
                "targets": {"dtype": look.targets[0], "shape": list(look.targets[1])},
            }
            for split, look in splits.fingerprints.items()
        },
    }


def describe_name(plan: Plan) -> str:
    """The chosen option's name, and what it was asked for by name."""
    target = plan.dataset.target
    chosen = plan.choices.get("dataset") or target.path.rpartition(".")[2]
    asked = target.arguments.get("name")
    return f"{chosen} {asked}" if isinstance(asked, str) and asked != chosen else chosen


def describe_source(plan: Plan) -> dict[str, Any]:
    """A path where the dataset has one, and the class and arguments that read it, secrets masked."""
    target = plan.dataset.target
    place = target.arguments.get("data_dir")
    path = str(Path(place).expanduser().absolute()) if isinstance(place, str) else None
    return {"path": path, "target": target.path, "arguments": mask_secrets(dict(target.arguments))}


def summarize_model(model: keras.Model) -> str:
    lines: list[str] = []
    model.summary(line_length=SUMMARY_WIDTH, expand_nested=True, print_fn=lambda text, **more: lines.append(text))
    return "\n".join(lines)


def report_metadata(metadata: RunMetadata, folder: Path, emit: Emit) -> None:
    """Tells of it, behind `ready`; the summary is left in the run's folder."""
    emit("data", **metadata.data)
    (folder / SUMMARY).write_text(metadata.summary, encoding="utf-8")
    emit("artifact", path=str(folder / SUMMARY))
    if metadata.baseline:
        emit("metrics", step=0, values=metadata.baseline)
    for note in metadata.notes:
        emit("note", text=note)


def report_confusion(
    engine: Engine | Evaluation, splits: Mapping[str, Any], outputs: Outputs, folder: Path, emit: Emit
) -> None:
    """Which classes were taken for which in the last evaluation of the test split, or else of the validation split.

    Args:
        engine: has evaluated.
        splits: the feeds that were evaluated, by the names of their splits.
        outputs: what the dataset says of its classes.
        folder: the run's.
        emit: is told of the table.
    """
    split, feed = next(((name, splits[name]) for name in ("test", "validation") if splits.get(name)), (None, None))
    counts = None if feed is None else engine.read_confusion(feed)
    if counts is None:
        return
    path = folder / PLOTS / CONFUSION
    path.parent.mkdir(exist_ok=True)
    write_table(path, counts, outputs.names)
    emit("confusion", path=str(path), folder=PLOTS, split=split)
    if importlib.util.find_spec("matplotlib") is None:
        emit("note", text=f"no picture of {PLOTS}/{CONFUSION}: matplotlib is not installed; pip install matplotlib")


def write_table(path: Path, counts: np.ndarray[Any, Any], names: Sequence[str] | None) -> None:
    """Counts as CSV: a row to each true class, a column to each that it was taken for."""
    words = list(names) if names is not None and len(names) == len(counts) else [str(n) for n in range(len(counts))]
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["true \\ predicted", *words])
        rows.writerows([word, *row] for word, row in zip(words, counts.tolist(), strict=True))
