"""Records the progress of a sweep: the status of its jobs in the ledger, and reports in the sweep's own run."""

import threading
import time
from collections.abc import Sequence

from omegaconf import DictConfig

from scaleflow.interfaces import Plan, Sweep
from scaleflow.runs import RunState
from scaleflow.runs.provenance.collect import LaunchFacts
from scaleflow.sweep.ledger import Ledger, LedgerEntry, read_job_state
from scaleflow.sweep.parent_run import ParentRun
from scaleflow.sweep.ranking import choose_mode
from scaleflow.sweep.sweep_report import SweepReport

#: Statuses that do not change until the job runs again.
ENDED = ("FINISHED", "FAILED", "KILLED", "PRUNED")

#: The share of the time that reports may take while jobs run. A report about many jobs takes longer.
REPORT_SHARE = 0.05


class SweepProgress:
    """The ledger and the own run of a sweep. Several threads may record at once.

    Args:
        config: the config of the command, with Hydra's own part.
        began: when the command began, in seconds since the epoch.

    Attributes:
        ledger: the jobs with their status.
        parent: the sweep's own run.
        facts: the code, packages and machine of all jobs.
        options: the section `sweep` of the jobs.
    """

    def __init__(self, config: DictConfig, began: float, ledger: Ledger, parent: ParentRun) -> None:
        self._config = config
        self._began = began
        self._folder = parent.files.path
        self._lock = threading.RLock()
        self._states: dict[int, RunState] = {}  # the runs of jobs that have ended, by number
        self._next_update = 0.0
        self.ledger = ledger
        self.parent = parent
        self.facts = LaunchFacts()
        self.options = Sweep()

    def begin_parent(self, plan: Plan) -> None:
        """Begins the sweep's own run when the first job is ready. If no job becomes ready, there is no such run."""
        with self._lock:
            if not self.parent.recorder:
                self.parent.begin(plan, self._config, self.ledger, began=self._began, facts=self.facts)

    def record_status(self, entry: LedgerEntry, status: str, reason: str = "") -> None:
        """Writes the status of a job. If it has ended, a report may be recorded."""
        with self._lock:
            entry.status = status
            entry.reason = reason
            self._states.pop(entry.number, None)
            self.ledger.save()
            if status != "RUNNING" and self.parent.recorder and time.monotonic() >= self._next_update:
                self._update_parent()

    def _update_parent(self) -> None:
        began = time.monotonic()
        self.parent.update(self.make_report(self.ledger.entries))
        ended = time.monotonic()
        self._next_update = ended + (ended - began) / REPORT_SHARE

    def make_report(self, entries: Sequence[LedgerEntry]) -> SweepReport:
        runs = list(map(self.read_state, entries))
        options = self.options
        direction = self._config.hydra.sweeper.get("direction")
        mode = choose_mode(options.metric, options.mode, direction=direction, runs=runs)
        jobs = list(zip(entries, runs, strict=True))
        return SweepReport(jobs, self.ledger.typed_keys, options.metric, mode=mode, same_losses=options.same_losses)

    def read_state(self, entry: LedgerEntry) -> RunState:
        """Reads the run of a job. It is read only once after it has ended."""
        state = self._states.get(entry.number) or read_job_state(self._folder / entry.folder)
        if entry.status in ENDED:
            self._states[entry.number] = state
        return state
