"""Opens what `--input` names: a table, a folder of pictures or texts, `.npz`, TFRecord files, a Hugging Face folder.

No TensorFlow before the first record of a TFRecord file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow

from scaleflow.dataset.npz import open_arrays
from scaleflow.dataset.reading.files import PICTURE_SUFFIXES, RECORD_SUFFIXES, TEXT_SUFFIXES, has_suffix
from scaleflow.dataset.tables.files import open_file
from scaleflow.errors import ConfigError, RunError, read_reason
from scaleflow.evaluation.columns import to_column
from scaleflow.files.table_formats import CsvForm
from scaleflow.predict.columns import format_columns
from scaleflow.predict.reading import Reading
from scaleflow.predict.table_source import FileRows, RowSource, list_input_files, open_table
from scaleflow.tracking.saved_models import ModelInput

#: Threads that read files of one row each.
THREADS = 8

#: The column with the path of a file, and those with what is in it.
FILE, PICTURE, TEXT = "file", "picture", "text"

#: Files of which each is a prompt of a language model.
PROMPT_SUFFIXES = (*TEXT_SUFFIXES, ".md")

#: The files by which a folder that `datasets` has saved is recognised: of one split, and of several.
SAVED_SPLIT, SAVED_SPLITS = "state.json", "dataset_dict.json"


def open_input(
    path: str, delimiter: str | None, reading: Reading, inputs: Mapping[str, ModelInput], selected: Sequence[str] = ()
) -> RowSource:
    """Opens what the user names: a table, or one of the containers of this module.

    Args:
        path: a file, a glob or a folder.
        delimiter: between the fields of a CSV file; None: that of the run.
        reading: how the run read its data.
        inputs: of the model.
        selected: the columns that the user names.

    Raises:
        ConfigError: if there is no such file, or it cannot be read.
    """
    if Path(path, SAVED_SPLITS).is_file():
        splits = sorted(each.parent.name for each in Path(path).glob(f"*/{SAVED_SPLIT}"))
        raise ConfigError(f"--input {path}: has the splits {', '.join(splits)}; use --input {path.rstrip('/')}/NAME")
    if Path(path, SAVED_SPLIT).is_file():
        return open_saved_dataset(path, reading)
    files = list_input_files(path)
    pictures, texts, records, arrays = (
        [file for file in files if has_suffix(file, suffixes)]
        for suffixes in (PICTURE_SUFFIXES, TEXT_SUFFIXES, RECORD_SUFFIXES, (".npz",))
    )
    if pictures and any(each.is_picture for each in inputs.values()):
        return FileSource(tuple(pictures), PICTURE)
    if texts:
        return FileSource(tuple(texts), TEXT)
    if pictures:
        raise ConfigError(
            f"--input {path}: has pictures, and the model was trained on arrays of pixels; use an .npz file"
        )
    if records:
        return open_records(path, records, reading, inputs)
    if arrays:
        return open_npz(path, arrays, reading, inputs, selected)
    return open_table(path, delimiter, reading, [name for name in inputs if name])


def open_text_files(path: str) -> FileSource | None:
    """Opens files of prompts, each a row; returns None for other files. Raises ConfigError if there are none."""
    files = list_input_files(path)
    return FileSource(tuple(files), TEXT) if all(has_suffix(file, PROMPT_SUFFIXES) for file in files) else None


@dataclass(frozen=True)
class Container:
    """What the sources of this module have in common.

    Attributes:
        files: their paths.
        schema: names and types of the columns.
        values: the columns that have the values of a model's single input, if that is known.
        labels: the columns that are copied to the output, unless the user names some.
    """

    files: tuple[str, ...]
    schema: Any
    values: tuple[str, ...] = ()
    labels: ClassVar[Sequence[str]] = ()
    form: ClassVar[CsvForm] = CsvForm()

    def count_rows(self) -> int | None:
        """Returns the number of rows; None: it is not known without reading them."""
        return None


class FileSource(Container):
    """Files that are a row each: the path, and the bytes of a picture or the text in it.

    Args:
        files: their paths.
        column: `picture` or `text`.
    """

    labels = (FILE,)

    def __init__(self, files: tuple[str, ...], column: str) -> None:
        type_ = pyarrow.binary() if column == PICTURE else pyarrow.string()
        super().__init__(files, pyarrow.schema([(FILE, pyarrow.string()), (column, type_)]), (column,))

    def count_rows(self) -> int:
        return len(self.files)

    def read(self, columns: Sequence[str], at_once: int, skip: int = 0) -> Iterator[FileRows]:
        """Yields the rows in order. A file that cannot be read, or a text that is no UTF-8, is malformed."""
        (column,) = self.values
        with ThreadPoolExecutor(THREADS) as pool:
            for first in range(skip, len(self.files), at_once):
                files = self.files[first : first + at_once]
                found = list(pool.map(read_file, files, [column == TEXT] * len(files)))
                values = pyarrow.array([content for content, _ in found], self.schema.field(column).type)
                table = pyarrow.table({FILE: pyarrow.array(files), column: values}).select(list(columns))
                yield FileRows(files[0], first, table, {n: why for n, (_, why) in enumerate(found) if why}, files)


def read_file(path: str, is_text: bool) -> tuple[bytes | str, str]:
    """Returns what is in a file, and why it cannot be read; one of them is empty."""
    try:
        with open_file(path) as file:
            content = file.read()
        return (content.decode() if is_text else content), ""
    except OSError as error:
        return ("" if is_text else b""), f"it cannot be read: {error.strerror or error}"
    except UnicodeDecodeError:
        return "", "it is not UTF-8"


@dataclass(frozen=True)
class ArraySource(Container):
    """Arrays of one length, by name; a value of a row may be a nested list.

    Attributes:
        arrays: those of one file; they may be mapped.
    """

    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    def count_rows(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, columns: Sequence[str], at_once: int, skip: int = 0) -> Iterator[FileRows]:
        for first in range(skip, self.count_rows(), at_once):
            chunk = {name: to_column(np.asarray(self.arrays[name][first : first + at_once])) for name in columns}
            yield FileRows(self.files[0], first, pyarrow.table(chunk))


def open_npz(
    path: str, files: Sequence[str], reading: Reading, inputs: Mapping[str, ModelInput], selected: Sequence[str]
) -> ArraySource:
    """Opens an `.npz` file: the arrays of the model's inputs, and those of the same length."""
    if len(files) > 1:
        raise ConfigError(f"--input {path}: has {len(files)} .npz files; use one of them")
    arrays = {name: each for name, each in open_arrays(files[0], "--input").items() if each.ndim}
    names = [name for name in inputs if name] or list(selected)
    if not names:  # as the training named it, or the only one
        known = reading.input or "x"
        names = [known] if known in arrays else list(arrays)
    found = f"the arrays are {format_columns(list(arrays))}"
    if missing := [name for name in names if name not in arrays]:
        raise ConfigError(f"--input {path}: there is no array {format_columns(missing)}; {found}")
    if "" in inputs and len(names) != 1:
        raise ConfigError(f"--input {path}: {found}; name that of the model with --columns NAME")
    rows = {len(arrays[name]) for name in names}
    if len(rows) > 1:
        raise ConfigError(f"--input {path}: the arrays {format_columns(names)} have different lengths")
    same = {name: each for name, each in arrays.items() if len(each) in rows}
    schema = pyarrow.schema([(name, to_column(np.asarray(each[:0])).type) for name, each in same.items()])
    return ArraySource((files[0],), schema, tuple(names) if "" in inputs else (), same)


