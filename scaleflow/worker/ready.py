"""Reports `ready`, with the run's params and data. Features get the training examples."""

from __future__ import annotations

import json
from collections.abc import Mapping

from scaleflow.config.parse import flatten_config
from scaleflow.interfaces import Plan
from scaleflow.interfaces.events import Note, RunReady, TagsSet
from scaleflow.interfaces.features import list_task_groups
from scaleflow.interfaces.hooks import TrainingData
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.runs import RunSpec, WorkerProcess
from scaleflow.runs.run_name import make_run_name
from scaleflow.runs.state import make_length_tags
from scaleflow.worker.build import TrainingSetup
from scaleflow.worker.failures import guard
from scaleflow.worker.hooks import call_report_examples
from scaleflow.worker.metadata import explain_other_data, report_metadata, write_data_files


def report_ready(
    process: WorkerProcess, setup: TrainingSetup, label: str, params: Mapping[str, str], step: int = 0
) -> None:
    """Reports `ready`: now the run exists, or continues at `step`.

    Args:
        label: the part of the run's name that distinguishes it from other runs.
        params: the params for the store.
    """
    spec = process.spec
    emit = process.emit
    plan = process.spec.plan
    resolved = setup.facts.resolved
    process.report_ready(
        RunReady(
            name=make_run_name(plan, resolved, label),
            began=int(spec.started * 1000),
            tags=plan.tracking.tags or {},
            params=params,
            steps=resolved["steps"],
            epochs=resolved["epochs"],
            modes=dict(setup.engine.objective.modes),
            search=list(plan.search),
            parent=spec.parent,
            resumed=step if spec.is_resumed else None,
        )
    )
    if spec.length and spec.records:  # params cannot change
        emit(TagsSet(make_length_tags(spec.length)))
    if is_first_report(spec, setup) and setup.facts.metadata is not None:
        with guard("the description of the data and of the model", emit):
            report_metadata(setup.facts.metadata, spec.files, emit)
        with guard("the list of the data's files", emit):
            write_data_files(plan, spec.files, setup.facts.metadata.data, emit=emit)
        changes = explain_other_data(spec, setup.facts.metadata.data.splits)
        if changes:
            emit(Note(f"rerun: the data is not that of the first run: {changes}"))
        data = TrainingData(plan=setup.plan, splits=setup.splits)
        call_report_examples(setup.hooks, data, setup.feeds.train, spec.folder, emit)


def list_params(plan: Plan, setup: TrainingSetup) -> dict[str, str]:
    """Returns the params of a run: its options, every key of its config, and the values that
    replaced `auto` and so on.
    """
    hidden = list_task_groups()
    sections = {name: section for name, section in plan.config.items() if name not in hidden}
    config = flatten_config(mask_secrets(sections))
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in config.items()}
    choices = {group: option for group, option in plan.choices.items() if group not in hidden}
    params = {**choices, **texts}
    params |= {f"resolved.{key}": str(value) for key, value in setup.facts.resolved.items()}
    params |= {f"resolved.examples.{split}": str(count) for split, count in setup.facts.counts.items()}
    return params


def is_first_report(spec: RunSpec, setup: TrainingSetup) -> bool:
    """Returns whether this process reports the data of a run, and has not done so before."""
    return setup.facts.metadata is not None and spec.records and not spec.is_resumed
