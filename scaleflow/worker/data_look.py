"""Checks a sample of a run's data before training: makes its schema, finds faults, compares it with earlier data."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from scaleflow.errors import ConfigError, read_reason
from scaleflow.interfaces import EarlierState, Plan, Rows, Source, Workers, name_leaves
from scaleflow.interfaces.events import Emit, Note

if TYPE_CHECKING:
    from scaleflow.data_checks.drift import DataFinding
    from scaleflow.data_checks.sample import SplitSample
    from scaleflow.dataset import Splits

#: The most examples, and the most values of all of them, that a run looks at.
MOST_EXAMPLES, MOST_VALUES = 2000, 1 << 20

#: The fewest examples, however large they are.
FEWEST_EXAMPLES = 32

#: The most findings that a run reports.
MOST_TOLD = 5


def make_look(
    plan: Plan, source: Source, earlier: EarlierState | None, is_resumed: bool, workers: Workers, emit: Emit
) -> Callable[[Splits], Mapping[str, Any]] | None:
    """Makes the function that looks at the raw splits of a run, and returns the schema that is kept.

    The data of a resumed run are compared with the schema of its first command, which is kept. The function tells what
    it finds as `dataset.check` says.
    """
    known = earlier.state.schema if earlier is not None and is_resumed else {}
    check = plan.dataset.check
    if check == "none":
        return (lambda splits: known) if known else None

    def look(splits: Splits) -> Mapping[str, Any]:
        schema = dict(known)

        def find() -> str:  # on the chief
            from scaleflow.data_checks.schema import make_schema

            try:
                sample = sample_split(source, splits.train, splits.sample)
                found = (
                    compare_split(known, source, splits.train, splits.sample) if known else find_told(splits, sample)
                )
                schema.update(known or make_schema(sample))
            except Exception as error:  # strange data end no run, and an example that cannot be read has its own error
                traceback.print_exc()
                return json.dumps({"error": read_reason(error)})
            return json.dumps({"findings": [asdict(each) for each in found]})

        tell_findings(json.loads(workers.from_chief(find)), check, emit)
        return schema

    return look


def find_told(splits: Splits, sample: SplitSample) -> list[DataFinding]:
    """Returns the faults of the training split. The first examples of a stream may not be typical of the rest."""
    from scaleflow.data_checks.drift import DRIFT, select_level
    from scaleflow.data_checks.rules import find_faults

    return select_level(find_faults(sample, with_hints=False), DRIFT) if splits.train.is_spread else []


def compare_split(schema: Mapping[str, Any], source: Source, examples: Rows, few: Any) -> list[DataFinding]:
    """Returns how a split differs from the training split of a run: drift, and all unseen categories.

    Args:
        schema: of the run.
        source: of the split.
        examples: the split, before its preprocessing.
        few: some of its raw inputs.
    """
    from scaleflow.data_checks.drift import DRIFT, LEVELS, compare_sample

    if not schema or not examples.is_spread:
        return []
    found = compare_sample(schema, sample_split(source, examples, few))
    return [each for each in found if LEVELS.index(each.level) >= LEVELS.index(DRIFT) or each.rule == "unseen"]


def tell_comparison(
    plan: Plan, earlier: EarlierState | None, source: Source, examples: Rows, few: Any, emit: Emit
) -> None:
    """Reports how an evaluation's data differ from the model's training data, as `dataset.check` says."""
    if plan.dataset.check == "none" or earlier is None:
        return
    try:
        found = compare_split(earlier.state.schema, source, examples, few)
    except Exception as error:
        traceback.print_exc()
        tell_findings({"error": read_reason(error)}, plan.dataset.check, emit)
        return
    tell_findings({"findings": [asdict(each) for each in found]}, plan.dataset.check, emit)


def tell_findings(answer: Mapping[str, Any], check: str, emit: Emit) -> None:
    """Reports findings in notes. Raises ConfigError for `dataset.check=refuse`."""
    if "error" in answer:
        text = f"dataset.check={check}: the data cannot be looked at ({answer['error']})"
        if check == "refuse":
            raise ConfigError(f"{text}; use dataset.check=none")
        emit(Note(text))
        return
    findings: Sequence[Mapping[str, Any]] = answer["findings"]
    told = [f"{each['text']} ({each['because']})" for each in findings]
    refused = [text for text, each in zip(told, findings, strict=True) if each["level"] != "hint"]
    if refused and check == "refuse":
        more = f", and {count_more(refused[1:])}" if len(refused) > 1 else ""
        raise ConfigError(
            f"dataset.check=refuse: {refused[0]}{more}; scaleflow check shows all, and dataset.check=warn goes on"
        )
    for text in told[:MOST_TOLD]:
        emit(Note(f"dataset.check: {text}"))
    if len(told) > MOST_TOLD:
        emit(Note(f"dataset.check: {count_more(told[MOST_TOLD:])}; scaleflow check shows all"))


def count_more(texts: Collection[str]) -> str:
    return f"{len(texts)} more finding{'s' if len(texts) > 1 else ''}"


def sample_split(
    source: Source,
    examples: Rows,
    few: Any,
    most: tuple[int, int] = (MOST_EXAMPLES, MOST_VALUES),
    reads_all: bool = False,
) -> SplitSample:
    """Reads examples of a split, as columns.

    Args:
        source: of the split.
        examples: the split, before its preprocessing.
        few: some of its raw inputs.
        most: the most examples, and the most values of all of them.
        reads_all: whether a stream that is not in memory is read to its end; else its first examples are read.
    """
    from scaleflow.data_checks.sample import make_sample

    leaves = name_leaves(few).values()
    values = sum(array.size for array in leaves) / max(1, max(map(len, leaves), default=1))
    count = min(most[0], max(FEWEST_EXAMPLES, int(most[1] / max(1.0, values))))
    inputs, targets, *_ = examples.read_spread(count, reads_all)
    return make_sample(source.inputs, source.outputs, (inputs, targets), len(examples), find_kinds(source))


def find_kinds(source: Source) -> Mapping[str, str]:
    """Returns the kinds of a table's columns; empty for other sources."""
    reading = getattr(source, "reading", {})
    columns = reading.get("columns") if isinstance(reading, Mapping) else None
    return columns if isinstance(columns, Mapping) else {}
