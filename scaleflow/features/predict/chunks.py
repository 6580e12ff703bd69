"""Reads rows in chunks, converts them for a model, and makes the rows of the output.

No TensorFlow before the first chunk.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow

from scaleflow.errors import ConfigError
from scaleflow.evaluation.predictions import PredictionColumns
from scaleflow.features.predict.bad_rows import Problem, RowReport
from scaleflow.features.predict.language_model import LanguageModel
from scaleflow.features.predict.reading import Array, InputForm, RowBatch, RowSource, divide_rows, to_word, to_words
from scaleflow.interfaces.sampling import Sampling


class RowModel(Protocol):
    """A model that computes outputs of rows.

    Attributes:
        inputs: specs of the inputs, by name.
        decode: maps encoded pictures to inputs; None if the model takes none.
        batch_size: rows computed at once.
    """

    @property
    def inputs(self) -> Mapping[str, Any]: ...

    @property
    def decode(self) -> Callable[[Any], Any] | None: ...

    @property
    def batch_size(self) -> int: ...

    def predict(self, arrays: Mapping[str, Array], name: Callable[[int], str]) -> dict[str, Array]:
        """Returns the outputs [rows, ...] by name for inputs [rows, ...] by name. `name` returns the name of a row."""

    def explain_failure(self, row: int) -> str:
        """Returns why a row has no prediction."""


#: Name of the prompt column that a table may have.
PROMPT = "prompt"


class TextColumns(PredictionColumns):
    """The output column with generated texts."""

    def convert(self, values: Mapping[str, Array]) -> dict[str, Any]:
        return {"prediction": pyarrow.array(values.get("", ()), pyarrow.string())}


class PromptModel:
    """Continues prompts.

    Args:
        model: the language model.
        sampling: how to generate texts. Each row draws with its own seed.
    """

    batch_size = 1
    decode = None

    def __init__(self, model: LanguageModel, sampling: Sampling) -> None:
        from scaleflow.features.predict.compute import TEXT

        self.inputs: Mapping[str, Any] = {"": TEXT}
        self._model = model
        self._sampling = sampling
        self._faults: dict[int, str] = {}

    def predict(self, arrays: Mapping[str, Array], name: Callable[[int], str]) -> dict[str, Array]:
        """Returns the texts, [rows] `str` objects; None for a prompt that the model cannot continue."""
        texts: list[str | None] = []
        self._faults = {}
        for row, prompt in enumerate(arrays[""].ravel()):
            try:
                tokens = self._model.encode(str(prompt))
            except ConfigError as refusal:
                self._faults[row] = str(refusal)
                texts.append(None)
                continue
            seed = (self._sampling.seed << 32) + zlib.crc32(name(row).encode())
            texts.append("".join(self._model.generate(tokens, replace(self._sampling, seed=seed))))
        return {"": np.array(texts, object)}

    def explain_failure(self, row: int) -> str:
        return self._faults[row]


def choose_prompt_column(names: Sequence[str], typed: Collection[str], usual: Any) -> str:
    """Returns the column of a table that has the prompts.

    Args:
        names: names of the table's columns.
        typed: `--columns`.
        usual: the column that the run trained on.

    Raises:
        ConfigError: if the column does not exist, or several columns are possible.
    """
    if typed:
        wanted = list(typed)
    elif PROMPT in names:
        wanted = [PROMPT]
    elif usual in names:
        wanted = [usual]
    else:
        wanted = list(names)
    if len(wanted) != 1 or wanted[0] not in names:
        columns = ", ".join(names)
        if typed:
            raise ConfigError(f"--columns {','.join(typed)}: expected the column with the prompts, one of {columns}")
        raise ConfigError(f"--input: which column has the prompts? Add --columns NAME; the table has {columns}")
    return wanted[0]


T = TypeVar("T")

#: Maximum number of rows, and of batches, that are read and converted at once.
CHUNK_ROWS = 16_384
CHUNK_BATCHES = 16


@dataclass(frozen=True)
class PredictionTask:
    """One prediction job: the rows to read, how to convert them, and the columns to write."""

    source: RowSource  # source of the rows
    form: InputForm  # how rows become inputs
    keep: Sequence[str]  # columns to copy to the output
    predicted: PredictionColumns  # columns made from the model's outputs
    schema: Any  # schema of the output
    shard_rows: int | None  # input rows per shard; None: one file

    @property
    def read(self) -> list[str]:
        """Columns to read."""
        columns = [*itertools.chain.from_iterable(self.form.columns.values()), *self.keep]
        return list(dict.fromkeys(columns))

    def list_columns_unknown_to_run(self) -> list[str]:
        """Returns the columns that the run's table did not have; empty if its columns are unknown."""
        reading = self.form.state.reading
        unused = to_words(reading.get("unused"))
        if unused is None:
            return []
        known = {*self.read, to_word(reading.get("target")), *unused}
        return [name for name in self.source.schema.names if name not in known]


