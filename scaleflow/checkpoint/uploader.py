"""Uploads checkpoints to an object store in a background thread, and deletes old ones there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from scaleflow.checkpoint.remote_store import RemoteStore
from scaleflow.checkpoint.store import CheckpointStore, DamagedCheckpoint, parse_manifest
from scaleflow.files.object_store import explain_store_error
from scaleflow.interfaces.events import Emit, Note

#: Seconds until the first and between later attempts after the store has failed. While somebody waits: the first.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0


def choose_kept(steps: Collection[int], keep: int, best: int | None) -> set[int]:
    """Returns the steps whose checkpoints are kept: the newest, and the best."""
    return {*sorted(steps)[-keep:], *(step for step in steps if step == best)}


class Uploader:
    """A thread that brings an object store to the state of the run's local folder, one checkpoint after the other.

    A step that is no longer kept when its turn comes is not uploaded. The best checkpoint is uploaded first, then the
    newest, then the others. So the store always has the best one that the newest one there names. If the store fails,
    a note says so, and the thread tries again until it succeeds.

    Args:
        local: the folder. The thread only reads it.
        remote: the object store.
        keep: the number of newest checkpoints to keep.
        emit: receives the notes.

    Attributes:
        step: the step of the checkpoint that is being uploaded, whose files must stay; None if there is none.
    """

    def __init__(self, local: CheckpointStore, remote: RemoteStore, keep: int, emit: Emit) -> None:
        self._local = local
        self._remote = remote
        self._keep = keep
        self._emit = emit
        self.step: int | None = None
        self._uploaded: dict[int, bytes | None] = {}  # the manifests that the store has
        self._unusable: dict[int, bytes] = {}  # the manifests of damaged local checkpoints
        self._dropped: int | None = None  # checkpoints in the store at this step and later are of no use
        self._requests = self._served = 0
        self._failure = ""
        self._is_hurried = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def request(self) -> None:
        """Tells the thread that the folder has changed."""
        with self._changed:
            self._requests += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drop_from(self, step: int) -> None:
        """Has the checkpoints at `step` and later deleted that the store has now and the folder does not have."""
        with self._changed:
            self._dropped = step if self._dropped is None else min(step, self._dropped)
        self.request()

    @property
    def is_done(self) -> bool:
        """Whether the store has what the folder had at the last request."""
        return self._served == self._requests

    def wait(self, seconds: float) -> str:
        """Waits until the store has what the folder has. Returns why not, if it has not after `seconds`; else ""."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()
            is_done = self._changed.wait_for(lambda: self.is_done, min(seconds, threading.TIMEOUT_MAX))
            self._is_hurried = False
            return "" if is_done else self._failure or f"the upload took more than {seconds:g} s"

    def list_missing(self) -> list[int]:
        """Returns the steps of the checkpoints that the store should have, and is not known to have."""
        return sorted(step for step, _ in self._find_missing(list(self._uploaded)))

    def _work(self) -> None:
        pause = FIRST_PAUSE
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self.is_done)
                request = self._requests
            failure = self._try()
            with self._changed:
                if not failure:
                    self._served = request
                has_ended = bool(self._failure) and not failure
                has_begun = bool(failure) and not self._failure
                self._failure = failure
                self._changed.notify_all()
            if has_begun or has_ended:
                self._note_outage(failure)
            pause = self._pause(pause) if failure else FIRST_PAUSE

    def _try(self) -> str:
        """Makes one attempt; returns why it failed, or ""."""
        try:
            self._synchronize()
        except Exception as error:  # pyarrow's errors have no common class
            return explain_store_error(error)
        return ""

    def _note_outage(self, failure: str) -> None:
        text = (
            f"checkpoints cannot be uploaded to {self._remote.address}: {failure}; training continues, they stay in "
            f"{self._local.folder}, and the upload is tried again"
            if failure
            else f"{self._remote.address} has the checkpoints again"
        )
        with contextlib.suppress(OSError):  # the disk of the events is full, which the next event reports
            self._emit(Note(text))

    def _pause(self, seconds: float) -> float:
        """Waits after a failure; returns the next pause."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._changed:
                is_hurried = self._changed.wait_for(lambda: self._is_hurried, end - time.monotonic())
            if is_hurried:
                time.sleep(min(FIRST_PAUSE, max(0.0, end - time.monotonic())))
                return FIRST_PAUSE
        return min(2 * seconds, LONGEST_PAUSE)

    def _synchronize(self) -> None:
        """Uploads what is missing and deletes what is not kept, until nothing is left to do."""
        self._delete_dropped()
        while True:
            states = self._remote.list_states()
            complete = [step for step, state in states.items() if state == "complete"]
            self._uploaded = {step: self._uploaded.get(step) or self._remote.read_manifest(step) for step in complete}
            missing = self._find_missing(complete)
            kept = choose_kept(complete, self._keep, self._find_best(self._uploaded))
            for step, state in states.items():
                if step not in kept and state != "damaged":
                    self._remote.delete(step)
            if not missing:
                return
            self._upload(*missing[0])

    def _delete_dropped(self) -> None:
        with self._changed:
            first = self._dropped
        if first is None:
            return
        for step in self._remote.list_states():
            if step >= first:
                self._remote.delete(step)
        self._uploaded = {step: manifest for step, manifest in self._uploaded.items() if step < first}
        with self._changed:
            if self._dropped == first:
                self._dropped = None

    def _find_missing(self, complete: Iterable[int]) -> list[tuple[int, bytes]]:
        """Returns the step and the manifest of each checkpoint to upload, in the order of the uploads."""
        local = self._read_local()
        best = self._find_best(local)
        wanted = choose_kept({*complete, *local}, self._keep, best) | set(sorted(local)[-1:])
        missing = [
            (step, manifest)
            for step, manifest in local.items()
            if step in wanted and manifest not in (self._uploaded.get(step), self._unusable.get(step))
        ]
        return sorted(missing, key=lambda item: (item[0] != best, -item[0]))

    def _read_local(self) -> dict[int, bytes]:
        manifests = {step: self._local.read_manifest(step) for step in self._local.steps()}
        return {step: manifest for step, manifest in manifests.items() if manifest is not None}

    @staticmethod
    def _find_best(manifests: dict[int, bytes] | dict[int, bytes | None]) -> int | None:
        """Returns the best step, by the newest of some checkpoints whose manifest is sound."""
        for step in sorted(manifests, reverse=True):
            with contextlib.suppress(DamagedCheckpoint):
                best = (parse_manifest(manifests[step] or b"")["host"].get("best") or {}).get("step")
                return None if best is None else int(best)
        return None

    def _upload(self, step: int, manifest: bytes) -> None:
        """Uploads one checkpoint, unless its files are gone or were replaced meanwhile."""
        self.step = step
        try:
            self._remote.upload(step, Path(self._local.path_of(step)), manifest)
            self._uploaded[step] = manifest
        except DamagedCheckpoint as error:
            if self._local.read_manifest(step) == manifest:
                self._unusable[step] = manifest
                self._emit(Note(f"the checkpoint at step {step} is damaged ({error}), so it is not uploaded"))
        finally:
            self.step = None
