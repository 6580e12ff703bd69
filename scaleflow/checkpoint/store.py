"""Checkpoints as files: TensorFlow's own format for the tensors, JSON for the rest.

    checkpoints/step-00000450/
        tensors.index, tensors.data-*     readable by `tf.train.load_checkpoint(".../tensors")`
        learned_state.json                the run's learned state, with long lists in learned_state.npz
        checkpoint.json                   the manifest: size and CRC-32 of each file, the host's state, its own CRC-32

The manifest is written last, after the other files are written and verified. A folder without it, or whose files do
not match it, is not a checkpoint. So no file must be renamed, which is not atomic in an object store.
"""

from __future__ import annotations

import json
import re
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from scaleflow.errors import CheckpointError
from scaleflow.interfaces import Snapshot

FORMAT = 2
TENSORS = "tensors"
MANIFEST = "checkpoint.json"
CHECKSUM = "crc32"
QUARANTINE = "damaged.json"
CHUNK_BYTES = 1 << 22

#: The files of a checkpoint.
OWN_FILE = re.compile(rf"{TENSORS}\..*|{MANIFEST}|{QUARANTINE}|learned_state\.\w+")

#: Bytes of tensors to write at once, since TensorFlow needs a copy of them. A larger tensor is written alone.
PART_BYTES = 1 << 26


class DamagedCheckpoint(Exception):
    """A checkpoint whose files have changed since they were written. The message names the difference."""