@dataclass(frozen=True)
class Chunk:
    """Rows that are computed together."""

    rows: RowBatch  # with the columns that are read
    inputs: dict[str, Array]  # model inputs of the good rows, by name
    is_good: Array  # rows that are good, or that have predictions: [rows] bool

    def predict(self, task: PredictionTask, model: RowModel, report: RowReport) -> tuple[Any, int]:
        """Returns the output's rows, and the number of predictions. Raises RunError if the model fails."""
        places = np.flatnonzero(self.is_good)
        chunk = self
        if not len(places):
            return self.make_table(task, task.predicted.make_empty(), report), 0
        outputs = model.predict(self.inputs, lambda row: task.source.name(self.rows.first + int(places[row])))
        is_failed = np.zeros(len(places), bool)
        for values in outputs.values():
            is_failed |= find_failed(values).reshape(len(places), -1).any(axis=1)
        if is_failed.any():
            is_bad = np.zeros(len(self.is_good), bool)
            is_bad[places[is_failed]] = True
            faults = {int(places[row]): model.explain_failure(int(row)) for row in np.flatnonzero(is_failed)}
            report.add_problems([Problem("prediction", is_bad, faults.__getitem__)], self.rows.first)
            chunk = replace(self, is_good=self.is_good & ~is_bad)
            outputs = {name: values[~is_failed] for name, values in outputs.items()}
        return chunk.make_table(task, task.predicted.convert(outputs), report), int(chunk.is_good.sum())

    def make_table(self, task: PredictionTask, predicted: Mapping[str, Any], report: RowReport) -> Any:
        """Returns a table with the kept columns and the predictions. Bad rows are left out, or have empty predictions.

        `predicted` has the columns of the predictions, [good].
        """
        kept = pyarrow.schema([task.schema.field(name) for name in task.keep])
        columns = self.rows.table.select(list(task.keep)).cast(kept).columns
        arrays = list(predicted.values())
        if not self.is_good.all() and report.on_bad == "empty":
            places = pyarrow.array(np.cumsum(self.is_good) - 1, mask=~self.is_good)
            arrays = [array.take(places) for array in arrays]
        elif not self.is_good.all():
            columns = [column.filter(pyarrow.array(self.is_good)) for column in columns]
        return pyarrow.Table.from_arrays([*columns, *arrays], schema=task.schema)


def find_failed(values: Array) -> Array:
    """Returns where predicted numbers are NaN, or texts are None: bool in the shape of `values`."""
    if values.dtype.kind == "f":
        return np.isnan(values)
    return np.array([value is None for value in values])


def read_chunks(task: PredictionTask, model: RowModel, report: RowReport, skip: int) -> Iterator[Chunk]:
    """Yields all rows after the first `skip`, converted for the model.

    Raises RunError for bad rows if the report does not allow them.
    """
    from scaleflow.features.predict.compute import convert_to_inputs

    largest = model.batch_size * max(1, min(CHUNK_BATCHES, CHUNK_ROWS // model.batch_size))
    batches = task.source.read(task.read, largest, skip)
    for rows in divide_rows(batches, largest, task.shard_rows):
        inputs, is_good = convert_to_inputs(model.inputs, task.form, rows, report=report, decode=model.decode)
        report.add_inputs(inputs)
        yield Chunk(rows, inputs, is_good)


def read_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yields the items. A thread prepares the next one."""
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(next, items, None)
        item = ahead.result()
        while item is not None:
            ahead = pool.submit(next, items, None)
            yield item
            item = ahead.result()
