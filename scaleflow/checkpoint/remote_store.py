"""Checkpoints in an object store, with the files that they have on a disk.

    s3://bucket/a-run/step-00000450/
        tensors.index, tensors.data-*
        checkpoint.json                   the manifest: size and CRC-32 of each file

The manifest is uploaded last, after the other objects were read again. So a partial upload is no checkpoint.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

from scaleflow.checkpoint.store import (
    CHUNK_BYTES,
    MANIFEST,
    QUARANTINE,
    VISIBLE_SECONDS,
    DamagedCheckpoint,
    parse_manifest,
)
from scaleflow.files.object_store import call_store, connect, split_address

KEY = "checkpoint.folder"


class RemoteStore:
    """The checkpoints of one run at the address of a prefix, such as `s3://bucket/a-run`.

    Methods raise OSError, or another error of pyarrow, if the store does not answer or refuses a request; those that
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
        call_store(KEY, self.address, lambda: self.remove_probe(self._write_probe("seen")))

    def list_steps(self) -> list[int]:
        """Returns what `steps` does. Raises ConfigError if the store does not answer."""
        return call_store(KEY, self.address, self.steps)

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, the newest last."""
        return [step for step, state in self.list_states().items() if state == "complete"]

    def list_states(self) -> dict[int, Literal["complete", "incomplete", "damaged"]]:
        """Returns the state of each step that has objects, the newest last."""
        from pyarrow import fs

        # Recursive, because Google's file system lists no folders that have no object of their own.
        infos = self._system.get_file_info(fs.FileSelector(self._root, recursive=True, allow_not_found=True))
        names: dict[int, set[str]] = {}
        for info in infos:
            match = re.fullmatch(r"/step-(\d+)/([^/]+)", info.path.removeprefix(self._root))  # no folder below it
            if match and info.type == fs.FileType.File:
                names.setdefault(int(match[1]), set()).add(match[2])
        return {
            step: "complete" if MANIFEST in found else "damaged" if QUARANTINE in found else "incomplete"
            for step, found in sorted(names.items())
        }

    def read_manifest(self, step: int) -> bytes | None:
        """Returns the manifest of a checkpoint, unchecked; None if there is no such checkpoint."""
        try:
            with self._system.open_input_stream(self._path_of(step, MANIFEST)) as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def upload(self, step: int, folder: Path, manifest: bytes) -> None:
        """Uploads a checkpoint, in place of one of the same step, and verifies it.

        Args:
            step: its step.
            folder: its files.
            manifest: its manifest, which must still be that of the folder.

        Raises:
            DamagedCheckpoint: if the files differ from the manifest.
            OSError: if the store does not answer, or holds something else than was sent.
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
            if self._describe(path) != description:
                raise OSError(f"{path} was read back with other bytes than were sent")
        path = self._path_of(step, MANIFEST)
        with self._system.open_output_stream(path) as target:
            target.write(manifest)
        if self.read_manifest(step) != manifest:
            raise OSError(f"{path} was read back with other bytes than were sent")

    def _describe(self, path: str) -> dict[str, int]:
        size = check = 0
        with self._system.open_input_stream(path) as file:
            for chunk in read_pieces(file):
                size += len(chunk)
                check = zlib.crc32(chunk, check)
        return {"bytes": size, "crc32": check}

    def download(self, step: int, folder: Path) -> None:
        """Copies the files of a checkpoint to a folder, which must not exist, the manifest last.

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
        """Deletes what there is of a step, the manifest first."""
        from pyarrow import fs

        for path in (self._path_of(step, MANIFEST), self._path_of(step)):
            info = self._system.get_file_info(path)
            if info.type == fs.FileType.File:
                self._system.delete_file(path)
            elif info.type == fs.FileType.Directory:
                # Google's file system deletes the files, and then misses the marker of a folder that never had one.
                with contextlib.suppress(FileNotFoundError):
                    self._system.delete_dir(path)

    def quarantine(self, step: int) -> None:
        """Renames the manifest of a damaged checkpoint, so that its files stay but are no checkpoint any more."""
        self._system.move(self._path_of(step, MANIFEST), self._path_of(step, QUARANTINE))

    def write_probe(self) -> str:
        """Writes an object for `can_see_probe`; returns its name. Raises ConfigError if that fails."""
        return call_store(KEY, self.address, lambda: self._write_probe("seen"))

    def _write_probe(self, prefix: str) -> str:
        name = f"{prefix}-{uuid.uuid4().hex}"
        with self._system.open_output_stream(f"{self._root}/{name}") as file:
            file.write(b" ")
        with self._system.open_input_stream(f"{self._root}/{name}") as file:
            file.read()
        return name

    def can_see_probe(self, name: str) -> bool:
        """Returns whether a probe of another machine appears here within `VISIBLE_SECONDS`.

        Raises ConfigError if the store does not answer.
        """
        deadline = time.monotonic() + VISIBLE_SECONDS
        while not call_store(KEY, self.address, lambda: self._has(name)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _has(self, name: str) -> bool:
        from pyarrow import fs

        return bool(self._system.get_file_info(f"{self._root}/{name}").type == fs.FileType.File)

    def remove_probe(self, name: str) -> None:
        self._system.delete_file(f"{self._root}/{name}")


def read_pieces(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def read_local_chunks(path: Path) -> Iterator[bytes]:
    """Yields the chunks of a file. Raises DamagedCheckpoint if it cannot be read."""
    try:
        with path.open("rb") as file:
            yield from read_pieces(file)
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name}: {error.strerror}") from error
