"""When a checkpoint is due, which ones are kept, and the thread that writes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from scaleflow.checkpoint.store import CheckpointStore, DamagedCheckpoint
from scaleflow.errors import CheckpointError, ConfigError
from scaleflow.interfaces import Checkpoint, Emit, Snapshot

#: A run goes on while a checkpoint is written; when that takes so long, it says so.
SECONDS_TO_NOTE = 60.0

#: A wait without an end is divided into such ones.
LONGEST_WAIT = 3600.0


class CheckpointManager:
    """Keeps the checkpoints of one run.

    Args:
        options: what the config says.
        folder: where they are.
        emit: told of each one that is written.
        writes: whether it is this worker that writes them; the others take part in all decisions.
    """

    def __init__(self, options: Checkpoint, folder: str, emit: Emit, writes: bool = True) -> None:
        self._options = options
        self._store = CheckpointStore(folder)
        self._emit = emit
        self._writes = writes
        self._best: int | None = None
        self._writer = BackgroundWriter(self._write, options.write_seconds, self._store.folder)
        self._noted = 0.0

    # When ------------------------------------------------------------------------------------

    def steps_left(self, step: int) -> int | None:
        every = self._options.every_steps
        return None if every is None else every - step % every

    def is_due(self, step: int, seconds: float) -> bool:
        options = self._options
        return (options.every_steps is not None and step % options.every_steps == 0) or (
            options.every_seconds is not None and seconds >= options.every_seconds
        )

    def is_due_after(self, epoch: int) -> bool:
        every = self._options.every_epochs
        return every is not None and epoch % every == 0

    # What ------------------------------------------------------------------------------------

    def save(self, snapshot: Snapshot, is_best: bool = False) -> None:
        if is_best:
            self._best = snapshot.step
        if self._writes and self._options.name != "none":
            self._writer.put(snapshot, replaceable=not is_best)
            self._report_slow_writing()

    def _report_slow_writing(self) -> None:
        """Says once of each that is not written soon that there will be no newer one before it is."""
        began = self._writer.began
        if began is None or began == self._noted or time.monotonic() - began < SECONDS_TO_NOTE:
            return
        self._noted = began
        self._emit(
            "note",
            text=f"a checkpoint has been being written to {self._store.folder} for {time.monotonic() - began:.0f} s; "
            "training goes on, without newer ones until that is done",
        )

    def wait(self) -> None:
        self._writer.wait()

    def load_best(self) -> Snapshot | None:
        if self._best is None:
            return None
        try:
            return self._store.read(self._best)
        except DamagedCheckpoint as error:
            self._emit("note", text=f"the best checkpoint, at step {self._best}, is damaged ({error})")
            return None

    def check_empty(self) -> None:
        """Refuses a folder in which another run's checkpoints are: this one's would be taken for those."""
        steps = self._store.steps() if self._options.folder is not None and self._writes else []
        if steps:
            raise ConfigError(
                f"checkpoint.folder={self._options.folder}: holds checkpoints of another run, up to step {steps[-1]}; "
                "go on with that one by resume=RUN, or name a folder of this run's own"
            )

    def check_writable(self) -> None:
        """Refuses a folder of the user's that can't be written."""
        if self._options.folder is None or not self._writes or self._options.name == "none":
            return
        try:
            self._store.check_writable()
        except (tf.errors.OpError, OSError) as error:
            said = str(getattr(error, "message", None) or getattr(error, "strerror", None) or error).splitlines()[0]
            is_unknown = isinstance(error, tf.errors.UnimplementedError)
            way_out = (
                "TensorFlow opens paths and gs://; mount another store as a path" if is_unknown else "choose another"
            )
            raise ConfigError(
                f"checkpoint.folder={self._options.folder}: cannot be written ({said}); {way_out}"
            ) from error

    def is_shared(self, from_chief: Callable[[Callable[[], str]], str], by_all: Callable[[bool], bool]) -> bool:
        """Whether every worker sees what the chief writes; all have to call it.

        Args:
            from_chief: gives every worker what the chief makes.
            by_all: whether every worker has found so.
        """
        if self._options.name == "none":
            return True
        name = from_chief(self._store.write_probe)
        is_seen = by_all(self._store.can_see_probe(name))
        if self._writes:
            self._store.remove_probe(name)
        return is_seen

    def drop_from(self, step: int) -> None:
        for later in [saved for saved in self._store.steps() if saved >= step] if self._writes else []:
            self._store.delete(later)

    def load_newest(self, before: int | None = None) -> Snapshot | None:
        """The newest one that is undamaged, or None; a note tells of those that are damaged.

        The best one among those that are kept is from then on the one that this one says.
        """
        for step in reversed([saved for saved in self._store.steps() if before is None or saved < before]):
            try:
                found = self._store.read(step)
            except DamagedCheckpoint as error:
                self._emit(
                    "note", text=f"the checkpoint at step {step} is damaged ({error}); the one before it is used"
                )
                if self._writes:
                    self._store.quarantine(step)
                continue
            self._best = (found.host.get("best") or {}).get("step")
            return found
        return None

    def _write(self, snapshot: Snapshot) -> None:
        """Writes one, and drops those that it makes superfluous."""
        place = self._store.write(snapshot)
        self._emit("checkpoint", step=snapshot.step, path=place)
        best = (snapshot.host.get("best") or {}).get("step")  # a better one may be waiting, and is not written yet
        others = [step for step in self._store.steps() if step != snapshot.step]
        for step in others[: max(0, len(others) + 1 - self._options.keep)]:
            if step != best:
                self._store.delete(step)


class BackgroundWriter:
    """A thread that writes one thing after another, and only the newest of those that wait.

    Args:
        write: what it does with each.
        patience: how long one may take, in seconds, before nobody waits for it any more.
        place: where they are written.

    Attributes:
        began: when it began with what it is writing, by `time.monotonic`; None where it writes nothing.
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
        """Gives it the next thing to write.

        Args:
            item: what is written; nobody may change it any more.
            replaceable: whether a newer one may take its place while it waits.

        Raises:
            Exception: what came of an earlier one.
        """
        with self._changed:
            self._wait_for(lambda: self._waiting is None or self._waiting[1])
            self._waiting = item, replaceable
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self) -> None:
        """Until all is written; raises what came of it."""
        with self._changed:
            self._wait_for(lambda: self._waiting is None and self.began is None)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits, as long as what is being written may still be; the lock is held.

        Raises:
            Exception: what came of something that was written, or that it takes too long.
        """
        while self._error is None and not condition():
            left = None if self.began is None else self.began + self._patience - time.monotonic()
            if left is not None and left <= 0:
                raise CheckpointError(
                    f"a checkpoint was not written within checkpoint.write_seconds={self._patience:g}: "
                    f"{self._place} does not answer; those before it are as they were"
                )
            self._changed.wait(LONGEST_WAIT if left is None else min(left, LONGEST_WAIT))
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        for item in self._items():
            try:
                self._write(item)
            except Exception as error:
                with self._changed:
                    self._error = error if isinstance(error, CheckpointError) else to_checkpoint_error(error)
                    self.began = None
                    self._changed.notify_all()
                return

    def _items(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self.began = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting is not None)
                assert self._waiting is not None
                item, _ = self._waiting
                self._waiting = None
                self.began = time.monotonic()
                self._changed.notify_all()
            yield item


def to_checkpoint_error(error: Exception) -> CheckpointError:
    """An error that nobody foresaw, as one of ours."""
    made = CheckpointError(f"a checkpoint could not be written: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made
