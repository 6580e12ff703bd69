"""Reads which job of the sweep in a folder is the best one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from scaleflow.config.hydra_errors import override_key
from scaleflow.interfaces.events import RunReady, TagsSet
from scaleflow.runs import EventReader, RunFolder
from scaleflow.sweep.ledger import Ledger, LedgerEntry, is_under
from scaleflow.tracking.tracked_sweeps import BEST


def read_sweep_tags(folder: Path) -> Mapping[str, str]:
    """Returns the tags of the run of the sweep in a folder."""
    tags: dict[str, str] = {}
    for event in EventReader(RunFolder(folder).events).read():
        if isinstance(event, RunReady | TagsSet):
            tags |= event.tags if isinstance(event, RunReady) else event.values
    return tags


def read_best_entry(folder: Path) -> tuple[LedgerEntry, list[str]] | None:
    """Returns the best job of the sweep in a folder, and those of its overrides that the sweep varies; None if no
    finished job has the sweep's metric.
    """
    number = read_sweep_tags(folder).get(BEST)
    ledger = Ledger.load(RunFolder(folder))
    entry = next((each for each in ledger.entries if str(each.number) == number), None)
    if entry is None:
        return None
    return entry, [each for each in entry.overrides if is_under(override_key(each), ledger.swept)]
