"""Describes and identifies the data and the model of a run when it is ready, and writes its confusion matrix at the
end.

A resumed run compares the digests of its data and code with those recorded before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.errors import ConfigError
from scaleflow.files.object_store import is_store_address
from scaleflow.interfaces import Objective, Outputs, OutputStructure, Plan, map_leaves
from scaleflow.interfaces.events import (
    ArtifactWritten,
    ConfusionWritten,
    DatasetDescribed,
    Emit,
    MetricsLogged,
    Note,
    TagsSet,
)
from scaleflow.interfaces.extras import guard_extra
from scaleflow.interfaces.formatting import format_csv
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.runs import RunFolder, RunSpec
from scaleflow.runs.data_digest import (
    ALL_VALUES,
    SplitDigests,
    digest_files,
    find_data_files,
    group_by_folder,
    identify_split,
    list_split_changes,
    read_split_digests,
)
from scaleflow.runs.identity import compare_files
from scaleflow.runs.provenance.collect import list_code_changes
from scaleflow.runs.provenance.record import Provenance, read_data_files, write_data_state
from scaleflow.runs.run_name import describe_name
from scaleflow.worker.earlier import describe_seen_rows

if TYPE_CHECKING:
    import keras

    from scaleflow.dataset import Splits
    from scaleflow.dataset.batches.fingerprint import Fingerprint
    from scaleflow.training import Engine, Evaluation


#: Maximum number of changes in a message.
MAX_NAMED = 5


def digest_splits(plan: Plan, fingerprints: Mapping[str, Fingerprint]) -> dict[str, dict[str, Any]]:
    """Returns `digest`, `covers` and `version` by split. Splits that are not completely in memory use their files."""
    partial = [fingerprint for fingerprint in fingerprints.values() if fingerprint.covers != ALL_VALUES]
    listed: Sequence[str] = []
    if any(not fingerprint.paths for fingerprint in partial):
        listed = list_plan_files(plan)
    paths = list(listed)
    for fingerprint in partial:
        paths += fingerprint.paths
    digests = digest_files(dict.fromkeys(paths))
    identities = {}
    for split, fingerprint in fingerprints.items():
        files = {path: digests[path] for path in fingerprint.paths or listed if path in digests}
        identities[split] = identify_split(fingerprint.digest, fingerprint.covers, files)
    return identities


def list_plan_files(plan: Plan) -> list[str]:
    """Returns the files that the dataset's arguments name."""
    return find_data_files(plan.dataset.target.arguments)


def identify_files(plan: Plan) -> dict[str, list[Any]]:
    """Returns the digest, the size in bytes and the last change of each file that the dataset reads.

    For more than `data_digest.MAX_NAMED` files there are only digests of folders. For a file in an object store, the
    digest is the ETag if the store returns one.
    """
    facts: dict[str, list[Any]] = {}
    for path, digest in group_by_folder(digest_files(list_plan_files(plan))).items():
        status = None if path.endswith("/") else Path(path).stat()
        facts[path] = [digest, status and status.st_size, status and round(status.st_mtime, 3)]
    address = plan.dataset.target.arguments.get("data_dir")
    if is_store_address(address):
        facts |= identify_objects(str(address))
    return facts


def identify_objects(address: str) -> dict[str, list[Any]]:
    """Returns the same facts for files in an object store; empty if the store does not answer."""
    from scaleflow.dataset.reading.files import identify_in_store, read_etags

    try:
        states = identify_in_store(address)
        tags = read_etags(list(states))
    except ConfigError:  # if the source needs the store, it reports the reason
        return {}
    facts = {}
    for path, (size, changed) in states.items():
        identity = f"etag:{tags[path]}" if tags.get(path) else f"state:{size}:{changed}"
        facts[path] = [identity, size, changed and changed / 1e9]
    return facts


def write_data_files(plan: Plan, files: RunFolder, data: DatasetDescribed, emit: Emit) -> None:
    """Writes the description of the data to the run's record."""
    described = {"splits": data.splits, "kind": data.kind, "classes": data.classes, "files": identify_files(plan)}
    write_data_state(files, files.count_resumes() if plan.resume is not None else 0, described)
    emit(ArtifactWritten(str(files.data_record), files.provenance_folder.name))


def explain_changed_data(spec: RunSpec, now: SplitDigests) -> str:
    """Describes how the data of a resumed run changed since its last command; empty if it did not."""
    changes = list_split_changes(read_split_digests(spec.files), now)
    if not changes:
        return ""
    before = read_data_files(spec.files)
    now_found = identify_files(spec.plan) if before else {}
    changed = compare_files(Provenance(data={"files": before}), Provenance(data={"files": now_found}))
    named = shorten_list([*map(str, changed)], ", ")
    return f"{shorten_list(changes)}; files: {named}" if named else shorten_list(changes)


