"""Checkpoints in an object store, with the same files as on a disk. A thread uploads and deletes them.

    s3://bucket/a-run/step-00000450/
        tensors.index, tensors.data-*
        checkpoint.json                   the manifest: size and CRC-32 of each file

The manifest is uploaded last, after the other objects were read back. So a partial upload is not a checkpoint.
"""

import contextlib
import re
import threading
import time
import uuid
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from scaleflow.checkpoint.store import (
    MANIFEST,
    QUARANTINE,
    CheckpointStore,
    DamagedCheckpoint,
    describe_pieces,
    parse_manifest,
    read_pieces,
)
from scaleflow.files.object_store import call_store, connect, explain_store_error, split_address
from scaleflow.interfaces.events import Emit, Note

KEY = "checkpoint.folder"


class RemoteStore:
    """The checkpoints of one run at a prefix of an object store, such as `s3://bucket/a-run`.

    Methods raise OSError, or another error of pyarrow, if the store does not answer or refuses a request. Methods that
    raise ConfigError instead say so.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._scheme, self._root = split_address(KEY, address)

    @property
    def _system(self) -> Any:
        return connect(self._scheme)

    def _path_of(self, step: int, name: str = "") -> str:
        return f"{self._root}/step-{step:08d}{name and '/'}{name}"

    def check_writable(self) -> None:
        """Writes an object, reads it and deletes it. Raises ConfigError if that fails, or takes a minute."""
        call_store(KEY, self.address, lambda: self.remove_probe(self._write_probe()))

    def list_steps(self) -> list[int]:
        """Returns the same as `steps`. Raises ConfigError if the store does not answer."""
        return call_store(KEY, self.address, self.steps)

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, the newest last."""
        return [step for step, state in self.list_states().items() if state == "complete"]

    def list_states(self) -> dict[int, Literal["complete", "incomplete", "damaged"]]:
        """Returns the state of each step that has objects, the newest last."""
        from pyarrow import fs

        # Recursive, because Google's file system does not list folders without their own object.
        infos = self._system.get_file_info(fs.FileSelector(self._root, recursive=True, allow_not_found=True))
        names: dict[int, set[str]] = {}
        for info in infos:
            # Files in deeper folders are ignored.
            match = re.fullmatch(r"/step-(\d+)/([^/]+)", info.path.removeprefix(self._root))
            if match and info.type == fs.FileType.File:
                names.setdefault(int(match[1]), set()).add(match[2])
        states: dict[int, Literal["complete", "incomplete", "damaged"]] = {}
        for step, object_names in sorted(names.items()):
            if MANIFEST in object_names:
                states[step] = "complete"
            else:
                states[step] = "damaged" if QUARANTINE in object_names else "incomplete"
        return states

    def read_manifest(self, step: int) -> bytes | None:
        """Returns the manifest of a checkpoint, unchecked; None if there is no such checkpoint."""
        try:
            with self._system.open_input_stream(self._path_of(step, MANIFEST)) as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def upload(self, step: int, folder: Path, manifest: bytes) -> None:
        """Uploads a checkpoint, replaces one of the same step, and verifies it.

        Args:
            manifest: the checkpoint's manifest, which must still match the folder.

        Raises:
            DamagedCheckpoint: if the files differ from the manifest.
            OSError: if the store does not answer, or returns other bytes than were sent.
        """
        files = parse_manifest(manifest)["files"]  # checked before the copy in the store is deleted
        self.delete(step)
        for name, description in files.items():
            path = self._path_of(step, name)
            sent = {"bytes": 0, "crc32": 0}
            with self._system.open_output_stream(path) as target:
                for chunk in read_local_chunks(folder / name):
                    target.write(chunk)
                    sent = {"bytes": sent["bytes"] + len(chunk), "crc32": zlib.crc32(chunk, sent["crc32"])}
            if sent != description:
                raise DamagedCheckpoint(f"{name} has changed since it was written")
            with self._system.open_input_stream(path) as file:
                if describe_pieces(read_pieces(file)) != description:
                    raise OSError(f"{path} was read back with other bytes than were sent")
        path = self._path_of(step, MANIFEST)
        with self._system.open_output_stream(path) as target:
            target.write(manifest)
        if self.read_manifest(step) != manifest:
            raise OSError(f"{path} was read back with other bytes than were sent")

    def download(self, step: int, folder: Path) -> None:
        """Copies the files of a checkpoint to a new folder, the manifest last.

        `CheckpointStore.read` verifies them. Raises DamagedCheckpoint if there is no such checkpoint.
        """
        from pyarrow import fs

        manifest = self.read_manifest(step)
        if manifest is None:
            raise DamagedCheckpoint(f"{self.address} does not have it")
        folder.mkdir(parents=True)
        for info in self._system.get_file_info(fs.FileSelector(self._path_of(step))):
            if info.type == fs.FileType.File and info.base_name != MANIFEST:
                with self._system.open_input_stream(info.path) as source, (folder / info.base_name).open("wb") as file:
                    for chunk in read_pieces(source):
                        file.write(chunk)
        (folder / MANIFEST).write_bytes(manifest)

    def delete(self, step: int) -> None:
        """Deletes all objects of a step, the manifest first."""
        from pyarrow import fs

        for path in (self._path_of(step, MANIFEST), self._path_of(step)):
            info = self._system.get_file_info(path)
            if info.type == fs.FileType.File:
                self._system.delete_file(path)
            elif info.type == fs.FileType.Directory:
                # Google's file system deletes the files, and then reports a missing folder marker if there never was
                # one.
                with contextlib.suppress(FileNotFoundError):
                    self._system.delete_dir(path)

    def quarantine(self, step: int) -> None:
        """Renames the manifest of a damaged checkpoint. Its files stay, but no longer count as a checkpoint."""
        self._system.move(self._path_of(step, MANIFEST), self._path_of(step, QUARANTINE))

    def write_probe(self) -> str:
        """Writes an object for `has_probe`, and returns its name. Raises ConfigError if that fails."""
        return call_store(KEY, self.address, self._write_probe)

    def _write_probe(self) -> str:
        name = f"seen-{uuid.uuid4().hex}"
        with self._system.open_output_stream(f"{self._root}/{name}") as file:
            file.write(b" ")
        with self._system.open_input_stream(f"{self._root}/{name}") as file:
            file.read()
        return name

    def has_probe(self, name: str) -> bool:
        """Returns whether a probe is visible here. Raises ConfigError if the store does not answer."""
        from pyarrow import fs

        info = call_store(KEY, self.address, lambda: self._system.get_file_info(f"{self._root}/{name}"))
        return bool(info.type == fs.FileType.File)

    def remove_probe(self, name: str) -> None:
        self._system.delete_file(f"{self._root}/{name}")


