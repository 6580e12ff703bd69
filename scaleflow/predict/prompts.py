"""Predictions of a language model: the texts that continue the prompts of a table, or of a folder of text files."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow

from scaleflow.errors import ConfigError
from scaleflow.interfaces.sampling import Sampling
from scaleflow.predict.columns import Array
from scaleflow.predict.language_model import LanguageModel

#: The column of a table that has the prompts, if there is one of that name.
PROMPT = "prompt"


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
    decode = None

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
