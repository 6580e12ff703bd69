"""Checks the data of each run before training: faults, and drift since an earlier run."""

from __future__ import annotations

import json
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from scaleflow.dataset.schema import SplitSample, sample_split
from scaleflow.errors import ConfigError, read_reason
from scaleflow.features.checks.drift import DRIFT, HINT, LEVELS, DataFinding, compare_sample, select_level
from scaleflow.features.checks.rules import find_duplicates, find_faults
from scaleflow.features.checks.together import find_together
from scaleflow.interfaces import DivisionKeys, Rows, Source, Split
from scaleflow.interfaces.events import Emit, Note
from scaleflow.interfaces.hooks import ReadData, WorkerHook
from scaleflow.worker.data import tell_unread

#: Rules whose findings mean that test metrics are too optimistic.
TOGETHER = ("groups", "time drift", "duplicates across splits")

#: Maximum number of findings that a run reports.
MAX_FINDINGS_SHOWN = 5


class DataChecks(WorkerHook):
    """Reports findings as notes, or stops the run, as `dataset.check` says."""

    def after_data(self, data: ReadData) -> Mapping[str, Any]:
        """Checks the data on the chief.

        Returns findings about rows that belong together, as `together` of the schema.
        """

        def find() -> str:  # on the chief
            try:
                findings = find_in_data(data)
            except Exception as error:  # odd data must not end a run
                traceback.print_exc()
                return json.dumps({"error": read_reason(error)})
            return json.dumps({"findings": [asdict(finding) for finding in findings]})

        answer = json.loads(data.workers.from_chief(find))
        check = data.plan.dataset.check
        if "error" in answer:
            tell_unread(answer["error"], check, data.emit_late)
            return {}
        findings = answer["findings"]
        report_findings(findings, check, data.emit)
        if data.earlier is not None:
            return {}
        return {"together": [finding for finding in findings if finding["rule"] in TOGETHER]}


def find_in_data(data: ReadData) -> list[DataFinding]:
    """Returns the faults of new data. If the run continues an earlier one, returns the drift since that one instead."""
    if data.earlier is None:
        return check_training_split(data)
    examples = next(iter(data.splits.values()))
    return compare_split(data.earlier, data.source, examples, data.raw_sample)


def check_training_split(data: ReadData) -> list[DataFinding]:
    """Returns faults of the training split, and rows that it shares with the test split.

    Returns nothing for a stream read in order: its first examples may not be typical of the rest.
    """
    train = data.splits["train"]
    sample = data.sample
    assert sample is not None  # a new run has one on the chief
    if not train.is_spread:
        return []
    splits = {}
    for name, rows in data.splits.items():
        if name == "train" or rows is not train:  # a split may be the training split again
            splits[name] = rows
    samples = {"train": sample}
    if sample.is_table:
        samples |= sample_test_split(data.source, splits, data.raw_sample)
    findings = find_together_in(samples, splits, data.plan.dataset.split)
    if len(samples) > 1:
        findings += find_duplicates(samples)
    findings += find_faults(sample, with_hints=False)
    return select_level(findings, DRIFT)


def sample_test_split(source: Source, splits: Mapping[str, Rows], raw_sample: Any) -> dict[str, SplitSample]:
    """Returns a sample of the test split, or else of the validation split, by its name; empty without either."""
    for name in ("test", "validation"):
        if name in splits:
            return {name: sample_split(source, splits[name], raw_sample)}
    return {}


def find_together_in(samples: Mapping[str, SplitSample], splits: Mapping[str, Rows], rule: Split) -> list[DataFinding]:
    """Finds rows that belong together but were divided, in samples of `splits`."""
    keys = {name: DivisionKeys.of(rows) for name, rows in splits.items()}
    count = sum(len(rows) for rows in splits.values())
    return list(find_together(samples, count, rule, keys=keys))


def compare_split(schema: Mapping[str, Any], source: Source, examples: Rows, raw_sample: Any) -> list[DataFinding]:
    """Returns how a split differs from a run's training split: drift, faults, and unseen categories of any level.

    `examples` is the split before preprocessing. `raw_sample` has the raw inputs of some examples.
    """
    if not schema or not examples.is_spread:
        return []
    serious = []
    for finding in compare_sample(schema, sample_split(source, examples, raw_sample)):
        if LEVELS.index(finding.level) >= LEVELS.index(DRIFT) or finding.rule == "unseen":
            serious.append(finding)
    return serious


def report_findings(findings: Sequence[Mapping[str, Any]], check: str, emit: Emit) -> None:
    """Reports findings as notes. Raises ConfigError for `dataset.check=refuse` if one is worse than a hint."""
    texts = []
    refused = []
    for finding in findings:
        text = f"{finding['text']} ({finding['because']})"
        texts.append(text)
        if finding["level"] != HINT:
            refused.append(text)
    if refused and check == "refuse":
        more = f", and {count_more(refused[1:])}" if len(refused) > 1 else ""
        raise ConfigError(
            f"dataset.check=refuse: {refused[0]}{more}; scaleflow check shows all, and dataset.check=warn goes on"
        )
    for text in texts[:MAX_FINDINGS_SHOWN]:
        emit(Note(f"dataset.check: {text}"))
    hidden = texts[MAX_FINDINGS_SHOWN:]
    if hidden:
        emit(Note(f"dataset.check: {count_more(hidden)}; scaleflow check shows all"))


def count_more(texts: Collection[str]) -> str:
    plural = "s" if len(texts) > 1 else ""
    return f"{len(texts)} more finding{plural}"
