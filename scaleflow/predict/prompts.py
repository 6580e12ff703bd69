"""Predictions of a language model: the texts that continue the prompts of a table, or of a folder of text files."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from scaleflow.errors import ConfigError, RunError
from scaleflow.files.table_formats import CsvForm
from scaleflow.interfaces.sampling import Sampling
from scaleflow.predict.columns import Array
from scaleflow.predict.language_model import LanguageModel
from scaleflow.predict.source import Rows

#: Suffixes of files of which each is a prompt.
SUFFIXES = (".txt", ".md")

#: The columns of such files, and the column of a table that has the prompts, if there is one of that name.
FILE, PROMPT = "file", "prompt"


@dataclass(frozen=True)
class PromptFiles:
    """Text files, of which each is a row: its path and its text. It has the interface of `TableSource`."""

    files: tuple[str, ...]
    form: CsvForm = field(default_factory=CsvForm)
    schema: Any = field(default_factory=lambda: pyarrow.schema([(name, pyarrow.string()) for name in (FILE, PROMPT)]))

    def count_rows(self) -> int:
        return len(self.files)

    def read(self, columns: Sequence[str], at_once: int, skip: int = 0) -> Iterator[Rows]:
        """Yields the files without the first `skip`. Raises RunError if one cannot be read."""
        for path in self.files[skip:]:
            try:
                text = Path(path).read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise RunError(f"{path}: cannot be read as UTF-8 text: {error}") from error
            yield Rows(path, 0, pyarrow.table({FILE: [path], PROMPT: [text]}, self.schema).select(list(columns)))


class TextColumns:
    """The column that generated texts become."""

    def convert(self, values: Mapping[str, Array]) -> dict[str, Any]:
        return {"prediction": pyarrow.array(values[""], pyarrow.string())}

    def make_empty(self) -> dict[str, Any]:
        return self.convert({"": np.zeros(0, object)})

    def make_schema(self) -> Any:
        return pyarrow.schema([("prediction", pyarrow.string())])


class PromptModel:
    """Continues prompts. It has the interface of `DistributedModel`.

    Args:
        model: the language model.
        sampling: how the texts are generated. Each row draws its own tokens.
    """

    batch_size = 1

    def __init__(self, model: LanguageModel, sampling: Sampling) -> None:
        from scaleflow.predict.compute import TEXT

        self.inputs: Mapping[str, Any] = {"": TEXT}
        self._model, self._sampling = model, sampling
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


def are_prompt_files(files: Sequence[str]) -> bool:
    return all(Path(file).suffix.lower() in SUFFIXES for file in files)


def choose_prompt_column(names: Sequence[str], typed: Collection[str], usual: Any) -> str:
    """Returns the column of a table that has the prompts.

    Args:
        names: of the columns.
        typed: `--columns`.
        usual: the column that the run trained on.

    Raises:
        ConfigError: if there is no such column, or it is not clear which one it is.
    """
    wanted = [*typed] or [name for name in (PROMPT, usual) if name in names][:1] or [*names]
    if len(wanted) != 1 or wanted[0] not in names:
        columns = ", ".join(names)
        if typed:
            raise ConfigError(f"--columns {','.join(typed)}: expected the column with the prompts, one of {columns}")
        raise ConfigError(f"--input: which column has the prompts? Add --columns NAME; the table has {columns}")
    return wanted[0]