def shorten_list(texts: list[str], separator: str = "; ") -> str:
    more = f"{separator}{len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return separator.join(texts[:MAX_NAMED]) + more


def report_changes(spec: RunSpec, data: DatasetDescribed, data_changes: str, emit: Emit) -> None:
    """Reports that a resumed run continues with changed data or code, and records the new digests of the data."""
    if data_changes:
        report_change("resume_data", data_changes, emit)
        emit(data)
        write_data_files(spec.plan, spec.files, data, emit=emit)
    code_changes = list_code_changes(spec.plan, spec.files, spec.files.count_resumes())
    if code_changes:
        report_change("resume_code", shorten_list(code_changes), emit)


def report_change(key: str, changes: str, emit: Emit) -> None:
    emit(Note(f"{key}=changed: {changes}"))
    emit(TagsSet({f"scaleflow.{key}": "changed"}))


def explain_other_data(spec: RunSpec, now: SplitDigests) -> str:
    """Describes how the data differs from the repeated run's data; empty if it does not, or if no run is repeated."""
    return shorten_list(list_split_changes(spec.repeats.splits, now)) if spec.repeats.splits else ""


CONFUSION = "confusion_matrix.csv"

#: The line width of a model summary, in characters.
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
    targets = {}
    weights = {}
    for name, examples in examples_of.items():
        cheap = examples.read_cheap_targets()
        if cheap is not None:
            targets[name], weights[name] = cheap
    baseline: Mapping[str, float] = {}
    notes: list[str] = []
    if len(targets) < len(examples_of):
        advice = "; use dataset.cache=memory to get one" if plan.dataset.shards == 1 else ""
        notes.append(f"no baseline: the dataset's targets are known only after its examples are read{advice}")
    else:
        with guard_extra("the baseline of a constant answer", notes.append):
            baseline = training.baselines(outputs, targets, plan.objective, weights=weights, objective=objective)
    data = describe_data(plan, outputs, splits)
    seen = describe_seen_rows(plan, splits.learned, data.splits)
    if seen:
        notes.append(seen)
    lines: list[str] = []
    with guard_extra("the summary of the model", notes.append):  # the user's own layers may fail to describe themselves
        model.summary(line_length=SUMMARY_WIDTH, expand_nested=True, print_fn=lambda text, **more: lines.append(text))
    return RunMetadata(data, "\n".join(lines), baseline, notes=notes)


def describe_data(plan: Plan, outputs: OutputStructure, splits: Splits) -> DatasetDescribed:
    """Describes the dataset: its name, its source, and the size and digest of each split."""
    digests = digest_splits(plan, splits.fingerprints)
    described = {}
    for split, fingerprint in splits.fingerprints.items():
        described[split] = {
            "examples": fingerprint.examples,
            **digests[split],
            "inputs": map_leaves(to_description, fingerprint.inputs),
            "targets": map_leaves(to_description, fingerprint.targets),
        }
    kinds = map_leaves(lambda output: output.kind, outputs)
    classes = map_leaves(lambda output: list(output.names or ()), outputs)
    return DatasetDescribed(describe_name(plan), describe_source(plan), kinds, classes=classes, splits=described)


def to_description(spec: tuple[str, Sequence[int]]) -> dict[str, Any]:
    """Converts (dtype, shape) to a dict of plain values."""
    return {"dtype": spec[0], "shape": list(spec[1])}


def describe_source(plan: Plan) -> dict[str, Any]:
    """Returns the dataset's path, if any, and the class and arguments that read it, with secrets masked."""
    target = plan.dataset.target
    data_dir = target.arguments.get("data_dir")
    path = data_dir if isinstance(data_dir, str) else None
    if path is not None and "://" not in path:
        path = str(Path(path).expanduser().absolute())
    return {"path": path, "target": target.path, "arguments": mask_secrets(dict(target.arguments))}


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
    """Writes the confusion matrix of the last evaluation on the test split; without one, on the validation split.

    `splits` has the feeds by split name, and `outputs` has the class names.
    """
    split, feed = next(((name, splits[name]) for name in ("test", "validation") if splits.get(name)), (None, None))
    counts = None if feed is None else engine.read_confusion(feed)
    if counts is None or not isinstance(outputs, Outputs):
        return
    path = files.plots / CONFUSION
    path.parent.mkdir(exist_ok=True)
    is_named = outputs.names is not None and len(outputs.names) == len(counts)
    labels = list(outputs.names or ()) if is_named else [str(n) for n in range(len(counts))]
    rows = ([label, *row] for label, row in zip(labels, counts.tolist(), strict=True))  # one row per true class
    path.write_text(format_csv(["true \\ predicted", *labels], rows), encoding="utf-8")
    assert split is not None
    emit(ConfusionWritten(str(path), files.plots.name, split))
