"""The formats of table files, by their suffixes. Without TensorFlow and pyarrow."""

from __future__ import annotations

from pathlib import Path

from scaleflow.errors import ConfigError

#: Suffix of a file -> pyarrow's name of its format.
FORMATS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".feather": "feather",
    ".arrow": "feather",
    ".jsonl": "json",
    ".ndjson": "json",
}


def find_format(path: str, key: str) -> str:
    """Returns the format by the last suffix that denotes one, as of `a.csv.gz` or `train.parquet-00000`.

    Raises ConfigError, which names `key`, if no suffix does.
    """
    for suffix in reversed(Path(path).suffixes):
        if name := FORMATS.get(suffix.lower().partition("-")[0]):
            return name
    raise ConfigError(f"{key}: {path} does not end in {', '.join(FORMATS)}; rename it")
