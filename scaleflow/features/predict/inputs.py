"""Opens the files of `--input`: a table, pictures, texts, `.npz`, TFRecord files, or a Hugging Face folder.

No TensorFlow before the first record of a TFRecord file.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from scaleflow.dataset.npz import open_arrays
from scaleflow.dataset.reading.files import (
    ALL,
    PICTURE_SUFFIXES,
    RECORD_SUFFIXES,
    TEXT_SUFFIXES,
    has_suffix,
    list_in_store,
    match_files,
)
from scaleflow.dataset.reading.learned_cache import LearnedCache
from scaleflow.dataset.tables.files import TableFiles, open_file, prepare_tables
from scaleflow.errors import ConfigError, RunError, read_reason
from scaleflow.evaluation.predictions import to_column
from scaleflow.features.predict.reading import (
    FileRows,
    RowBatch,
    RowSource,
    format_columns,
    read_places,
    to_word,
    to_words,
)
from scaleflow.files.object_store import is_store_address
from scaleflow.files.table_formats import CsvForm, explain_arrow_error, find_format
from scaleflow.interfaces import LearnedState, name_leaves

#: Threads that read files with one row each.
THREADS = 8

#: Columns of a source with one file per row: the file's path, and its picture or text.
FILE = "file"
PICTURE = "picture"
TEXT = "text"

#: Suffixes of files that are one prompt each.
PROMPT_SUFFIXES = (*TEXT_SUFFIXES, ".md")

#: Files that identify a folder saved by `datasets`: with one split, and with several.
SAVED_SPLIT = "state.json"
SAVED_SPLITS = "dataset_dict.json"


def open_input(path: str, delimiter: str | None, state: LearnedState, selected: Sequence[str] = ()) -> RowSource:
    """Opens the input that the user names.

    Args:
        path: a file, a glob or a folder.
        delimiter: delimiter of CSV files; None: the run's.
        state: the run's learned state: the model's inputs, and how the run read its data.
        selected: the columns that the user names.

    Raises:
        ConfigError: if there is no such file, or it cannot be read.
    """
    if Path(path, SAVED_SPLITS).is_file():
        splits = sorted(file.parent.name for file in Path(path).glob(f"*/{SAVED_SPLIT}"))
        raise ConfigError(f"--input {path}: has the splits {', '.join(splits)}; use --input {path.rstrip('/')}/NAME")
    if Path(path, SAVED_SPLIT).is_file():
        return open_saved_dataset(path, state.reading)
    files = list_input_files(path)
    pictures = [file for file in files if has_suffix(file, PICTURE_SUFFIXES)]
    texts = [file for file in files if has_suffix(file, TEXT_SUFFIXES)]
    records = [file for file in files if has_suffix(file, RECORD_SUFFIXES)]
    arrays = [file for file in files if has_suffix(file, (".npz",))]
    if pictures and state.pictures:
        return open_files(pictures, PICTURE)
    if texts:
        return open_files(texts, TEXT)
    if pictures:
        raise ConfigError(
            f"--input {path}: has pictures, and the model was trained on arrays of pixels; use an .npz file"
        )
    if records:
        return open_records(path, records, state)
    if arrays:
        return open_npz(path, arrays, state, selected=selected)
    return open_table(path, delimiter, state.reading, inputs=[name for name in name_leaves(state.inputs) if name])


def list_input_files(path: str) -> Sequence[str]:
    """Returns the input's files, sorted. In a folder, names with a leading `.` or `_` are left out."""
    if is_store_address(path):
        scheme = path.partition("://")[0]
        return [f"{scheme}://{name}" for name in list_in_store("--input", path)[1] if "/_" not in name]
    files = match_files(path, f"--input {path}")
    if files is None:
        files = []
        for file in Path(path).rglob("*"):
            is_hidden = any(name[0] in "._" for name in file.relative_to(path).parts)
            if file.is_file() and not is_hidden:
                files.append(str(file))
        files.sort()
    if not files:
        raise ConfigError(f"--input {path}: the folder has no files")
    return files


# Tables --------------------------------------------------------------------------------------


