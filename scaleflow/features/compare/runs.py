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
from scaleflow.runs.identity import compare, compare_files, compare_known, list_unknown, list_value_changes, name_files
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
    return compare_loaded(*(Run.read(str(named), Tracking(uri=uri)) for named in (first, second)))


def compare_loaded(first: Run, second: Run) -> Comparison:
    """Compares two runs whose files are on this machine."""
    before, now = (replace(run.states[-1], settings=run.settings) for run in (first, second))
    launch = compare_known(before, now)
    code = [each for each in launch if each.category == "code"]
    unknown = {name: list_unknown(state) for name, state in (("first", before), ("second", now))}
    return Comparison(
        first.label,
        second.label,
        {each.name: (each.before, each.now) for each in compare(before, now, ("settings",))},
        code=code,
        code_diff={each.name: text for each in code if (text := diff_module(each.name, first, second))},
        packages=[each for each in launch if each.category == "packages"],
        data=[*list_value_changes("data", describe_data_of(before.data), describe_data_of(now.data)),
         *compare_files(name_files(before), name_files(now))],
        machine=[each for each in launch if each.category == "machine"],
        results=compare_metrics(first, second),
        verdict=judge_runs(first, second),
        unknown={name: each for name, each in unknown.items() if each},
    )  # fmt: skip


def diff_module(name: str, first: Run, second: Run) -> str:
    """Returns a unified diff of a module's copies; empty if a run has the module but kept no copy."""
    texts: list[list[str]] = []
    for run in (first, second):
        state = run.states[-1]
        path = find_copy(run.files, state.resume, name)
        if name in state.code.modules and path is None:
            return ""
        texts.append([] if path is None else path.read_text(errors="replace").splitlines(keepends=True))
    names = [f"{name}  {run.run_id or run.files.path}" for run in (first, second)]
    return "".join(difflib.unified_diff(texts[0], texts[1], names[0], names[1]))


def find_copy(files: RunFolder, resume: int, name: str) -> Path | None:
    """Returns the copy of a module kept by the latest command up to number `resume`, or None."""
    copies = (files.kept_code(number) / name for number in range(resume, -1, -1))
    return next((path for path in copies if path.is_file()), None)


def describe_data_of(data: Mapping[str, Any]) -> dict[str, str]:
    """Returns the facts about data to compare: size and digest of each split, dtypes and shapes, classes."""
    values: dict[str, str] = {}
    for split, each in data.get("splits", {}).items():
        values |= {f"{split}: examples": f"{each.get('examples'):,}", f"{split}: digest": str(each.get("digest"))}
    for each in list(data.get("splits", {}).values())[:1]:
        for kind in ("inputs", "targets"):
            specs = each.get(kind, {})
            for name, leaf in ({"": specs} if isinstance(specs.get("dtype"), str) else specs).items():
                values[f"{kind} {name}".strip()] = f"{leaf.get('dtype')} {leaf.get('shape')}"
    classes = data.get("classes") or {}
    for output, names in (classes if isinstance(classes, Mapping) else {"": classes}).items():
        label = f"classes of {output}" if output else "classes"
        values[label] = f"{len(names)}: {', '.join(names)}" if names else "0"
    return values
