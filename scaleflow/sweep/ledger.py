"""The ledger of a sweep, `sweep.json`: its jobs and their status, and what it keeps of the run of each.

A digest of its config identifies a job. So the command can run again, with more or fewer values, and skip the jobs
that are finished.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scaleflow.config.compose import override_key
from scaleflow.config.parse import format_value, is_under
from scaleflow.errors import ConfigError
from scaleflow.interfaces.formatting import join_first
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.runs import RunFolder
from scaleflow.runs.folder import replace_text
from scaleflow.runs.identity import list_job_leaves
from scaleflow.runs.state import RATE, RunState

#: The key of the fold that a run validates on.
FOLD = "dataset.fold"

Config = Mapping[str, Any]
Points = list[tuple[int, float]]


@dataclass
class LedgerEntry:
    """A job of a sweep."""

    number: int  # the number of the job in the sweep, from 0
    identity: str  # a digest of its config; see `compute_identity`
    overrides: list[str]  # the overrides of the job, with secrets masked
    folder: str  # the folder of its run, relative to the sweep's folder
    status: str = "waiting"  # waiting, RUNNING, FINISHED, FAILED, KILLED, REFUSED or PRUNED
    reason: str = ""  # why it was refused or did not finish
    repeat: int = 0  # the index of this run among the runs of the same config, from 0
    warms_up: bool = False  # whether it is a warm-up, which does not count

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do: the job finished, or the sweeper pruned it."""
        return self.status in ("FINISHED", "PRUNED")

    @property
    def is_fold(self) -> bool:
        """Whether the runs of its config are its folds."""
        return bool(self.overrides) and self.overrides[-1].startswith(f"{FOLD}=")

    def restart(self, folder: str) -> None:
        """Lets the job run again, in another folder. Its earlier run stays where it is."""
        self.folder, self.status, self.reason = folder, "waiting", ""


@dataclass
class Ledger:
    """The jobs of a sweep."""

    files: RunFolder  # the folder of the sweep
    base: dict[str, Any] = field(default_factory=dict)  # the values that all jobs share, with secrets masked
    swept: list[str] = field(default_factory=list)  # the keys and groups that the sweep's commands vary
    entries: list[LedgerEntry] = field(default_factory=list)  # the jobs, in the order of their numbers

    @classmethod
    def load(cls, files: RunFolder) -> Ledger:
        """Reads the ledger in a folder; returns an empty one if there is none. Raises ConfigError if it cannot
        be read.
        """
        path = files.ledger
        if not path.exists():
            return cls(files)
        try:
            content = json.loads(path.read_text())
            entries = [LedgerEntry(**job) for job in content["jobs"]]
            return cls(files, content["base"], content["swept"], entries=entries)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"hydra.sweep.dir={files.path}: its {path.name} can't be read: {error}; choose another folder"
            ) from error

    def save(self) -> None:
        """Writes the file atomically."""
        head = json.dumps({"base": self.base, "swept": self.swept}, default=str)
        jobs = ",\n".join(json.dumps(vars(entry)) for entry in self.entries)  # quick: it is written at each change
        replace_text(self.files.ledger, f'{head[:-1]}, "jobs": [\n{jobs}\n]}}\n')

    def find_entry(self, identity: str, repeat: int) -> LedgerEntry | None:
        matches = (entry for entry in self.entries if (entry.identity, entry.repeat) == (identity, repeat))
        return next(matches, None)

    def add_entry(self, identity: str, overrides: Sequence[str], folder: str, repeat: int) -> LedgerEntry:
        entry = LedgerEntry(self.next_number, identity, list(overrides), folder=folder, repeat=repeat)
        self.entries.append(entry)
        return entry

    @property
    def next_number(self) -> int:
        return 1 + max((entry.number for entry in self.entries), default=-1)

    def check(self, base: Config, swept: Sequence[str], may_change: bool) -> None:
        """Checks that a command continues this sweep, and adds the keys and groups that it varies, `swept`.

        `base` has the values that the jobs of the command share, by their dotted keys. Raises ConfigError if it differs
        from that of earlier commands, unless it `may_change`.
        """
        all_swept = [*dict.fromkeys((*self.swept, *swept))]
        now = json.loads(json.dumps(mask_secrets(dict(base)), default=str))
        changed = [
            key
            for key, before in self.base.items()
            if key in now and now[key] != before and not is_under(key, all_swept) and "experiment" not in all_swept
        ]
        if changed and self.entries and not may_change:
            named = [f"{key}={format_value(now[key])} (was {format_value(self.base[key])})" for key in changed]
            raise ConfigError(
                f"hydra.sweep.dir={self.files.path}: the sweep in this folder was started with another config: "
                f"{join_first(named)}\nuse sweep.on_change=new to run its jobs again, in addition to the old ones, or "
                "choose another folder"
            )
        self.base = {k: v for k, v in now.items() if not is_under(k, all_swept)}
        self.swept = all_swept


def compute_identity(config: Config) -> str:
    """Returns a digest of the values that decide what a job computes: 32 hexadecimal digits of SHA-256."""
    text = json.dumps(list_job_leaves(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find_common_leaves(configs: Sequence[Config]) -> dict[str, Any]:
    """Returns the values of `list_job_leaves` that all configs share."""
    first, *others = configs
    common = list_job_leaves(first)
    for config in others:
        leaves = list_job_leaves(config)
        common = {key: value for key, value in common.items() if key in leaves and leaves[key] == value}
    return common


def select_swept(overrides: Iterable[str], swept: Sequence[str]) -> list[str]:
    """Returns the overrides of the keys and groups that a sweep varies."""
    return [each for each in overrides if is_under(override_key(each), swept)]


#: The metrics whose points the report needs: the speed, and the losses for the plots and for the comparison of losses.
CURVES = (RATE, "train/loss", "val/loss")

#: The most points of a metric in the first epoch, and about the most after them.
MAX_FIRST, MAX_POINTS = 1000, 400


def read_job_state(folder: Path) -> RunState:
    """Reads the state of a job's run, in a size that does not grow with the run: few points of some metrics. Its
    `metrics` are those of the exported model.
    """
    state = RunState.read(folder, has_points=True)
    if state.ready is not None:  # jobs have most of their params in common
        params = {sys.intern(key): sys.intern(value) for key, value in state.ready.params.items()}
        state.ready = replace(state.ready, params=params)
    state.metrics = state.model_metrics
    kept = (name for name in CURVES if name in state.curves)
    state.curves = {name: thin_points(state.curves[name], state.epoch_steps) for name in kept}
    return state


def thin_points(points: Points, epoch_steps: int | None) -> Points:
    """Drops points. Those of the first epoch stay, because jobs are compared at the steps that both have."""
    first = sum(step <= epoch_steps for step, _ in points) if epoch_steps else len(points)
    first = min(first, MAX_FIRST)
    return [*points[:first], *points[first :: 1 + (len(points) - first) // MAX_POINTS]]
