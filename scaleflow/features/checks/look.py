"""The worker's part of `scaleflow check`: reads a dataset as a run reads it, checks it, and writes the report."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scaleflow.dataset.schema import SplitSample, make_schema, sample_split
from scaleflow.errors import ConfigError, read_reason
from scaleflow.features.checks.data_page import make_data_page, sort_findings
from scaleflow.features.checks.drift import FAULT, HINT, DataFinding, compare_sample
from scaleflow.features.checks.events import DataChecked
from scaleflow.features.checks.hook import find_together_in, sample_test_split
from scaleflow.features.checks.rules import find_duplicates, find_faults, find_unknown_words
from scaleflow.interfaces import Plan, Source, Split, name_leaves
from scaleflow.interfaces.events import Emit, Event, Note, PhaseBegan
from scaleflow.runs.run_name import describe_data_name
from scaleflow.worker.earlier import open_source, take_whole
from scaleflow.worker.kept_predictions import has_pixels, to_pixels
from scaleflow.worker.runtime import setup_runtime

if TYPE_CHECKING:
    from scaleflow.dataset import Splits

#: Maximum number of values read per split, so that they fit in memory.
MAX_VALUES = 1 << 26

#: Maximum number of classes with pictures in the report.
MAX_SHOWN = 12


def look_at_dataset(
    plan: Plan, report: str | Path, examples: int, emit: Emit, schema: Mapping[str, Any] | None = None
) -> None:
    """Checks the splits of a dataset, writes the report, and emits the findings.

    It reads at most `examples` examples per split. With the `schema` of a run, it compares the data with that run.

    Raises ConfigError if the dataset cannot be read, or if its examples differ in shape.
    """
    sys.path[:0] = [folder for folder in plan.search if folder not in sys.path]
    from scaleflow import dataset

    setup_runtime(plan, emit)
    name = describe_data_name(plan)
    emit(PhaseBegan(f"reading {name}"))
    left_out: list[DataFinding] = []

    def listen(event: Event) -> None:
        if isinstance(event, Note) and event.text.startswith((dataset.LEFT_OUT, dataset.UNLABELLED)):
            left_out.append(judge_left_out(event.text, plan.dataset.on_bad_example, dataset.UNLABELLED))
        else:
            emit(event)

    plan = plan if schema is None else take_whole(plan)
    options = replace(
        plan.dataset, validation=plan.dataset.validation_split, on_bad_example="skip", cache="none", shards=1
    )
    source = open_source(plan)
    splits = dataset.prepare_splits(source, options, plan.seed, emit=listen, preprocesses=False)
    samples = sample_splits(name, source, splits, examples=examples)
    emit(PhaseBegan(f"looking at {name}"))
    findings: list[DataFinding] = []
    if schema is None:
        findings += find_as_runs_do(source, splits, plan.dataset.split, samples=samples)
    findings += left_out
    findings += find_in_samples(samples, schema)
    findings = sort_findings(findings)
    page = make_data_page(f"Data: {name}", findings, samples, pictures=pick_pictures(source, samples["train"]))
    Path(report).write_text(page, encoding="utf-8")
    counts = {split: {"examples": sample.examples, "looked_at": len(sample)} for split, sample in samples.items()}
    emit(DataChecked([asdict(finding) for finding in findings], counts))


def find_as_runs_do(
    source: Source, splits: Splits, rule: Split, samples: Mapping[str, SplitSample]
) -> list[DataFinding]:
    """Finds rows that belong together but were divided: first in a run's sample, then by other rules in `samples`."""
    train = sample_split(source, splits.raw["train"], splits.sample)
    run_samples = {"train": train}
    if train.is_table:
        run_samples |= sample_test_split(source, splits.raw, splits.sample)
    findings = find_together_in(run_samples, splits.raw, rule)
    rules = {finding.rule for finding in findings}
    for finding in find_together_in(samples, splits.raw, rule):
        if finding.rule not in rules:
            findings.append(finding)
    return findings


def sample_splits(name: str, source: Source, splits: Splits, examples: int) -> dict[str, SplitSample]:
    """Returns a sample of each split, by name, the training split first. Raises ConfigError if shapes differ."""
    samples = {}
    for split, rows in splits.raw.items():
        try:
            samples[split] = sample_split(source, rows, splits.sample, most=(examples, MAX_VALUES), reads_all=True)
        except (ValueError, AttributeError) as error:
            raise ConfigError(
                f"dataset={name}: examples of the split {split!r} cannot be put side by side, as scaleflow check does "
                f"({read_reason(error)}); it needs inputs and targets of one shape"
            ) from error
    return samples


def judge_left_out(note: str, option: str, unlabelled: str) -> DataFinding:
    """Returns the finding about examples that were left out: a hint if `dataset.on_bad_example` allows it, else a
    fault.

    Notes about rows without a target begin with `unlabelled`.
    """
    is_allowed = option == "skip" or (option == "auto" and note.startswith(unlabelled))
    text = note.partition("left out")[2].removeprefix(":").strip()
    if is_allowed:
        return DataFinding("unreadable", HINT, text, because=f"dataset.on_bad_example={option} allows it")
    return DataFinding("unreadable", FAULT, text, because=f"dataset.on_bad_example={option} leaves none out")


def find_in_samples(samples: Mapping[str, SplitSample], schema: Mapping[str, Any] | None) -> list[DataFinding]:
    """Returns all findings in samples of the splits. The training split comes first.

    Without the schema of a run, the other splits are compared with the training split.
    """
    train = samples["train"]
    findings: list[DataFinding] = []
    known = make_schema(train) if schema is None else schema
    for split, sample in samples.items():
        if schema is not None or split != "train":
            label = f"{split}: " if len(samples) > 1 else ""
            findings += compare_sample(known, sample, label)
    findings += find_faults(train)
    findings += find_duplicates(samples)
    findings += find_unknown_words(samples)
    return findings


def pick_pictures(source: Source, sample: SplitSample) -> dict[str, np.ndarray[Any, Any]]:
    """Returns pictures by class, [n, height, width, channels] uint8, or the first examples if the target has no
    classes.
    """
    for name, described in name_leaves(source.inputs).items():
        if not has_pixels(described):
            continue
        pictures = to_pixels(sample.columns[name or "input"][:2000], described.scale)
        target = next(iter(sample.targets.values()), None)
        if target is None or target.dtype != object:
            return {"first examples": pictures[:MAX_SHOWN]}
        classes = target[: len(pictures)]
        names = sorted(set(classes.tolist()))[:MAX_SHOWN]
        return {name: pictures[classes == name] for name in names if name}
    return {}
