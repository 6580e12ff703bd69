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

from scaleflow.config.sections import leaves, show
from scaleflow.errors import Refusal
from scaleflow.launcher.resume import SWEEP
from scaleflow.masking import masked

LEDGER = SWEEP
LOCK = "sweep.lock"

#: Sections and keys that say how a job is kept and started, not what it computes: a change of them makes no other job.
NOT_THE_JOBS = (
    *("tracking", "checkpoint", "profiler", "sweep", "resume"),
    *("cluster.max_restarts", "cluster.stall_seconds", "cluster.start_seconds", "debug.inline"),
)

#: Differences that a refusal names.
MOST_NAMED = 3

Config = Mapping[str, Any]


@dataclass
class Entry:
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
    entries: list[Entry] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> Ledger:
        """What is kept in a folder; an empty one where nothing is.

        Raises:
            Refusal: if it can't be read.
        """
        path = folder / LEDGER
        if not path.exists():
            return cls(folder)
        try:
            kept = json.loads(path.read_text())
            return cls(folder, kept["base"], kept["swept"], [Entry(**entry) for entry in kept["jobs"]])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Refusal(
                f"hydra.sweep.dir={folder}: its {LEDGER} can't be read: {error}; name another folder"
            ) from error

    def save(self) -> None:
        """Writes it anew, whole or not at all."""
        kept = {"base": masked(self.base), "swept": self.swept, "jobs": [asdict(entry) for entry in self.entries]}
        partial = self.folder / f"{LEDGER}.partial"
        partial.write_text(json.dumps(kept, indent=1, default=str))
        partial.replace(self.folder / LEDGER)

    def entry(self, identity: str, repeat: int) -> Entry | None:
        found = (entry for entry in self.entries if (entry.identity, entry.repeat) == (identity, repeat))
        return next(found, None)

    def add(self, identity: str, overrides: Sequence[str], folder: str, repeat: int) -> Entry:
        self.entries.append(Entry(self.next_number, identity, list(overrides), folder, repeat=repeat))
        return self.entries[-1]

    @property
    def next_number(self) -> int:
        return 1 + max((entry.number for entry in self.entries), default=-1)

    def check(self, base: Config, swept: Sequence[str], may_change: bool) -> None:
        """Takes what the jobs of this command share, and which keys vary among them.

        Raises:
            Refusal: if it is another base than before, and that was not allowed.
        """
        varied = [*dict.fromkeys((*self.swept, *swept))]
        now = json.loads(json.dumps(masked(dict(base)), default=str))
        changed = [
            key
            for key, before in self.base.items()
            if key in now and now[key] != before and not is_under(key, varied) and "experiment" not in varied
        ]
        if changed and self.entries and not may_change:
            named = ", ".join(f"{key}={show(now[key])} (was {show(self.base[key])})" for key in changed[:MOST_NAMED])
            more = f" and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
            raise Refusal(
                f"hydra.sweep.dir={self.folder}: the sweep there was begun with another config: {named}{more}\n"
                "sweep.on_change=new runs the jobs anew beside those; or name another folder"
            )
        self.base = {k: v for k, v in now.items() if not is_under(k, varied)}
        self.swept = varied


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Locks a sweep's folder for one command, as long as the block lasts.

    Raises:
        Refusal: if another one does.
    """
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise Refusal(f"hydra.sweep.dir={folder}: another command works on the sweep there; end it first") from error
    try:
        yield
    finally:
        lock.release()


def of_the_job(config: Config) -> dict[str, Any]:
    """The leaves of a config that say what is computed."""
    return {key: value for key, value in leaves(config).items() if not is_under(key, NOT_THE_JOBS)}


def identity_of(config: Config) -> str:
    """A digest of what a config computes."""
    text = json.dumps(of_the_job(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def shared(configs: Sequence[Config]) -> dict[str, Any]:
    """The leaves that all configs have alike."""
    first, *others = [of_the_job(config) for config in configs]
    return {k: v for k, v in first.items() if all(k in other and other[k] == v for other in others)}


def is_under(key: str, names: Iterable[str]) -> bool:
    """Whether a key is one of the names, or within the section or group that one is."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
