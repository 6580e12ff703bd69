"""The jobs of a sweep that make the same choices, taken together: medians of what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from scaleflow.sweep.ledger import LedgerEntry
from scaleflow.sweep.run_summary import RunSummary


@dataclass(frozen=True)
class RepeatedJob:
    """Jobs of one config, of which most sweeps have one.

    Attributes:
        jobs: each with what its folder tells; those that warm up among them, which are in no figure.
    """

    jobs: Sequence[tuple[LedgerEntry, RunSummary]]

    @property
    def entry(self) -> LedgerEntry:
        return self.jobs[0][0]

    @property
    def counted(self) -> list[RunSummary]:
        """Those that figures are made of: of repeats those that finished, as far as any did."""
        there = [told for entry, told in self.jobs if not entry.warms_up and told.is_ready]
        return [told for told in there if told.status == "FINISHED"] or there

    @property
    def is_ready(self) -> bool:
        return any(told.is_ready for _, told in self.jobs)

    @property
    def is_finished(self) -> bool:
        return any(told.status == "FINISHED" for told in self.counted)

    @property
    def status(self) -> str:
        """What they have in common, or how many have which."""
        found = Counter(entry.status for entry, _ in self.jobs)
        return next(iter(found)) if len(found) == 1 else ", ".join(f"{n} {status}" for status, n in found.items())

    @property
    def reason(self) -> str | None:
        return "; ".join(dict.fromkeys(entry.reason for entry, _ in self.jobs if entry.reason)) or None

    @property
    def params(self) -> Mapping[str, str]:
        return next((told.params for _, told in self.jobs if told.params), {})

    @property
    def curves(self) -> Mapping[str, Sequence[tuple[int, float]]]:
        """Of one of them."""
        return next((told.curves for told in self.counted), {})

    @property
    def runs(self) -> str | None:
        """Their ids in the store."""
        return " ".join(told.run_id for _, told in self.jobs if told.run_id) or None

    @property
    def rates(self) -> list[float]:
        """The examples a second of each that counts."""
        return [told.rate for told in self.counted if told.rate]

    @property
    def rate(self) -> float | None:
        return median(self.rates) if self.rates else None

    @property
    def results(self) -> dict[str, float]:
        """The metrics that tell how good it is."""
        return compute_medians([told.results for told in self.counted])

    @property
    def last(self) -> dict[str, float]:
        """Each metric's last value."""
        return compute_medians([told.last for told in self.counted])


def group_repeats(jobs: Sequence[tuple[LedgerEntry, RunSummary]]) -> list[RepeatedJob]:
    """Jobs by their config."""
    found: dict[str, list[tuple[LedgerEntry, RunSummary]]] = {}
    for entry, told in jobs:
        found.setdefault(entry.identity, []).append((entry, told))
    return [RepeatedJob(of_one) for of_one in found.values()]


def compute_medians(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each metric that any has."""
    keys = dict.fromkeys(key for each in values for key in each)
    return {key: median([each[key] for each in values if key in each]) for key in keys}
