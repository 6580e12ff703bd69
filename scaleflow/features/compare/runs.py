"""Compares two runs: config, code, packages, data, machine and results."""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaleflow.config.typed_folder import in_typed_folder
from scaleflow.features.compare.results import compare_metrics, judge_runs
from scaleflow.features.compare.tables import Comparison
from scaleflow.interfaces import Tracking
from scaleflow.runs.folder import RunFolder
from scaleflow.runs.identity import (
    CATEGORIES,
    Difference,
    compare,
    compare_files,
    compare_known,
    list_unknown,
    list_value_changes,
    name_files,
)
from scaleflow.runs.run import Run


@in_typed_folder
def compare_runs(first: str | Path, second: str | Path, uri: str | None = None) -> Comparison:
    """Compares two runs, as `scaleflow diff` does.

    Args:
        first, second: the id of a run in MLflow, the folder of a run, or the URI of a model.
        uri: the tracking store. None: for a folder, the store that its run is recorded in; otherwise
            MLFLOW_TRACKING_URI or sqlite:///mlflow.db.

    Raises:
        ConfigError: if there is no such run.
    """
    store = Tracking(uri=uri)
    return compare_loaded(Run.read(str(first), store), Run.read(str(second), store))


def compare_loaded(first: Run, second: Run) -> Comparison:
    """Compares two runs whose files are on this machine."""
    before = replace(first.states[-1], settings=first.settings)
    now = replace(second.states[-1], settings=second.settings)
    differences: dict[str, list[Difference]] = {category: [] for category in CATEGORIES}
    for difference in compare_known(before, now):
        differences[difference.category].append(difference)
    code_diff = {}
    for difference in differences["code"]:
        text = diff_module(difference.name, first, second)
        if text:
            code_diff[difference.name] = text
    data = list_value_changes("data", describe_data_of(before.data), describe_data_of(now.data))
    data += compare_files(name_files(before), name_files(now))
    unknown = {}
    for name, state in (("first", before), ("second", now)):
        categories = list_unknown(state)
        if categories:
            unknown[name] = categories
    return Comparison(
        first.label,
        second.label,
        config={key.name: (key.before, key.now) for key in compare(before, now, ("settings",))},
        code=differences["code"],
        code_diff=code_diff,
        packages=differences["packages"],
        data=data,
        machine=differences["machine"],
        results=compare_metrics(first, second),
        verdict=judge_runs(first, second),
        unknown=unknown,
    )


def diff_module(name: str, first: Run, second: Run) -> str:
    """Returns a unified diff of a module's copies; empty if a run has the module but kept no copy."""
    before = read_module(name, first)
    now = read_module(name, second)
    if before is None or now is None:
        return ""
    first_label = f"{name}  {first.run_id or first.files.path}"
    second_label = f"{name}  {second.run_id or second.files.path}"
    return "".join(difflib.unified_diff(before, now, first_label, second_label))


def read_module(name: str, run: Run) -> list[str] | None:
    """Returns the lines of a run's copy of a module; None if it has no copy, and [] if it has no such module."""
    state = run.states[-1]
    path = find_copy(run.files, state.resume, name)
    if path is None:
        return None if name in state.code.modules else []
    return path.read_text(errors="replace").splitlines(keepends=True)


def find_copy(files: RunFolder, resume: int, name: str) -> Path | None:
    """Returns the copy of a module kept by the latest command up to number `resume`, or None."""
    for number in range(resume, -1, -1):
        copy = files.kept_code(number) / name
        if copy.is_file():
            return copy
    return None


def describe_data_of(data: Mapping[str, Any]) -> dict[str, str]:
    """Returns the facts about data to compare: size and digest of each split, dtypes and shapes, classes."""
    values: dict[str, str] = {}
    splits: Mapping[str, Any] = data.get("splits", {})
    for name, split in splits.items():
        values[f"{name}: examples"] = f"{split.get('examples'):,}"
        values[f"{name}: digest"] = str(split.get("digest"))
    for split in list(splits.values())[:1]:  # all splits have the same dtypes and shapes
        for kind in ("inputs", "targets"):
            for name, leaf in list_leaves(split.get(kind, {})).items():
                values[f"{kind} {name}".strip()] = f"{leaf.get('dtype')} {leaf.get('shape')}"
    classes = data.get("classes") or {}
    classes_of_output = classes if isinstance(classes, Mapping) else {"": classes}
    for output, names in classes_of_output.items():
        label = f"classes of {output}" if output else "classes"
        values[label] = f"{len(names)}: {', '.join(names)}" if names else "0"
    return values


def list_leaves(specs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the dtype and shape of each input or target by its name; the name of a single one is ""."""
    is_single = isinstance(specs.get("dtype"), str)
    return {"": specs} if is_single else specs
