"""A table in memory as the data of a run: `scaleflow.run("dataset=table", ..., data=frame)`.

The table is written to the run's folder, because the worker is another process, and a resumed run reads it again.
pyarrow is imported inside the functions, because only runs with such a table need it.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from scaleflow.config.compose import ComposedConfig
from scaleflow.errors import ConfigError

SOURCE = "scaleflow.dataset.table.Table"

#: The number of rows in a record batch, which is read at once.
BATCH_ROWS = 65_536


def to_arrow(data: Any) -> Any:
    """Converts a pandas DataFrame to a `pyarrow.Table`, without its index; returns a `pyarrow.Table` as it is.

    Raises ConfigError for other types, and for columns whose values have no common type.
    """
    import pyarrow

    if isinstance(data, pyarrow.Table):
        return data
    module, name = type(data).__module__, type(data).__qualname__
    if name != "DataFrame" or module.partition(".")[0] != "pandas":
        raise ConfigError(f"run(data={name}): expected a pandas DataFrame or a pyarrow Table; convert it to one")
    if other := next((each for each in data.columns if not isinstance(each, str)), None):
        raise ConfigError(f"run(data=DataFrame): the column {other!r} needs a name that is a string; rename it")
    try:
        return pyarrow.Table.from_pandas(data, preserve_index=False)
    except pyarrow.ArrowException as error:
        raise ConfigError(
            f"run(data=DataFrame): a column has values of several types: {'; '.join(map(str, error.args))}; give it "
            "one type, or drop it"
        ) from error


def set_data_dir(composed: ComposedConfig, table: Any) -> tuple[ComposedConfig, Path]:
    """Returns the config of a run whose data is `table`, and the file that the run reads it from.

    The name of the file contains a hash of the table. Raises ConfigError if the config has data of its own.
    """
    dataset = composed.config.get("dataset") or OmegaConf.create({})
    if composed.config.get("resume"):
        raise ConfigError("run(data=...): a resumed run reads the table that is in its folder; leave out data")
    if dataset.get("_target_") != SOURCE:
        raise ConfigError(f"run(data=...): the dataset is {dataset.get('_target_')}; add dataset=table")
    if not OmegaConf.is_missing(dataset, "data_dir"):
        raise ConfigError(f"run(data=...): there is also dataset.data_dir={dataset.data_dir}; leave out one of the two")
    path = composed.folder.absolute() / f"data-{hash_table(table)}.feather"
    config = composed.config.copy()
    with open_dict(config):
        config.dataset.data_dir = str(path)
    return replace(composed, config=config), path


def write_feather(table: Any, path: Path) -> None:
    """Writes a table as a Feather file in batches."""
    import pyarrow

    try:
        with pyarrow.OSFile(str(path), "wb") as file:
            write_batches(table, pyarrow.ipc.new_file(file, table.schema))
    except OSError as error:
        raise ConfigError(f"run(data=...): the table cannot be written to {path}: {error}") from error


def write_batches(table: Any, writer: Any) -> None:
    with writer:
        writer.write_table(table.unify_dictionaries(), max_chunksize=BATCH_ROWS)


class HashFile:
    """A file whose contents are hashed."""

    closed = False

    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=8)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def hash_table(table: Any) -> str:
    """Returns 16 hexadecimal digits that depend on the names, types and values of a table."""
    import pyarrow

    file = HashFile()
    plain = table.replace_schema_metadata(None).combine_chunks()
    write_batches(plain, pyarrow.ipc.new_stream(pyarrow.PythonFile(file, "w"), plain.schema))
    return file.digest.hexdigest()
