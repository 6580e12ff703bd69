"""Decides when to save a checkpoint and which ones to keep, and writes them in a background thread."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from scaleflow.checkpoint.remote_store import KEY, RemoteStore, Uploader
from scaleflow.checkpoint.store import CheckpointStore, DamagedCheckpoint, describe_error
from scaleflow.errors import CheckpointError, ConfigError
from scaleflow.files.object_store import explain_store_error, is_store_address
from scaleflow.interfaces import Checkpoint, Snapshot
from scaleflow.interfaces.events import CheckpointSaved, Emit, Note, UploadAwaited

#: Seconds that a network file system may take to show a file from another machine.
VISIBLE_SECONDS = 5.0

#: If writing a checkpoint takes longer, a note reports it. Training continues.
NOTE_SECONDS = 60.0

#: `Condition.wait` rejects very long timeouts, so longer waits are repeated waits of this many seconds.
MAX_WAIT_SECONDS = 3600.0


class CheckpointManager:
    """Decides when to save, and saves, loads and deletes the checkpoints of one run.

    If `checkpoint.folder` is an address in an object store, the writing worker keeps checkpoints in its local folder
    and uploads them from there. A worker that does not write makes the same calls, and reads from the store.

    Args:
        has_readers: whether other workers read this worker's checkpoints.
        is_restart: whether this same command wrote the checkpoints that the run continues from.
        records: additional files of each checkpoint, by name.
    """

    def __init__(
        self,
        options: Checkpoint,
        folder: str,
        emit: Emit,
        writes: bool = True,
        has_readers: bool = False,
        is_restart: bool = False,
        records: Mapping[str, bytes] | None = None,
    ) -> None:
        self._options = options
        self._store = CheckpointStore(folder, records)
        self._emit = emit
        self._writes = writes
        self._has_readers = has_readers
        self._is_restart = is_restart
        self._best: int | None = None
        self._held: Snapshot | None = None
        self._writer = BackgroundWriter(self._write, options.write_seconds, self._store.folder)
        self._noted_write = 0.0
        self._remote = RemoteStore(options.folder) if is_store_address(options.folder) and options.folder else None
        self._uploader: Uploader | None = None
        if self._remote is not None and writes:
            self._uploader = Uploader(self._store, self._remote, options.keep, emit=emit)

    def steps_left(self, step: int) -> int | None:
        """Returns the number of steps until the next checkpoint is due; None if it cannot be known in advance."""
        every = self._options.every_steps
        return None if every is None else every - step % every

    def is_due(self, step: int, seconds: float) -> bool:
        """Returns whether a checkpoint is due within an epoch, after `step` steps, `seconds` of training after the last
        one.
        """
        options = self._options
        return (options.every_steps is not None and step % options.every_steps == 0) or (
            options.every_seconds is not None and seconds >= options.every_seconds
        )

    def is_due_after(self, epoch: int) -> bool:
        """Returns whether a checkpoint is due at the end of an epoch, counted from 1."""
        every = self._options.every_epochs
        return every is not None and epoch % every == 0

    def save(self, snapshot: Snapshot, is_best: bool = False) -> None:
        """Passes a snapshot to a background writer.

        A newer snapshot replaces one that is still waiting, except the best one: then the call waits until it is being
        written.

        Raises CheckpointError if this or an earlier snapshot could not be written.
        """
        held = self._held
        self._held = None
        if is_best:
            self._best = snapshot.step
        elif held is not None and held.step != snapshot.step:
            self.save(held, is_best=True)
        if self._writes and self._options.name != "none":
            self._writer.put(snapshot, replaceable=not is_best)
            self._report_slow_writing()

    def hold(self, snapshot: Snapshot) -> None:
        """Keeps the best snapshot in memory, and writes it before the next snapshot that is saved.

        So a run with epochs shorter than the time to write a checkpoint writes only the ones that are due. If no other
        checkpoint will be due, the snapshot is saved at once.
        """
        options = self._options
        if options.every_epochs is options.every_steps is options.every_seconds is None:
            self.save(snapshot, is_best=True)
        else:
            self._best = snapshot.step
            self._held = snapshot

    def _report_slow_writing(self) -> None:
        """Emits one note per checkpoint that takes longer than `NOTE_SECONDS` to write."""
        began = self._writer.began
        if began is None or began == self._noted_write or time.monotonic() - began < NOTE_SECONDS:
            return
        self._noted_write = began
        self._emit(
            Note(
                f"writing a checkpoint to {self._store.folder} has taken {time.monotonic() - began:.0f} s so far; "
                "training continues, but no newer one is written before it is done"
            )
        )

    def wait(self) -> None:
        """Waits until everything is written. Raises CheckpointError like `save`."""
        self._writer.wait()

    def publish(self) -> None:
        """Waits until all workers can read the saved checkpoints, or emits a note if that takes too long.

        Only the writing worker's call has an effect.
        """
        if self._uploader is None or not self._has_readers:
            return
        self._uploader.request()
        self._emit(UploadAwaited(self._options.write_seconds))
        failure = self._uploader.wait(self._options.write_seconds)
        if failure:
            self._emit(Note(f"{KEY}={self._options.folder}: the other workers cannot read the checkpoints: {failure}"))

    def finish(self) -> None:
        """Waits, at the end of the run, until all checkpoints are in their final place. Emits a
        note if one is missing.
        """
        if self._remote is not None and not self._writes:  # this process must outlive the uploading worker
            self._emit(UploadAwaited(self._options.write_seconds))
        if self._uploader is None or self._uploader.is_done:
            return
        self._emit(UploadAwaited(self._options.write_seconds))
        failure = self._uploader.wait(self._options.write_seconds)
        self._emit(UploadAwaited(0.0))
        if failure and (missing := self._uploader.list_missing()):
            steps = f"step{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            self._emit(
                Note(
                    f"{self._options.folder} does not have the checkpoint of {steps}: {failure}; it stays in "
                    f"{self._store.folder}, and a resumed run uploads it, if this one is not finished"
                )
            )

    def load_best(self) -> Snapshot | None:
        """Returns the best saved snapshot; None if it does not exist, or if it is damaged (with a note)."""
        if self._best is None:
            return None
        try:
            return self._read(self._best)
        except DamagedCheckpoint as error:
            self._emit(Note(f"the best checkpoint, at step {self._best}, is damaged ({error})"))
        except ConfigError as error:  # the object store does not answer
            self._emit(Note(f"the best checkpoint, at step {self._best}, cannot be read: {error}"))
        return None

    def check_empty(self) -> None:
        """Raises ConfigError if `checkpoint.folder` contains another run's checkpoints, to keep the runs apart."""
        if self._options.folder is None or not self._writes:
            return
        steps = self._store.steps() if self._remote is None else self._remote.list_steps()
        if steps:
            raise ConfigError(
                f"{KEY}={self._options.folder}: contains checkpoints of another run, up to step "
                f"{steps[-1]}; continue that run with resume=RUN, or choose another folder"
            )

    def check_writable(self) -> None:
        """Raises ConfigError if `checkpoint.folder` cannot be written."""
        if self._options.folder is None or not self._writes or self._options.name == "none":
            return
        if self._remote is not None:
            self._remote.check_writable()
            return
        try:
            self._store.check_writable()
        except (tf.errors.OpError, OSError) as error:
            raise ConfigError(
                f"{KEY}={self._options.folder}: cannot be written ({describe_error(error)}); choose another folder"
            ) from error

    def is_shared(self, from_chief: Callable[[Callable[[], str]], str], by_all: Callable[[bool], bool]) -> bool:
        """Returns whether every worker sees the chief's files. All workers must call it.

        The arguments are `WorkerSync.from_chief` and `WorkerSync.all`.
        """
        if self._options.name == "none":
            return True
        store = self._store if self._remote is None else self._remote
        name = from_chief(store.write_probe)
        deadline = time.monotonic() + VISIBLE_SECONDS
        while not (is_here := store.has_probe(name)) and time.monotonic() <= deadline:
            time.sleep(0.1)
        is_seen = by_all(is_here)
        if self._writes:
            store.remove_probe(name)
        return is_seen

    def drop_from(self, step: int) -> None:
        """Deletes the checkpoints at `step` and later, because the run continues from an earlier one."""
        if self._held is not None and self._held.step >= step:
            self._held = None
        for later in [saved for saved in self._store.steps() if saved >= step] if self._writes else []:
            self._store.delete(later)
        if self._uploader is not None:
            self._uploader.drop_from(step)

    def load_newest(self, before: int | None = None) -> Snapshot | None:
        """Loads the newest undamaged checkpoint (before a step), or None.

        A damaged checkpoint is marked as unusable, and a note says so. The loaded checkpoint also determines which one
        is the best. If this command wrote checkpoints to the local folder, they are the newest, and an object store is
        not asked for others. Otherwise ConfigError is raised if the store does not answer.
        """
        for step in reversed(self._list_steps(before)):
            try:
                snapshot = self._read(step)
            except DamagedCheckpoint as error:
                self._emit(Note(f"the checkpoint at step {step} is damaged ({error}); the previous one is used"))
                self._quarantine(step)
                continue
            self._best = snapshot.host["best"]["step"]
            if self._uploader is not None:
                self._uploader.request()  # uploads checkpoints that the last command could not upload
            return snapshot
        return None

    def _list_steps(self, before: int | None) -> list[int]:
        """Returns the steps (before a step) that this worker can load, the newest last."""
        local = self._store.steps() if self._remote is None or self._writes else []
        local = [step for step in local if before is None or step < before]
        is_newest = local and (before is not None or self._is_restart)  # this command wrote them
        if self._remote is None or is_newest:
            return local
        return sorted({*local, *(step for step in self._remote.list_steps() if before is None or step < before)})

    def _read(self, step: int) -> Snapshot:
        """Reads a checkpoint from the local folder, or from the object store if the folder has no undamaged one."""
        is_local = self._writes and step in self._store.steps()
        if self._remote is None:
            return self._store.read(step)
        if is_local:
            try:
                return self._store.read(step)
            except DamagedCheckpoint:
                if step not in self._remote.list_steps():
                    raise
        try:
            if self._writes:
                self._store.delete(step)
                self._remote.download(step, Path(self._store.path_of(step)))
                return self._store.read(step)
            beside = Path(self._store.folder).parent
            beside.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".checkpoint-", dir=beside) as folder:
                store = CheckpointStore(folder)
                self._remote.download(step, Path(store.path_of(step)))
                return store.read(step)
        except (DamagedCheckpoint, ConfigError):
            raise
        except Exception as error:  # pyarrow's errors have no common class
            reason = explain_store_error(error)
            raise ConfigError(
                f"{KEY}={self._options.folder}: the checkpoint at step {step} cannot be read: {reason}"
            ) from error

    def _quarantine(self, step: int) -> None:
        """Marks a damaged checkpoint as unusable, in the folder and in the object store."""
        if not self._writes:
            return
        if self._remote is None or step in self._store.steps():
            self._store.quarantine(step)
        if self._remote is not None and step in self._remote.list_steps():
            self._remote.quarantine(step)

    def _write(self, snapshot: Snapshot) -> None:
        """Writes a checkpoint, and deletes old ones beyond `checkpoint.keep`, except the best."""
        path = self._store.write(snapshot)
        self._emit(CheckpointSaved(step=snapshot.step, path=path))
        # Not `self._best`, which may not be written yet: until then the previous best one must stay.
        best = snapshot.host["best"]["step"]
        others = [step for step in self._store.steps() if step != snapshot.step]
        for step in others[: max(0, len(others) + 1 - self._options.keep)]:
            if step != best and not (self._uploader and self._uploader.step == step):
                self._store.delete(step)
        if self._uploader is not None:
            self._uploader.request()