def open_table(
    path: str, delimiter: str | None = None, reading: Mapping[str, Any] = {}, inputs: Collection[str] = ()
) -> RowSource:
    """Finds the files of a table and reads their column names.

    Args:
        path: a file, a glob, a folder with files of one format, or such an address in an object store. Subfolders may
            be columns, such as `year=2024`.
        delimiter: delimiter of CSV files; None: the run's.
        reading: how the run read its own files. A comma as delimiter also accepts tabs in `.tsv` files.
        inputs: names of the model's inputs. A header line is recognised by them.

    Raises:
        ConfigError: if there is no such file, a file cannot be read, or formats or columns differ.
    """
    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii()):
        raise ConfigError(f"--delimiter {delimiter!r}: expected one character, such as ';'")
    files = list_input_files(path)
    form = CsvForm()
    if find_format(files[0], "--input") == "csv":
        usual = to_word(reading.get("delimiter"))
        if not delimiter and usual != ",":
            delimiter = usual
        header = to_words(reading.get("header")) or ()
        form = CsvForm(delimiter or None, header, to_word(reading.get("encoding")) or form.encoding)
    elif delimiter is not None:
        raise ConfigError(f"--delimiter {delimiter}: {files[0]} is no CSV file; leave it out")
    table = prepare_tables({ALL: [*files]}, path, form, cache=LearnedCache(None, path), key="--input")
    if table.csv.header:
        table.csv = replace(table.csv, header=find_header(table, inputs, to_word(reading.get("target"))))
    table.name_columns([table.read_schema(file) for file in files])
    table.use(table.names)
    counts = {file: table.count_rows(file) for file in files}
    rows = None if None in counts.values() else sum(filter(None, counts.values()))
    file_rows = FileRows(counts, partial(read_file_rows, table))
    return RowSource(files, table.used, file_rows.read, name=file_rows.name, rows=rows, delimiter=table.csv.delimiter)


def read_file_rows(
    table: TableFiles, file: str, columns: Sequence[str], at_once: int
) -> Iterator[tuple[Any, dict[int, str]]]:
    """Yields the rows of a file as `TableFiles.read_in_order` does. Raises RunError if it cannot be read."""
    first = 0
    try:
        for part, malformed in table.read_in_order(file, columns, at_once):
            yield part, malformed
            first += len(part)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, ConfigError) as error:
        reason = str(error) if isinstance(error, ConfigError) else explain_arrow_error(error)
        raise RunError(f"{file}: cannot be read after row {first}: {reason}") from error


def find_header(table: TableFiles, inputs: Collection[str], target: str | None) -> tuple[str, ...]:
    """Returns the column names of CSV files without a header line: all, all but the target, or the inputs.

    Returns an empty tuple if the first file has a header line. Raises ConfigError if the number of fields fits none of
    them.
    """
    header = table.csv.header
    file = table.by_split[ALL][0]
    fields = replace(table, csv=replace(table.csv, header=())).read_schema(file).names
    if set(inputs or header) <= set(fields):
        return ()
    without_target = [name for name in header if name != target]
    only_inputs = [name for name in header if name in inputs]
    for names in (header, without_target, only_inputs):
        if len(names) == len(fields):
            return tuple(names)
    raise ConfigError(
        f"--input {file}: its rows have {len(fields)} fields, and the run's dataset.header names {len(header)}: "
        f"{', '.join(header)}; write a header line with the names"
    )


# Other files ---------------------------------------------------------------------------------


def open_text_files(path: str) -> RowSource | None:
    """Opens files with one prompt each. Returns None for other files.

    Raises ConfigError if no file exists.
    """
    files = list_input_files(path)
    if all(has_suffix(file, PROMPT_SUFFIXES) for file in files):
        return open_files(files, TEXT)
    return None


def open_files(files: Sequence[str], column: str) -> RowSource:
    """Opens files with one row each: the path, and in `column` the picture's bytes or the text.

    A file that cannot be read, or a text that is not UTF-8, is a malformed row.
    """
    type_ = pyarrow.binary() if column == PICTURE else pyarrow.string()
    schema = pyarrow.schema([(FILE, pyarrow.string()), (column, type_)])

    def read(columns: list[str], first: int, end: int) -> RowBatch:
        with ThreadPoolExecutor(THREADS) as pool:
            contents = list(pool.map(lambda file: read_file(file, column == TEXT), files[first:end]))
        values = pyarrow.array([value for value, _ in contents], type_)
        table = pyarrow.table([pyarrow.array(files[first:end]), values], schema=schema)
        faults = {first + row: fault for row, (_, fault) in enumerate(contents) if fault}
        return RowBatch(first, table.select(columns), faults)

    read_all = read_places(len(files), read)
    count = len(files)
    return RowSource(files, schema, read_all, name=files.__getitem__, rows=count, values=(column,), labels=(FILE,))


def read_file(path: str, is_text: bool) -> tuple[bytes | str, str]:
    """Returns the content of a file and "", or an empty content and the reason why it cannot be read."""
    try:
        with open_file(path) as file:
            content = file.read()
        return (content.decode() if is_text else content), ""
    except OSError as error:
        return ("" if is_text else b""), f"it cannot be read: {error.strerror or error}"
    except UnicodeDecodeError:
        return "", "it is not UTF-8"


