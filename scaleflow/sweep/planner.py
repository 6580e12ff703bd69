"""Decides which jobs of a command run: compares the requested jobs with the ledger, and checks them."""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig

from scaleflow.cluster.engines import find_engine
from scaleflow.config.compose import list_module_folders
from scaleflow.config.words import show_keys, show_words
from scaleflow.errors import ConfigError, NothingCanRun
from scaleflow.interfaces import Plan, Sweep
from scaleflow.interfaces.formatting import join_first
from scaleflow.interfaces.secret_masking import mask_secrets
from scaleflow.launcher.command_exit import find_interruption
from scaleflow.launcher.display import Display, JobDisplay
from scaleflow.runs import RunFolder, RunState
from scaleflow.runs.folder_use import refuse_others
from scaleflow.runs.state import is_finished
from scaleflow.sweep.changes import CHANGED, SweepInputs, describe_changes
from scaleflow.sweep.composer import JobComposer, JobRequest, SweepJob, find_swept_keys
from scaleflow.sweep.ledger import Ledger, LedgerEntry, find_common_leaves

#: The maximum number of finished jobs that have a line each before the first job runs.
MAX_LINES = 10


class JobPlanner:
    """Turns requests into the jobs of a sweep.

    Args:
        config: the config of the command, with Hydra's own part.
        folder: the folder of the sweep.
        composer: prepares a job, which checks it.
        ledger: the jobs of earlier commands. New jobs are added to it.

    Attributes:
        jobs: all jobs of this command so far.
        inputs: reads the code and data files of the jobs.
        is_resumed: whether the ledger has jobs of earlier commands.
        tags: tags of the sweep's own run: which results are older than the code or the data.
        plan: the plan of the first job that can run; None until then.
        needs_server: whether a job that can run has processes on this machine.
    """

    def __init__(self, config: DictConfig, folder: Path, composer: JobComposer, ledger: Ledger) -> None:
        self._folder = folder
        self._composer = composer
        self._ledger = ledger
        self._swept = find_swept_keys(config)
        self.jobs: list[SweepJob] = []
        self.inputs = SweepInputs(folder, list_module_folders(config.hydra.runtime))
        self.is_resumed = bool(ledger.entries)
        self.tags: dict[str, str] = {}
        self.plan: Plan | None = None
        self.needs_server = False

    def plan_jobs(self, turns: Sequence[tuple[int, JobRequest]], options: Sweep) -> list[SweepJob]:
        """Returns the jobs that are new to this command, and prints why a job cannot run.

        Args:
            turns: (position in the batch, request) for each run.
            options: the section `sweep` of the jobs.

        Raises ConfigError if no job can run, or if the jobs do not fit the sweep in the folder.
        """
        requests = [request for _, request in turns if not request.refusal]
        self._check_base(requests, options.on_change)
        jobs = self._list_new_jobs(turns)
        if self.is_resumed and not self.jobs:
            self._handle_changes(jobs, options.on_change)
        refusals = []
        for job in jobs:
            refusal = self._check_job(job)
            if refusal is not None:
                refusals.append(refusal)
        show_ended([job.entry for job in jobs if job.entry.is_finished])
        if refusals and len(refusals) == len(jobs):
            raise NothingCanRun(str(refusals[0])) from refusals[0]
        self.jobs += jobs
        self._ledger.save()
        return jobs

    def _check_base(self, requests: Sequence[JobRequest], policy: str) -> None:
        """Raises ConfigError if the jobs differ from the jobs of earlier commands in more than the swept keys."""
        base = find_common_leaves([request.config for request in requests])
        for request in requests:
            for key in request.references:  # its value depends on another key
                base.pop(key, None)
        self._ledger.check(base, self._swept, may_change=policy in ("new", "rerun", "keep"))

    def _list_new_jobs(self, turns: Sequence[tuple[int, JobRequest]]) -> list[SweepJob]:
        """Returns a job for each config and repeat that is new to this command. Duplicates in the batch share one."""
        known = {job.entry.number for job in self.jobs}
        new_jobs: dict[int, SweepJob] = {}
        for index, request in turns:
            job = self._find_job(request)
            number = job.entry.number
            if number not in known:
                new_jobs.setdefault(number, job).indices.append(index)
        for number, job in new_jobs.items():
            if len(job.indices) > 1:
                JobDisplay(sys.stdout, number).print_line(f"is requested {len(job.indices)} times and runs once")
        return list(new_jobs.values())

    def _find_job(self, request: JobRequest) -> SweepJob:
        """Returns a job with its entry in the ledger. Adds the entry if the job is new."""
        entry = self._ledger.find_entry(request.identity, request.repeat)
        if entry is None:
            overrides = show_words(request.overrides)
            folder = self._choose_folder(request, self._ledger.next_number)
            entry = self._ledger.add_entry(request.identity, overrides, folder, repeat=request.repeat)
        entry.warms_up = request.turn == "warm-up"
        return SweepJob(request, entry)

    def _choose_folder(self, request: JobRequest, number: int) -> str:
        """Returns the job's folder as `hydra.sweep.subdir` names it, relative to the sweep's folder and made unique."""
        name = os.path.relpath(self._composer.name_folder(request, number), self._folder)
        used_names = {entry.folder for entry in self._ledger.entries}
        used_names.add(os.curdir)  # the sweep's own folder
        folder = name
        suffix = number
        while folder in used_names or RunFolder(self._folder / folder).events.exists():
            folder = f"{name}-{suffix}"
            suffix += 1
        return folder

    def _handle_changes(self, jobs: Sequence[SweepJob], policy: str) -> None:
        """Applies the policy `sweep.on_change` to code and data that changed since jobs of earlier commands ran."""
        configs = {job.entry.number: job.request.config for job in jobs}
        changes = self.inputs.find_changes(self._ledger.entries, configs)
        if changes and policy not in ("rerun", "keep"):
            raise ConfigError(
                f"hydra.sweep.dir={self._folder}: {describe_changes(changes)}\nuse sweep.on_change=rerun to run such "
                "jobs again, sweep.on_change=keep to keep the results of finished ones, or choose another folder"
            )
        kept = dict(changes)
        rerun: dict[int, Sequence[str]] = {}
        for job in jobs:
            number = job.entry.number
            if number in kept and (policy == "rerun" or not job.entry.is_finished):
                rerun[number] = kept.pop(number)
                job.entry.restart(self._choose_folder(job.request, number))
        note_kept_results(self._ledger.entries, kept)
        display = Display(sys.stdout)
        if rerun:
            display.print_line(f"note: {describe_changes(rerun)}: they run again")
        if kept:
            display.print_line(f"note: {describe_changes(kept)}: their results are kept")
        if rerun or kept:
            self.tags[CHANGED] = describe_changes(kept) if kept else ""

    def _check_job(self, job: SweepJob) -> ConfigError | None:
        """Checks a job, unless it has finished. Returns the error if it cannot run.

        The job is prepared again just before it runs, because a thousand prepared runs would take much memory.
        """
        entry = job.entry
        folder = self._folder / entry.folder
        if entry.status == "PRUNED" or (entry.status == "FINISHED" and is_finished(folder)):
            return None
        state = RunState.read(folder)
        if state.status == "FINISHED":
            entry.status = "FINISHED"
            return None
        try:
            refuse_others(folder)
            if job.request.refusal:
                raise ConfigError(job.request.refusal)
            plan = self._composer.prepare(job.request, folder, state.has_begun).spec.plan
        except ConfigError as refusal:
            if find_interruption(refusal):
                raise
            entry.status = "REFUSED"
            entry.reason = show_keys(str(mask_secrets(str(refusal))))
            JobDisplay(sys.stdout, entry.number).print_error(entry.reason)
            return refusal
        job.is_waiting = True
        job.is_resumed = state.has_begun
        if entry.is_finished:  # its folder is gone
            entry.status = "waiting"
        if self.plan is None:
            self.plan = plan
        if not find_engine(plan.cluster).is_remote:
            self.needs_server = True
        return None


def note_kept_results(entries: Sequence[LedgerEntry], changes: Mapping[int, Sequence[str]]) -> None:
    """Sets the reason of each finished job: the files that changed since it ran, or nothing."""
    for entry in entries:
        if entry.is_finished:
            entry.reason = f"{join_first(changes[entry.number])} since it ran" if entry.number in changes else ""


def show_ended(entries: Sequence[LedgerEntry]) -> None:
    """Prints that jobs have already ended, with one line for each of the first jobs."""
    for entry in entries[:MAX_LINES]:
        JobDisplay(sys.stdout, entry.number).print_line(f"is already {entry.status}")
    if len(entries) > MAX_LINES:
        statuses = Counter(entry.status for entry in entries[MAX_LINES:])
        counts = ", ".join(f"{count:,} more are already {status}" for status, count in statuses.items())
        Display(sys.stdout).print_line(counts)
