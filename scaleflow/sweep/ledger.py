"""`sweep.json`: what was asked of a sweep, and what became of each of its jobs.

A job is known by its config, so that the command may be sent again, with more values or fewer, and finds what is done.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from scaleflow.config.parse import flatten, format_value
from scaleflow.errors import ConfigError
from scaleflow.launcher.resume import SWEEP
from scaleflow.secret_masking import mask_secrets

LEDGER = SWEEP
SWEEP_LOCK = "sweep.lock"

#: Sections and keys that say how a job is kept and started, not what it computes: a change of them makes no other job.
NOT_THE_JOBS = (
    *("tracking", "checkpoint", "profiler", "sweep", "resume"),
    *("cluster.max_restarts", "cluster.stall_seconds", "cluster.start_seconds", "debug.inline"),
)

#: Differences that a refusal names.
MOST_NAMED = 3

Config = Mapping[str, Any]


@dataclass
class LedgerEntry:
    """What is known of a job.

    Attributes:
        number: its place in the sweep.
        identity: a digest of its config.
        overrides: what makes it, secrets masked.
        folder: its run's, below the sweep's.
        status: waiting, RUNNING, FINISHED, FAILED, KILLED, REFUSED or PRUNED.
        reason: why it was refused or failed, in a line.
        repeat: which of several runs of the same config it is, from 0.
        warms_up: whether it is run before those that count.
    """

    number: int
    identity: str
    overrides: list[str]
    folder: str
    status: str = "waiting"
    reason: str = ""
    repeat: int = 0
    warms_up: bool = False


@dataclass
class Ledger:
    """The jobs of a sweep, in its folder.

    Attributes:
        folder: the sweep's.
        base: the leaves of the config that all jobs share, by their dotted keys.
        swept: the keys and groups whose values were asked to vary.
        entries: the jobs, by number.
    """

    folder: Path
    base: dict[str, Any] = field(default_factory=dict)
    swept: list[str] = field(default_factory=list)
    entries: list[LedgerEntry] = field(default_factory=list)

    @classmethod
    def load(cls, folder: Path) -> Ledger:
        """What is kept in a folder; an empty one where nothing is.

        Raises:
            ConfigError: if it can't be read.
        """
        path = folder / LEDGER
        if not path.exists():
            return cls(folder)
        try:
            kept = json.loads(path.read_text())
            return cls(folder, kept["base"], kept["swept"], [LedgerEntry(**entry) for entry in kept["jobs"]])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"hydra.sweep.dir={folder}: its {LEDGER} can't be read: {error}; name another folder"
            ) from error

    def save(self) -> None:
        """Writes it anew, whole or not at all."""
        kept = {"base": mask_secrets(self.base), "swept": self.swept, "jobs": [asdict(entry) for entry in self.entries]}
        partial = self.folder / f"{LEDGER}.partial"
        partial.write_text(json.dumps(kept, indent=1, default=str))
        partial.replace(self.folder / LEDGER)

    def find_entry(self, identity: str, repeat: int) -> LedgerEntry | None:
        found = (entry for entry in self.entries if (entry.identity, entry.repeat) == (identity, repeat))
        return next(found, None)

    def add_entry(self, identity: str, overrides: Sequence[str], folder: str, repeat: int) -> LedgerEntry:
        self.entries.append(LedgerEntry(self.next_number, identity, list(overrides), folder, repeat=repeat))
        return self.entries[-1]

    @property
    def next_number(self) -> int:
        return 1 + max((entry.number for entry in self.entries), default=-1)

    def check(self, base: Config, swept: Sequence[str], may_change: bool) -> None:
        """Takes what the jobs of this command share, and which keys vary among them.

        Raises:
            ConfigError: if it is another base than before, and that was not allowed.
        """
        varied = [*dict.fromkeys((*self.swept, *swept))]
        now = json.loads(json.dumps(mask_secrets(dict(base)), default=str))
        changed = [
            key
            for key, before in self.base.items()
            if key in now and now[key] != before and not is_under(key, varied) and "experiment" not in varied
        ]
        if changed and self.entries and not may_change:
            named = ", ".join(
                f"{key}={format_value(now[key])} (was {format_value(self.base[key])})" for key in changed[:MOST_NAMED]
            )
            more = f" and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
            raise ConfigError(
                f"hydra.sweep.dir={self.folder}: the sweep there was begun with another config: {named}{more}\n"
                "sweep.on_change=new runs the jobs anew beside those; or name another folder"
            )
        self.base = {k: v for k, v in now.items() if not is_under(k, varied)}
        self.swept = varied


@contextlib.contextmanager
def lock_sweep(folder: Path) -> Iterator[None]:
    """Locks a sweep's folder for one command, as long as the block lasts.

    Raises:
        ConfigError: if another one does.
    """
    lock = FileLock(folder / SWEEP_LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(
            f"hydra.sweep.dir={folder}: another command works on the sweep there; end it first"
        ) from error
    try:
        yield
    finally:
        lock.release()


def list_job_leaves(config: Config) -> dict[str, Any]:
    """The leaves of a config that say what is computed."""
    return {key: value for key, value in flatten(config).items() if not is_under(key, NOT_THE_JOBS)}


def compute_identity(config: Config) -> str:
    """A digest of what a config computes."""
    text = json.dumps(list_job_leaves(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find_common_leaves(configs: Sequence[Config]) -> dict[str, Any]:
    """The leaves that all configs have alike."""
    first, *others = [list_job_leaves(config) for config in configs]
    return {k: v for k, v in first.items() if all(k in other and other[k] == v for other in others)}


def is_under(key: str, names: Iterable[str]) -> bool:
    """Whether a key is one of the names, or within the section or group that one is."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
