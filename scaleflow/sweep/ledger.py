"""The ledger of a sweep, `sweep.json`: its jobs with their status.

A digest of its config identifies a job. So the command can run again, with more or fewer values, and skip finished
jobs.
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
from scaleflow.config.words import show_keys
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
    overrides: list[str]  # the words of the job, as they are typed, with secrets masked
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

    def label(self, swept: Sequence[str]) -> str:
        """Returns the overrides that distinguish the job from others, or its number if it has none.

        Args:
            swept: the varied keys and groups, as they are typed.
        """
        return " ".join(select_swept(self.overrides, swept)) or f"job {self.number}"

    def restart(self, folder: str) -> None:
        """Makes the job run again in another folder. Its earlier run stays in its folder."""
        self.folder = folder
        self.status = "waiting"
        self.reason = ""


@dataclass
class Ledger:
    """The jobs of a sweep."""

    files: RunFolder  # the folder of the sweep
    base: dict[str, Any] = field(default_factory=dict)  # the values that all jobs share, with secrets masked
    swept: list[str] = field(default_factory=list)  # the keys and groups that the sweep's commands vary
    entries: list[LedgerEntry] = field(default_factory=list)  # the jobs, in the order of their numbers

    @classmethod
    def load(cls, files: RunFolder) -> Ledger:
        """Reads the ledger in a folder, or returns an empty one. Raises ConfigError if the file is damaged."""
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
        jobs = ",\n".join(
            json.dumps(vars(entry)) for entry in self.entries
        )  # fast, because the file is written at each change
        replace_text(self.files.ledger, f'{head[:-1]}, "jobs": [\n{jobs}\n]}}\n')

    def find_entry(self, identity: str, repeat: int) -> LedgerEntry | None:
        for entry in self.entries:
            if entry.identity == identity and entry.repeat == repeat:
                return entry
        return None

    def get_entry(self, number: int) -> LedgerEntry:
        """Returns the entry with a number, which must exist."""
        for entry in self.entries:
            if entry.number == number:
                return entry
        raise KeyError(number)

    def add_entry(self, identity: str, overrides: Sequence[str], folder: str, repeat: int) -> LedgerEntry:
        entry = LedgerEntry(self.next_number, identity, list(overrides), folder=folder, repeat=repeat)
        self.entries.append(entry)
        return entry

    @property
    def next_number(self) -> int:
        return 1 + max((entry.number for entry in self.entries), default=-1)

    @property
    def typed_keys(self) -> list[str]:
        """The keys and groups that the sweep's commands vary, as they are typed."""
        return [show_keys(key) for key in self.swept]

    def check(self, base: Config, swept: Sequence[str], may_change: bool) -> None:
        """Checks that a command continues this sweep, and adds the keys and groups that it varies, `swept`.

        Args:
            base: the values that the jobs of the command share, by dotted key.
            may_change: whether `base` may differ from the base of earlier commands. Otherwise raises ConfigError.
        """
        all_swept = list(dict.fromkeys([*self.swept, *swept]))
        now = json.loads(json.dumps(mask_secrets(dict(base)), default=str))
        if self.entries and not may_change and "experiment" not in all_swept:
            self._check_base(now, all_swept)
        self.base = {key: value for key, value in now.items() if not is_under(key, all_swept)}
        self.swept = all_swept

    def _check_base(self, now: Config, swept: Sequence[str]) -> None:
        """Raises ConfigError, which names the keys, if common values differ from earlier commands."""
        changed = []
        for key, before in self.base.items():
            if key in now and now[key] != before and not is_under(key, swept):
                changed.append(f"{key}={format_value(now[key])} (was {format_value(before)})")
        if changed:
            raise ConfigError(
                f"hydra.sweep.dir={self.files.path}: the sweep in this folder was started with another config: "
                f"{join_first(changed)}\n"
                "use sweep.on_change=new to run its jobs again, in addition to the old ones, or choose another folder"
            )


def compute_identity(config: Config) -> str:
    """Returns a digest of the values that affect the results of a job: 32 hexadecimal digits of SHA-256."""
    text = json.dumps(list_job_leaves(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find_common_leaves(configs: Sequence[Config]) -> dict[str, Any]:
    """Returns the values of `list_job_leaves` that all configs share."""
    common = list_job_leaves(configs[0])
    for config in configs[1:]:
        leaves = list_job_leaves(config)
        for key, value in list(common.items()):
            if key not in leaves or leaves[key] != value:
                del common[key]
    return common


def select_swept(overrides: Iterable[str], swept: Sequence[str]) -> list[str]:
    """Returns the overrides of the keys and groups that a sweep varies."""
    return [override for override in overrides if is_under(override_key(override), swept)]


#: The metrics whose points the report needs: the speed, and the losses for the plots and for the comparison of losses.
CURVES = (RATE, "train/loss", "val/loss")

#: The maximum number of points of a metric in the first epoch.
MAX_FIRST_POINTS = 1000

#: The approximate maximum number of points of a metric after the first epoch.
MAX_LATER_POINTS = 400


def read_job_state(folder: Path) -> RunState:
    """Reads the state of a job's run, with the metrics of its exported model.

    Its size does not grow with the length of the run, because only some points of some metrics are kept.
    """
    state = RunState.read(folder, has_points=True)
    if state.ready is not None:  # jobs have most of their params in common, so they share the texts
        params = {sys.intern(key): sys.intern(value) for key, value in state.ready.params.items()}
        state.ready = replace(state.ready, params=params)
    state.metrics = state.model_metrics
    curves = {}
    for name in CURVES:
        if name in state.curves:
            curves[name] = thin_points(state.curves[name], state.epoch_steps)
    state.curves = curves
    return state


def thin_points(points: Points, epoch_steps: int | None) -> Points:
    """Drops points of later epochs. Points of the first epoch stay, because jobs are compared at their common steps."""
    count = len(points)
    if epoch_steps:
        count = sum(step <= epoch_steps for step, _ in points)
    count = min(count, MAX_FIRST_POINTS)
    later = points[count:]
    stride = 1 + len(later) // MAX_LATER_POINTS
    return points[:count] + later[::stride]