class CheckpointStore:
    """The files of one run's checkpoints in a folder, a path for `tf.io.gfile`. The first write creates the folder.

    `records` are additional files of each checkpoint, by name.
    """

    def __init__(self, folder: str, records: Mapping[str, bytes] | None = None) -> None:
        self.folder = folder.rstrip("/")
        self._records = records or {}
        self._is_new = False

    def path_of(self, step: int) -> str:
        return f"{self.folder}/step-{step:08d}"

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, the newest last."""
        return [step for step in self._list_folders() if tf.io.gfile.exists(f"{self.path_of(step)}/{MANIFEST}")]

    def read_manifest(self, step: int) -> bytes | None:
        """Returns the manifest of a checkpoint, unchecked; None if there is no such checkpoint."""
        try:
            with tf.io.gfile.GFile(f"{self.path_of(step)}/{MANIFEST}", "rb") as file:
                return bytes(file.read())
        except tf.errors.NotFoundError:
            return None

    def _list_folders(self) -> list[int]:
        """Returns the steps that have a folder, complete or not."""
        try:
            names = tf.io.gfile.listdir(self.folder)
        except tf.errors.NotFoundError:
            return []
        matches = (re.fullmatch(r"step-(\d+)", name.rstrip("/")) for name in names)
        return sorted(int(match[1]) for match in matches if match)

    def check_writable(self) -> None:
        """Writes a file and removes it. Raises TensorFlow's error or OSError if that fails."""
        tf.io.gfile.remove(f"{self.folder}/{self.write_probe()}")

    def write_probe(self) -> str:
        """Writes a file and returns its name. Other workers call `has_probe`: do they see the same folder?"""
        name = f"seen-{uuid.uuid4().hex}"
        self._is_new = not tf.io.gfile.exists(self.folder)
        tf.io.gfile.makedirs(self.folder)
        with tf.io.gfile.GFile(f"{self.folder}/{name}", "w") as file:
            file.write(" ")
        return name

    def has_probe(self, name: str) -> bool:
        """Returns whether this worker sees the file that another one has written."""
        return bool(tf.io.gfile.exists(f"{self.folder}/{name}"))

    def remove_probe(self, name: str) -> None:
        """Removes the probe, and the folder if `write_probe` created it."""
        tf.io.gfile.remove(f"{self.folder}/{name}")
        if self._is_new and not tf.io.gfile.listdir(self.folder):  # another run may use the folder now
            tf.io.gfile.rmtree(self.folder)

    def write(self, snapshot: Snapshot) -> str:
        """Writes a checkpoint and verifies it. Returns its folder.

        Raises CheckpointError if it could not be written. The checkpoints of other steps stay valid.
        """
        path = self.path_of(snapshot.step)
        try:
            self._clear(snapshot.step)
            tf.io.gfile.makedirs(path)
            write_tensors(f"{path}/{TENSORS}", snapshot.tensors)
            check_tensors(f"{path}/{TENSORS}", snapshot.tensors)
            for name, content in self._records.items():
                with tf.io.gfile.GFile(f"{path}/{name}", "wb") as file:
                    file.write(content)
            files = {name: describe_file(f"{path}/{name}") for name in self._list_own(path)}
            manifest = {"format": FORMAT, "step": snapshot.step, "files": files, "host": snapshot.host}
            with tf.io.gfile.GFile(f"{path}/{MANIFEST}", "w") as file:
                file.write(json.dumps({**manifest, CHECKSUM: manifest_checksum(manifest)}))
        except (tf.errors.OpError, OSError, DamagedCheckpoint) as error:
            raise CheckpointError(
                f"the checkpoint at step {snapshot.step} could not be written to {self.folder}: {describe_error(error)}"
            ) from error
        return path

    def _clear(self, step: int) -> None:
        """Deletes the folder of a step, and incomplete folders of killed processes."""
        complete = self.steps()
        for folder_step in self._list_folders():
            is_incomplete = folder_step not in complete and not tf.io.gfile.exists(
                f"{self.path_of(folder_step)}/{QUARANTINE}"
            )
            if folder_step == step or is_incomplete:
                self.delete(folder_step)

    def read(self, step: int) -> Snapshot:
        """Reads and verifies a checkpoint. Raises DamagedCheckpoint if its files have changed since
        they were written.
        """
        path = self.path_of(step)
        try:
            with tf.io.gfile.GFile(f"{path}/{MANIFEST}") as file:
                manifest = parse_manifest(file.read())
            for name, description in manifest["files"].items():
                if describe_file(f"{path}/{name}") != description:
                    raise DamagedCheckpoint(f"{name} has changed since it was written")
            return Snapshot(manifest["step"], read_tensors(f"{path}/{TENSORS}"), manifest["host"])
        except (tf.errors.OpError, OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpoint(
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            ) from error

    def delete(self, step: int) -> None:
        """Deletes a checkpoint, the manifest first, so that an interrupted deletion leaves no valid checkpoint.

        Other files in its folder stay.
        """
        path = self.path_of(step)
        if tf.io.gfile.exists(f"{path}/{MANIFEST}"):
            tf.io.gfile.remove(f"{path}/{MANIFEST}")
        if not tf.io.gfile.exists(path):
            return
        for name in self._list_own(path):
            tf.io.gfile.remove(f"{path}/{name}")
        if not tf.io.gfile.listdir(path):
            tf.io.gfile.rmtree(path)

    def _list_own(self, path: str) -> list[str]:
        """Returns the names of the checkpoint's own files in its folder."""
        return [name for name in tf.io.gfile.listdir(path) if OWN_FILE.fullmatch(name) or name in self._records]

    def quarantine(self, step: int) -> None:
        """Renames the manifest of a damaged checkpoint. Its files stay, but no longer count as a checkpoint."""
        path = self.path_of(step)
        tf.io.gfile.rename(f"{path}/{MANIFEST}", f"{path}/{QUARANTINE}", overwrite=True)


def write_tensors(prefix: str, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Writes tensors in parts of about `PART_BYTES`, and merges the parts."""
    parts: list[str] = []
    for names in divide_names(tensors):
        parts.append(f"{prefix}.part-{len(parts)}")
        with tf.device("CPU:0"):
            values = [tf.constant(tensors[name]) for name in names]
            tf.raw_ops.SaveV2(prefix=parts[-1], tensor_names=names, shape_and_slices=[""] * len(names), tensors=values)
        del values  # before the next part is copied
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=prefix, delete_old_dirs=False)


def divide_names(tensors: Mapping[str, np.ndarray[Any, Any]]) -> Iterator[list[str]]:
    """Yields the names of the tensors of each part."""
    names: list[str] = []
    size = 0
    for name, value in tensors.items():
        if names and size + value.nbytes > PART_BYTES:
            yield names
            names = []
            size = 0
        names.append(name)
        size += value.nbytes
    yield names


def read_tensors(prefix: str) -> dict[str, np.ndarray[Any, Any]]:
    reader = tf.compat.v1.train.NewCheckpointReader(prefix)
    return {name: np.asarray(reader.get_tensor(name)) for name in reader.get_variable_to_dtype_map()}


def check_tensors(prefix: str, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Compares written tensors with their values, one at a time. Raises DamagedCheckpoint if they differ."""
    reader = tf.compat.v1.train.NewCheckpointReader(prefix)
    for name, value in tensors.items():
        if not has_same_bytes(np.asarray(reader.get_tensor(name)), value):
            raise DamagedCheckpoint(f"{name} was read back with other values than it was written with")


def has_same_bytes(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Compares two arrays bit for bit, in chunks, so that no copy of a whole array is made."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    first, second = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (one, other))
    starts = range(0, first.size, CHUNK_BYTES)
    return all(np.array_equal(first[i : i + CHUNK_BYTES], second[i : i + CHUNK_BYTES]) for i in starts)


def describe_error(error: Exception) -> str:
    """Returns the first line of the message of an error of TensorFlow or of the operating system."""
    message = getattr(error, "message", None) or getattr(error, "strerror", None) or str(error)
    return str(message).splitlines()[0] if message else type(error).__name__


def parse_manifest(content: str | bytes) -> dict[str, Any]:
    """Parses a manifest. Raises DamagedCheckpoint if it has changed or has another version."""
    try:
        manifest = dict(json.loads(content))
        if manifest["format"] != FORMAT:
            raise DamagedCheckpoint(f"it has the format {manifest['format']}, and this version reads {FORMAT}")
        is_sound = manifest.pop(CHECKSUM) == manifest_checksum(manifest)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    if not is_sound:
        raise DamagedCheckpoint(f"{MANIFEST} has changed since it was written")
    return manifest


def manifest_checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest).encode())


def describe_file(path: str) -> dict[str, int]:
    with tf.io.gfile.GFile(path, "rb") as file:
        return describe_pieces(read_pieces(file))


def read_pieces(file: Any) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def describe_pieces(pieces: Iterable[bytes]) -> dict[str, int]:
    """Returns the description of a file in a manifest: its size and its CRC-32."""
    size = check = 0
    for piece in pieces:
        size += len(piece)
        check = zlib.crc32(piece, check)
    return {"bytes": size, "crc32": check}