def read_local_chunks(path: Path) -> Iterator[bytes]:
    """Yields the chunks of a file. Raises DamagedCheckpoint if it cannot be read."""
    try:
        with path.open("rb") as file:
            yield from read_pieces(file)
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name}: {error.strerror}") from error


#: Seconds between attempts after the store has failed: the first pause, and the longest. While somebody waits, the
#: first pause is used.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0


def choose_kept(steps: Collection[int], keep: int, best: int | None) -> set[int]:
    """Returns the steps whose checkpoints are kept: the newest, and the best."""
    return {*sorted(steps)[-keep:], *(step for step in steps if step == best)}


class Uploader:
    """A thread that brings an object store to the state of the run's local folder, one checkpoint after another.

    A step that is no longer kept when its turn comes is not uploaded. The best checkpoint is uploaded first, then the
    newest, then the others. So the store always has the best checkpoint that its newest one names. If the store fails,
    a note reports it, and the thread retries until it succeeds.

    Args:
        local: the folder. The thread only reads it.

    Attributes:
        step: the step of the checkpoint that is being uploaded, whose files must stay; None if nothing is being
            uploaded.
    """

    def __init__(self, local: CheckpointStore, remote: RemoteStore, keep: int, emit: Emit) -> None:
        self._local = local
        self._remote = remote
        self._keep = keep
        self._emit = emit
        self.step: int | None = None
        self._uploaded: dict[int, bytes | None] = {}  # the manifests that the store has
        self._unusable: dict[int, bytes] = {}  # the manifests of damaged local checkpoints
        self._dropped: int | None = None  # checkpoints in the store at this step and later are useless
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
        """Requests the deletion of checkpoints at `step` and later that are now in the store and not in the folder."""
        with self._changed:
            self._dropped = step if self._dropped is None else min(step, self._dropped)
        self.request()

    @property
    def is_done(self) -> bool:
        """Whether the store has all checkpoints of the folder at the last request."""
        return self._served == self._requests

    def wait(self, seconds: float) -> str:
        """Waits until the store has the folder's checkpoints. Returns "", or after `seconds` the reason for the
        failure.
        """
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()
            is_done = self._changed.wait_for(lambda: self.is_done, min(seconds, threading.TIMEOUT_MAX))
            self._is_hurried = False
            return "" if is_done else self._failure or f"the upload took more than {seconds:g} s"

    def list_missing(self) -> list[int]:
        """Returns the steps of checkpoints that the store should have but is not known to have."""
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
        """Makes one attempt. Returns why it failed, or ""."""
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
        with contextlib.suppress(OSError):  # if the events' disk is full, the next event reports it
            self._emit(Note(text))

    def _pause(self, seconds: float) -> float:
        """Waits after a failure. Returns the next pause."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._changed:
                is_hurried = self._changed.wait_for(lambda: self._is_hurried, end - time.monotonic())
            if is_hurried:
                time.sleep(min(FIRST_PAUSE, max(0.0, end - time.monotonic())))
                return FIRST_PAUSE
        return min(2 * seconds, LONGEST_PAUSE)

    def _synchronize(self) -> None:
        """Uploads missing checkpoints and deletes those that are not kept, until nothing is left to do."""
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
        """Returns the step and the manifest of each checkpoint to upload, in the order of uploads."""
        manifests = {step: self._local.read_manifest(step) for step in self._local.steps()}
        local = {step: manifest for step, manifest in manifests.items() if manifest is not None}
        best = self._find_best(local)
        wanted = choose_kept({*complete, *local}, self._keep, best) | set(sorted(local)[-1:])
        missing = [
            (step, manifest)
            for step, manifest in local.items()
            if step in wanted and manifest not in (self._uploaded.get(step), self._unusable.get(step))
        ]
        return sorted(missing, key=lambda item: (item[0] != best, -item[0]))

    @staticmethod
    def _find_best(manifests: dict[int, bytes] | dict[int, bytes | None]) -> int | None:
        """Returns the best step according to the newest checkpoint with a valid manifest."""
        for step in sorted(manifests, reverse=True):
            with contextlib.suppress(DamagedCheckpoint):
                best = parse_manifest(manifests[step] or b"")["host"]["best"]["step"]
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