def open_npz(path: str, files: Sequence[str], state: LearnedState, selected: Sequence[str]) -> RowSource:
    """Opens an `.npz` file. Its columns are the arrays of the model's inputs and all arrays of the same length."""
    if len(files) > 1:
        raise ConfigError(f"--input {path}: has {len(files)} .npz files; use one of them")
    arrays = {name: array for name, array in open_arrays(files[0], "--input").items() if array.ndim}
    is_single = "" in name_leaves(state.inputs)
    names = list(selected) if is_single else list(name_leaves(state.inputs))
    if not names:  # the name in training, or the only array
        known = find_input(state.reading) or "x"
        names = [known] if known in arrays else list(arrays)
    existing = f"the arrays are {format_columns(list(arrays))}"
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ConfigError(f"--input {path}: there is no array {format_columns(missing)}; {existing}")
    if is_single and len(names) != 1:
        raise ConfigError(f"--input {path}: {existing}; name that of the model with --columns NAME")
    rows = len(arrays[names[0]])
    if any(len(arrays[name]) != rows for name in names):
        raise ConfigError(f"--input {path}: the arrays {format_columns(names)} have different lengths")

    def read(columns: Sequence[str], first: int, end: int) -> RowBatch:
        table = pyarrow.table({name: to_column(np.asarray(arrays[name][first:end])) for name in columns})
        return RowBatch(first, table)

    columns_of_rows = [name for name, array in arrays.items() if len(array) == rows]
    schema = read(columns_of_rows, 0, 0).table.schema
    read_all = read_places(rows, read)
    values = names if is_single else ()
    return RowSource(files, schema, read_all, name=partial(name_row, files[0]), rows=rows, values=values)


def name_row(path: str, place: int) -> str:
    return f"{path}, row {place + 1}"


def find_input(reading: Mapping[str, Any]) -> str | None:
    """Returns the array, column or feature that a run read its single input from, or None if unknown."""
    return to_word(reading.get("input")) or to_word(reading.get("inputs"))


def open_records(path: str, files: Sequence[str], state: LearnedState) -> RowSource:
    """Opens TFRecord files with the run's features. The only column is the model's input.

    Raises ConfigError if the run did not read TFRecord files: then their features are unknown.
    """
    name = find_input(state.reading) or ""
    described = name_leaves(state.inputs).get("")
    features = state.reading.get("features")
    if described is None or not isinstance(features, dict) or name not in features:
        raise ConfigError(
            f"--input {path}: are TFRecord files, whose features only a run of dataset=tfrecord describes; use a table "
            "or an .npz file"
        )
    if "" in state.pictures:
        type_ = pyarrow.binary()
    elif described.dtype == "string":
        type_ = pyarrow.string()
    else:
        type_ = to_column(np.zeros((0, *described.shape), described.dtype)).type
    compression = (to_word(state.reading.get("compression")) or "").upper().removeprefix("NONE")

    def read(file: str, columns: Sequence[str], at_once: int) -> Iterator[tuple[Any, dict[int, str]]]:
        from scaleflow.dataset.tfrecord import read_feature_values

        for values in read_feature_values(file, name, features[name], compression=compression, at_once=at_once):
            column = pyarrow.array(values.tolist()) if values.dtype == object else to_column(values)
            yield pyarrow.table({name: column}), {}

    rows = FileRows(dict.fromkeys(files), read)
    return RowSource(files, pyarrow.schema([(name, type_)]), rows.read, name=rows.name, values=(name,))


def open_saved_dataset(path: str, reading: Mapping[str, Any]) -> RowSource:
    """Opens a folder written by `datasets.Dataset.save_to_disk`. Raises ConfigError if it cannot be read."""
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"--input {path}: datasets is not installed; pip install 'scaleflow[datasets]'") from error
    try:
        rows = datasets.load_from_disk(path).with_format("arrow")
    except Exception as error:  # libraries raise many types
        raise ConfigError(f"--input {path}: cannot be read: {read_reason(error)}") from error

    def read(columns: list[str], first: int, end: int) -> RowBatch:
        return RowBatch(first, rows.select_columns(columns)[first:end])

    schema = rows.features.arrow_schema
    values = [name for name in schema.names if name == find_input(reading)]
    read_all = read_places(len(rows), read)
    count = len(rows)
    return RowSource((path,), schema, read_all, name=partial(name_row, path), rows=count, values=values)
