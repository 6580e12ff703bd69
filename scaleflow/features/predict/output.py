"""Writes predictions to a file or to a folder of shards, so that what has its final name is whole. No TensorFlow."""

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

#: Suffixes of a file.
PARQUET = (".parquet", ".pq")
CSV = (".csv",)

#: The file of a folder that says what its shards are. Readers of a folder ignore names that begin with `_`.
MANIFEST = "_predictions.json"

SHARD = re.compile(r"part-\d{5,}\.parquet")


@dataclass(frozen=True)
class Output:
    """Where predictions go."""

    path: Path  # a file, or a folder of shards
    is_folder: bool  # which of the two

    @property
    def is_csv(self) -> bool:
        return not self.is_folder and self.path.suffix.lower() in CSV

    def shard(self, number: int) -> Path:
        return self.path / f"part-{number:05d}.parquet" if self.is_folder else self.path

    def count_finished(self) -> int:
        """Returns the number of shards without a gap that are finished."""
        number = 0
        while self.shard(number).exists():
            number += 1
        return number

    @contextlib.contextmanager
    def open_shard(self, number: int, schema: Any) -> Iterator[Any]:
        """Yields a writer of tables. The shard gets its name when the block ends, unless it ends with an error."""
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
        """Keeps other commands from a folder while the block lasts."""
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
        """Returns the number of the first shard to write, without changing anything.

        Raises ConfigError if the shards there were made in another way than `manifest` says.
        """
        file = self.path / MANIFEST
        if not (resumes and file.exists()):
            return 0
        known = read_json(file)
        if known.get("on-bad") == "raise":  # no row of the finished shards is bad
            known["on-bad"] = manifest["on-bad"]
        if changed := [key for key, value in manifest.items() if known.get(key) != value]:
            raise ConfigError(
                f"--resume: the shards in {self.path} were made with another {' and '.join(changed)}; type the "
                "same command, or --overwrite"
            )
        return self.count_finished()

    def begin(self, manifest: Mapping[str, Any], first: int) -> None:
        """Says how the shards of a folder are made. Removes those that are there, unless `first` is not 0."""
        if not self.is_folder:
            return
        for path in self.path.iterdir():
            if not first and SHARD.fullmatch(path.name):
                path.unlink()
        replace_text(self.path / MANIFEST, json.dumps(manifest, indent=2) + "\n")

    def count_rows(self, shards: int) -> int:
        """Returns the number of rows in the first shards of a folder."""
        return sum(parquet.read_metadata(self.shard(number)).num_rows for number in range(shards))


def open_output(text: str, overwrites: bool, resumes: bool) -> Output:
    """Returns the output that a user names, without changing anything.

    Raises ConfigError if it exists and is neither to be replaced nor to be continued, or cannot be written.
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
    """Raises ConfigError if the output exists, and is neither to be replaced nor to be continued."""
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

    Raises ConfigError if names are there twice, or a CSV file cannot hold a type.
    """
    if twice := [name for name in kept.names if name in predicted.names]:
        raise ConfigError(f"--keep {', '.join(twice)}: the predictions have a column of that name; leave it out")
    schema = pyarrow.schema([*kept, *predicted])
    if output.is_csv and (nested := [field for field in schema if types.is_nested(field.type)]):
        raise ConfigError(
            f"--output {output.path}: the column {nested[0].name} has lists, which a CSV file cannot hold; use a "
            ".parquet file"
        )
    return schema