@dataclass(frozen=True)
class RecordSource(Container):
    """TFRecord files of the run's features; the column of the input only.

    Attributes:
        spec: `dataset.features.INPUT` of the run.
        compression: of the files, as TensorFlow names it.
    """

    spec: Mapping[str, Any] = field(default_factory=dict)
    compression: str = ""

    def read(self, columns: Sequence[str], at_once: int, skip: int = 0) -> Iterator[FileRows]:
        from scaleflow.predict.records import read_records

        (name,) = self.values
        for path in self.files:
            first = 0
            for values, reason in read_records(path, name, self.spec, self.compression, at_once):
                if reason:
                    raise RunError(f"{path}: {reason}")
                if len(values) > skip:
                    column = pyarrow.array(values.tolist()) if values.dtype == object else to_column(values)
                    yield FileRows(path, first, pyarrow.table({name: column})).slice(skip)
                first, skip = first + len(values), max(0, skip - len(values))


def open_records(path: str, files: Sequence[str], reading: Reading, inputs: Mapping[str, ModelInput]) -> RecordSource:
    """Opens TFRecord files. Raises ConfigError if the run read no such files: it does not describe their features."""
    name = reading.input or ""
    if name not in reading.features or "" not in inputs:
        raise ConfigError(
            f"--input {path}: are TFRecord files, whose features only a run of dataset=tfrecord describes; use a table "
            "or an .npz file"
        )
    described = inputs[""]
    if described.is_picture:
        type_ = pyarrow.binary()
    elif described.dtype == "string":
        type_ = pyarrow.string()
    else:
        type_ = to_column(np.zeros((0, *described.shape), described.dtype)).type
    schema = pyarrow.schema([(name, type_)])
    return RecordSource(tuple(files), schema, (name,), reading.features[name], reading.compression)


@dataclass(frozen=True)
class SavedDataset(Container):
    """The rows of a folder that `datasets.Dataset.save_to_disk` wrote.

    Attributes:
        rows: the dataset, in Arrow's format.
    """

    rows: Any = None

    def count_rows(self) -> int:
        return len(self.rows)

    def read(self, columns: Sequence[str], at_once: int, skip: int = 0) -> Iterator[FileRows]:
        chosen = self.rows.select_columns(list(columns))
        for first in range(skip, len(chosen), at_once):
            yield FileRows(self.files[0], first, chosen[first : first + at_once])


def open_saved_dataset(path: str, reading: Reading) -> SavedDataset:
    """Opens a folder of the library datasets. Raises ConfigError if it cannot be read."""
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"--input {path}: datasets is not installed; pip install 'scaleflow[datasets]'") from error
    try:
        rows = datasets.load_from_disk(path)
    except Exception as error:  # of a file, or of what is in it
        raise ConfigError(f"--input {path}: cannot be read: {read_reason(error)}") from error
    schema = rows.features.arrow_schema
    values = tuple(name for name in schema.names if name == reading.input)
    return SavedDataset((path,), schema, values, rows.with_format("arrow"))
