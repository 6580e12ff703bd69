"""Writes predictions to a file or a folder of shards. A file with its final name is complete. No TensorFlow."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import csv, parquet, types

from scaleflow.errors import ConfigError, RunError
from scaleflow.runs.folder import read_json, replace_text

#: Suffixes of an output that is one file.
PARQUET = (".parquet", ".pq")
CSV = (".csv",)

#: File in a folder of shards that says how the shards were made. Readers of folders ignore names with a leading `_`.
MANIFEST = "_predictions.json"

SHARD = re.compile(r"part-\d{5,}\.parquet")


@dataclass(frozen=True)
class Output:
    """The output of the predictions."""

    path: Path  # a file, or a folder of shards
    is_folder: bool  # whether it is a folder

    @property
    def is_csv(self) -> bool:
        return not self.is_folder and self.path.suffix.lower() in CSV

    def shard(self, number: int) -> Path:
        return self.path / f"part-{number:05d}.parquet" if self.is_folder else self.path

    def count_finished(self) -> int:
        """Returns the number of finished shards before the first gap."""
        number = 0
        while self.shard(number).exists():
            number += 1
        return number

    @contextlib.contextmanager
    def open_shard(self, number: int, schema: Any) -> Iterator[Any]:
        """Yields a writer of tables. The shard gets its final name only if the block ends without an error."""
        path = self.shard(number)
        part = path.with_name(f".{path.name}.part")
        try:
            with (csv.CSVWriter if self.is_csv else parquet.ParquetWriter)(str(part), schema) as writer:
                yield writer
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise RunError(f"{path}: cannot be written: {str(error).strip().partition(chr(10))[0]}") from error
        finally:
            part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other commands out of a folder of shards during the block."""
        if not self.is_folder:
            yield
            return
        self.path.mkdir(exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"--output {self.path}: another command is writing predictions there") from error
            yield
        finally:
            os.close(descriptor)

    def find_first(self, manifest: Mapping[str, Any], resumes: bool) -> int:
        """Returns the number of the first shard to write. Changes nothing.

        Raises ConfigError if the existing shards do not match `manifest`.
        """
        file = self.path / MANIFEST
        if not (resumes and file.exists()):
            return 0
        known = read_json(file)
        if known.get("on-bad") == "raise":  # then the finished shards have no bad rows
            known["on-bad"] = manifest["on-bad"]
        changed = [key for key, value in manifest.items() if known.get(key) != value]
        if changed:
            raise ConfigError(
                f"--resume: the shards in {self.path} were made with another {' and '.join(changed)}; type the "
                "same command, or --overwrite"
            )
        return self.count_finished()

    def begin(self, manifest: Mapping[str, Any], first: int) -> None:
        """Writes the manifest of a folder of shards. If `first` is 0, deletes existing shards."""
        if not self.is_folder:
            return
        for path in self.path.iterdir():
            if not first and SHARD.fullmatch(path.name):
                path.unlink()
        replace_text(self.path / MANIFEST, json.dumps(manifest, indent=2) + "\n")

    def count_rows(self, shards: int) -> int:
        """Returns the number of rows in the first `shards` shards of a folder."""
        return sum(parquet.read_metadata(self.shard(number)).num_rows for number in range(shards))


def open_output(text: str, overwrites: bool, resumes: bool) -> Output:
    """Returns the output that a user names. Changes nothing.

    Raises ConfigError if it cannot be written, or exists and should be neither replaced nor continued.
    """
    path = Path(text)
    suffix = path.suffix.lower()
    is_folder = path.is_dir() or text.endswith("/") or not suffix
    if not is_folder and suffix not in (*PARQUET, *CSV):
        raise ConfigError(
            f"--output {text}: expected a file that ends in {', '.join((*PARQUET, *CSV))}, or a folder, which ends in /"
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--output {text}: there is no folder {path.parent}; create it first")
    if not os.access(path if path.is_dir() else path.parent, os.W_OK):
        raise ConfigError(f"--output {text}: {path.parent} cannot be written to")
    check_modes(path, is_folder, overwrites, resumes=resumes)
    return Output(path, is_folder)


def check_modes(path: Path, is_folder: bool, overwrites: bool, resumes: bool) -> None:
    """Raises ConfigError if the output exists and should be neither replaced nor continued."""
    if resumes and overwrites:
        raise ConfigError("--resume: --overwrite begins again; use one of them")
    if resumes and not is_folder:
        raise ConfigError(f"--resume: works with a folder of shards; use --output {path.with_suffix('')}/")
    if not path.exists():
        return
    if not is_folder:
        if not overwrites:
            raise ConfigError(f"--output {path}: the file exists; --overwrite replaces it")
    elif not path.is_dir():
        raise ConfigError(f"--output {path}: is a file, expected a folder")
    elif any(path.iterdir()) and not (path / MANIFEST).exists():
        raise ConfigError(f"--output {path}: the folder has files that are no predictions; use another one")
    elif any(path.iterdir()) and not (overwrites or resumes):
        raise ConfigError(f"--output {path}: has predictions; --resume continues them, --overwrite replaces them")


def check_schema(output: Output, kept: Any, predicted: Any) -> Any:
    """Returns the schema of an output: kept columns, then predictions.

    Raises ConfigError if a name occurs twice, or a CSV file cannot hold a type.
    """
    twice = [name for name in kept.names if name in predicted.names]
    if twice:
        raise ConfigError(f"--keep {', '.join(twice)}: the predictions have a column of that name; leave it out")
    schema = pyarrow.schema([*kept, *predicted])
    nested = [field for field in schema if types.is_nested(field.type)]
    if output.is_csv and nested:
        raise ConfigError(
            f"--output {output.path}: the column {nested[0].name} has lists, which a CSV file cannot hold; use a "
            ".parquet file"
        )
    return schema
