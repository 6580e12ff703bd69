"""Checks the data of each run before training: faults, and drift since an earlier run."""

from __future__ import annotations

import json
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from scaleflow.dataset.schema import SplitSample, sample_split
from scaleflow.errors import ConfigError, read_reason
from scaleflow.features.checks.drift import DRIFT, LEVELS, DataFinding, compare_sample, select_level
from scaleflow.features.checks.rules import find_duplicates, find_faults
from scaleflow.features.checks.together import find_together
from scaleflow.interfaces import DivisionKeys, Rows, Source, Split
from scaleflow.interfaces.events import Emit, Note
from scaleflow.interfaces.hooks import ReadData, WorkerHook
from scaleflow.worker.data import tell_unread

#: Rules whose findings mean that test metrics are too optimistic.
TOGETHER = ("groups", "time drift", "duplicates across splits")

#: Maximum number of findings that a run reports.
MAX_TOLD = 5


class DataChecks(WorkerHook):
    """Reports findings as notes, or stops the run, as `dataset.check` says."""

    def after_data(self, data: ReadData) -> Mapping[str, Any]:
        """Checks the data on the chief.

        Returns findings about rows that belong together, as `together` of the schema.
        """

        def find() -> str:  # on the chief
            try:
                found = find_in_data(data)
            except Exception as error:  # odd data must not end a run
                traceback.print_exc()
                return json.dumps({"error": read_reason(error)})
            return json.dumps({"findings": [asdict(each) for each in found]})

        answer = json.loads(data.workers.from_chief(find))
        check = data.plan.dataset.check
        if "error" in answer:
            tell_unread(answer["error"], check, data.emit_late)
            return {}
        findings = answer["findings"]
        tell_findings(findings, check, data.emit)
        if data.earlier is not None:
            return {}
        return {"together": [each for each in findings if each["rule"] in TOGETHER]}


def find_in_data(data: ReadData) -> list[DataFinding]:
    """Returns the faults of new data. If the run continues an earlier one, returns the drift since that one instead."""
    if data.earlier is None:
        return find_told(data)
    examples = next(iter(data.splits.values()))
    return compare_split(data.earlier, data.source, examples, few=data.few)


def find_told(data: ReadData) -> list[DataFinding]:
    """Returns faults and drift of the training split.

    Returns nothing for a stream read in order: its first examples may not be typical of the rest.
    """
    train = data.splits["train"]
    sample = data.sample
    assert sample is not None  # a new run has one on the chief
    if not train.is_spread:
        return []
    parts = {name: each for name, each in data.splits.items() if name == "train" or each is not train}
    samples = {"train": sample, **sample_judge(data.source, parts, few=data.few, is_table=sample.is_table)}
    together = find_together_in(samples, parts, data.plan.dataset.split)
    found = [*together, *(find_duplicates(samples) if len(samples) > 1 else ())]
    return select_level([*found, *find_faults(sample, with_hints=False)], DRIFT)


def sample_judge(source: Source, parts: Mapping[str, Rows], few: Any, is_table: bool) -> dict[str, SplitSample]:
    """Returns a sample of a table's test split, or else of its validation split, by its name. Empty for other data."""
    name = next((name for name in ("test", "validation") if name in parts), None)
    return {name: sample_split(source, parts[name], few)} if is_table and name is not None else {}


def find_together_in(samples: Mapping[str, SplitSample], parts: Mapping[str, Rows], rule: Split) -> list[DataFinding]:
    """Finds rows that belong together but were divided, in samples of the splits `parts`."""
    keys = {name: DivisionKeys.of(each) for name, each in parts.items()}
    return list(find_together(samples, sum(map(len, parts.values())), rule, keys=keys))


def compare_split(schema: Mapping[str, Any], source: Source, examples: Rows, few: Any) -> list[DataFinding]:
    """Returns how a split differs from a run's training split: drift, faults, and unseen categories of any level.

    `examples` is the split before preprocessing. `few` is a few of its raw inputs.
    """
    if not schema or not examples.is_spread:
        return []
    found = compare_sample(schema, sample_split(source, examples, few))
    return [each for each in found if LEVELS.index(each.level) >= LEVELS.index(DRIFT) or each.rule == "unseen"]


def tell_findings(findings: Sequence[Mapping[str, Any]], check: str, emit: Emit) -> None:
    """Reports findings as notes. Raises ConfigError for `dataset.check=refuse` if one is worse than a hint."""
    told = [f"{each['text']} ({each['because']})" for each in findings]
    refused = [text for text, each in zip(told, findings, strict=True) if each["level"] != "hint"]
    if refused and check == "refuse":
        more = f", and {count_more(refused[1:])}" if len(refused) > 1 else ""
        raise ConfigError(
            f"dataset.check=refuse: {refused[0]}{more}; scaleflow check shows all, and dataset.check=warn goes on"
        )
    for text in told[:MAX_TOLD]:
        emit(Note(f"dataset.check: {text}"))
    if len(told) > MAX_TOLD:
        emit(Note(f"dataset.check: {count_more(told[MAX_TOLD:])}; scaleflow check shows all"))


def count_more(texts: Collection[str]) -> str:
    return f"{len(texts)} more finding{'s' if len(texts) > 1 else ''}"