class BackgroundWriter:
    """A thread that writes one item at a time. During a write, a newer item replaces the waiting one.

    `put` and `wait` raise CheckpointError if writing an item to the folder `place` takes more than `patience` seconds.

    Attributes:
        began: when the current write began, by `time.monotonic`; None if nothing is being written.
    """

    def __init__(self, write: Callable[[Any], None], patience: float = float("inf"), place: str = "") -> None:
        self._write = write
        self._patience = patience
        self._place = place
        self.began: float | None = None
        self._changed = threading.Condition()
        self._waiting: tuple[Any, bool] | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def put(self, item: Any, replaceable: bool = True) -> None:
        """Passes the next item, which must not change afterwards. If it is `replaceable`, a newer item may replace it.

        Raises CheckpointError if an earlier item could not be written.
        """
        with self._changed:
            self._wait_for(lambda: self._waiting is None or self._waiting[1])
            self._waiting = item, replaceable
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self) -> None:
        """Waits until all items are written. Raises the errors of `put`."""
        with self._changed:
            self._wait_for(lambda: self._waiting is None and self.began is None)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition while the lock is held. Raises the errors of `put`."""
        while self._error is None and not condition():
            remaining = None if self.began is None else self.began + self._patience - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise CheckpointError(
                    f"a checkpoint was not written within checkpoint.write_seconds={self._patience:g}: {self._place} "
                    "does not answer; earlier checkpoints are unchanged"
                )
            self._changed.wait(MAX_WAIT_SECONDS if remaining is None else min(remaining, MAX_WAIT_SECONDS))
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while self._error is None:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                assert self._waiting is not None
                item, _ = self._waiting
                self._waiting = None
                self.began = time.monotonic()
                self._changed.notify_all()
            error: CheckpointError | None = None
            try:
                self._write(item)
            except CheckpointError as raised:
                error = raised
            except Exception as raised:
                error = CheckpointError(f"a checkpoint could not be written: {type(raised).__name__}: {raised}")
                error.__cause__ = raised
            del item  # otherwise it would stay in memory until the next one
            with self._changed:
                self._error = error
                self.began = None
                self._changed.notify_all()
