"""Checkpoints as files: TensorFlow's own format for the tensors, JSON for the rest.

    checkpoints/step-00000450/
        tensors.index, tensors.data-...   readable by `tf.train.load_checkpoint(".../tensors")`
        checkpoint.json                   what is here, each file's size and CRC-32, the host's state, its own CRC-32

`checkpoint.json` is written last, when all else was written and read again. A folder without it, or whose files are not
what it says, does not count: so nothing has to be renamed, which an object store can't do at once.
"""

from __future__ import annotations

import json
import re
import time
import uuid
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.errors import CheckpointError
from scaleflow.interfaces import Snapshot

FORMAT = 2
TENSORS = "tensors"
MANIFEST = "checkpoint.json"
CHECK = "crc32"
QUARANTINE = "damaged.json"
PROBE = "can-be-written"
CHUNK_BYTES = 1 << 22

#: How long a network's file system may hide what another machine has written.
SECONDS_TO_SEE = 5.0


class DamagedCheckpoint(Exception):
    """A checkpoint that is not what was written; the message says in which way."""


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: anything that `tf.io.gfile` opens; made when it is first written to.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder.rstrip("/")
        self._is_new = False

    def path_of(self, step: int) -> str:
        return f"{self.folder}/step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint, the newest last."""
        return [step for step in self._list_folders() if tf.io.gfile.exists(f"{self.path_of(step)}/{MANIFEST}")]

    def _list_folders(self) -> list[int]:
        """The steps of which there is a folder."""
        try:
            names = tf.io.gfile.listdir(self.folder)
        except tf.errors.NotFoundError:
            return []
        found = (re.fullmatch(r"step-(\d+)", name.rstrip("/")) for name in names)
        return sorted(int(match[1]) for match in found if match)

    def check_writable(self) -> None:
        """Writes a file and takes it away again; raises what comes of it."""
        tf.io.gfile.makedirs(self.folder)
        with tf.io.gfile.GFile(f"{self.folder}/{PROBE}", "w") as file:
            file.write(" ")
        tf.io.gfile.remove(f"{self.folder}/{PROBE}")

    def write_probe(self) -> str:
        """Leaves a file that others may look for; gives its name."""
        name = f"seen-{uuid.uuid4().hex}"
        self._is_new = not tf.io.gfile.exists(self.folder)
        tf.io.gfile.makedirs(self.folder)
        with tf.io.gfile.GFile(f"{self.folder}/{name}", "w") as file:
            file.write(" ")
        return name

    def can_see_probe(self, name: str) -> bool:
        """Whether a file that another machine has left comes to be seen here."""
        deadline = time.monotonic() + SECONDS_TO_SEE
        while not tf.io.gfile.exists(f"{self.folder}/{name}"):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def remove_probe(self, name: str) -> None:
        """Takes away what `write_probe` has left."""
        tf.io.gfile.remove(f"{self.folder}/{name}")
        if self._is_new:
            tf.io.gfile.rmtree(self.folder)

    def write(self, snapshot: Snapshot) -> str:
        """Writes a checkpoint and reads it again; gives its folder.

        Raises:
            CheckpointError: if it could not be written; those of other steps are as they were.
        """
        place = self.path_of(snapshot.step)
        try:
            self._clear(snapshot.step)
            tf.io.gfile.makedirs(place)
            write_tensors(f"{place}/{TENSORS}", snapshot.tensors)
            check_tensors(f"{place}/{TENSORS}", snapshot.tensors)
            files = {name: describe_file(f"{place}/{name}") for name in tf.io.gfile.listdir(place)}
            manifest = {"format": FORMAT, "step": snapshot.step, "files": files, "host": snapshot.host}
            with tf.io.gfile.GFile(f"{place}/{MANIFEST}", "w") as file:
                file.write(json.dumps({**manifest, CHECK: manifest_checksum(manifest)}))
        except (tf.errors.OpError, OSError, DamagedCheckpoint) as error:
            said = getattr(error, "message", None) or getattr(error, "strerror", None) or str(error)
            raise CheckpointError(
                f"the checkpoint at step {snapshot.step} could not be written to {self.folder}: "
                f"{said.splitlines()[0] if said else type(error).__name__}"
            ) from error
        return place

    def _clear(self, step: int) -> None:
        """Takes away what is there of a step, and what a process that died in writing has left."""
        whole = self.steps()
        for begun in self._list_folders():
            is_left_over = begun not in whole and not tf.io.gfile.exists(f"{self.path_of(begun)}/{QUARANTINE}")
            if begun == step or is_left_over:
                self.delete(begun)

    def read(self, step: int) -> Snapshot:
        """A checkpoint, once its files were found to be what was written.

        Raises:
            DamagedCheckpoint: if they are not.
        """
        place = self.path_of(step)
        try:
            with tf.io.gfile.GFile(f"{place}/{MANIFEST}") as file:
                manifest = json.loads(file.read())
            if manifest["format"] != FORMAT:
                raise DamagedCheckpoint(f"it has the format {manifest['format']}, and this version reads {FORMAT}")
            if manifest.pop(CHECK) != manifest_checksum(manifest):
                raise DamagedCheckpoint(f"{MANIFEST} is not what was written")
            for name, said in manifest["files"].items():
                if describe_file(f"{place}/{name}") != said:
                    raise DamagedCheckpoint(f"{name} is not what was written")
            return Snapshot(manifest["step"], read_tensors(f"{place}/{TENSORS}"), manifest["host"])
        except (tf.errors.OpError, OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpoint(
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            ) from error

    def delete(self, step: int) -> None:
        """Takes one away; what says that it is whole goes first."""
        place = self.path_of(step)
        if tf.io.gfile.exists(f"{place}/{MANIFEST}"):
            tf.io.gfile.remove(f"{place}/{MANIFEST}")
        if tf.io.gfile.exists(place):
            tf.io.gfile.rmtree(place)

    def quarantine(self, step: int) -> None:
        """Keeps what is left of a damaged one, where it does not count."""
        place = self.path_of(step)
        tf.io.gfile.rename(f"{place}/{MANIFEST}", f"{place}/{QUARANTINE}", overwrite=True)


def write_tensors(prefix: str, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    names = list(tensors)
    with tf.device("CPU:0"):
        values = [tf.constant(tensors[name]) for name in names]
        tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), tensors=values)


def read_tensors(prefix: str) -> dict[str, np.ndarray[Any, Any]]:
    reader = tf.compat.v1.train.NewCheckpointReader(prefix)
    return {name: np.asarray(reader.get_tensor(name)) for name in reader.get_variable_to_dtype_map()}


def check_tensors(prefix: str, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Reads what was written again, one tensor at a time."""
    reader = tf.compat.v1.train.NewCheckpointReader(prefix)
    for name, value in tensors.items():
        if np.asarray(reader.get_tensor(name)).tobytes() != value.tobytes():
            raise DamagedCheckpoint(f"{name} is read otherwise than it was written")


def manifest_checksum(manifest: Mapping[str, Any]) -> int:
    """The CRC-32 of what a manifest says, as JSON."""
    return zlib.crc32(json.dumps(manifest).encode())


def describe_file(path: str) -> dict[str, int]:
    """A file's size and CRC-32."""
    size = check = 0
    with tf.io.gfile.GFile(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size += len(chunk)
            check = zlib.crc32(chunk, check)
    return {"bytes": size, "crc32": check}
