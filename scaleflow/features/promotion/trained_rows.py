"""Evaluates a model, and finds the examples that its run was trained on, by the identity of their rows."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.interfaces import EarlierState, Plan, Rows, Workers, name_leaves
from scaleflow.interfaces.events import Emit, PhaseBegan
from scaleflow.runs import RunFolder
from scaleflow.runs.run_name import describe_data_name
from scaleflow.worker.earlier import open_source
from scaleflow.worker.evaluate import EvaluateModel

Array = np.ndarray[Any, Any]

#: The file in the folder of the evaluation: whether the run was trained on each example, [examples] bool.
SEEN = "seen.npy"


@dataclass(frozen=True, kw_only=True)
class EvaluateUnseen(EvaluateModel):
    """Evaluates a tracked model, and writes which of the examples its run was trained on."""

    trained: Plan  # the plan of the run that trained the model

    def look_at_rows(
        self, rows: Rows, plan: Plan, earlier: EarlierState, workers: Workers, files: RunFolder, emit: Emit
    ) -> None:
        write_seen(rows, plan, self.trained, earlier=earlier, workers=workers, path=files.path / SEEN, emit=emit)


def write_seen(
    examples: Rows, plan: Plan, trained: Plan, earlier: EarlierState, workers: Workers, path: Path, emit: Emit
) -> None:
    """Writes which examples of a split belong to the training examples of another run.

    An example is identified by the column `evaluation.id` if both configs name the same one, otherwise by the raw
    inputs that both runs have. Numbers are compared as float64.

    Args:
        examples: the split, before its preprocessing.
        trained: the plan of the run that was trained.
        path: the file to write, [examples] bool.

    Raises ConfigError if the data of the run cannot be read any more.
    """
    from scaleflow import dataset

    sys.path[:0] = [folder for folder in trained.search if folder not in sys.path]
    emit(PhaseBegan(f"reading {describe_data_name(trained)}, which a model was trained on"))
    column = plan.evaluation.id if plan.evaluation.id == trained.evaluation.id else None
    try:
        source = open_source(trained, earlier)
        options = replace(trained.dataset, shards=1)
        splits = dataset.prepare_splits(source, options, trained.seed, workers=workers, emit=emit, preprocesses=False)
        raw = splits.raw["train"]
        names = [] if column else find_common_inputs(examples, raw)
        known = set(identify(raw, column, names))
    except ConfigError as error:
        raise ConfigError(
            f"the rows that a model was trained on cannot be read, so they cannot be left out: {error}"
        ) from error
    is_seen = [identity in known for identity in identify(examples, column, names)]
    np.save(path, np.array(is_seen, bool))


def find_common_inputs(examples: Rows, others: Rows) -> list[str]:
    """Returns the names of inputs that are equal in kind and shape. Raises ConfigError if no input is equal."""
    common = describe_inputs(examples) & describe_inputs(others)
    if not common:
        raise ConfigError(
            "the runs have no inputs in common; train both with evaluation.id=COLUMN, which names their rows"
        )
    return sorted(name for name, *_ in common)


def describe_inputs(rows: Rows) -> set[tuple[str, bool, tuple[int, ...]]]:
    """Returns the name of each input, whether it is text, and the shape of its values."""
    inputs = name_leaves(next(rows.iterate(lambda inputs, *_: inputs), {}))
    return {(name, has_text(values), np.shape(values)[1:]) for name, values in inputs.items()}


def has_text(values: Any) -> bool:
    """Whether values are texts, or objects, which are texts in a column of a table."""
    return np.asarray(values).dtype.kind in "OSU"


def identify(examples: Rows, column: str | None, names: Sequence[str]) -> Iterator[bytes]:
    """Yields the identity of each example of a split: the value of a column, or a digest of its inputs."""
    if column is not None:
        places = np.arange(len(examples))
        (values,) = examples.open_columns([column], "evaluation.id")(places).values()
        for value in np.asarray(values).tolist():
            yield str(value).encode()
        return
    for inputs in examples.iterate(lambda inputs, *_: inputs):
        named = name_leaves(inputs)
        yield from digest_rows([np.asarray(named[name]) for name in names])


def digest_rows(columns: Sequence[Array]) -> Iterator[bytes]:
    """Yields a digest of each row of some columns, [b, ...] each. Texts may be `str` or `bytes`."""
    encoders = [encode_texts if has_text(column) else encode_numbers for column in columns]
    for row in zip(*columns, strict=True):
        digest = hashlib.blake2b(digest_size=16)
        for encode, value in zip(encoders, row, strict=True):
            digest.update(encode(value))
        yield digest.digest()


def encode_numbers(value: Any) -> bytes:
    """Returns the bytes of numbers as floats. A column of integers is read as floats if a file has a missing value."""
    return np.asarray(value).astype(np.float64).tobytes()


def encode_texts(value: Any) -> bytes:
    """Returns the bytes of a text, or of an array of texts, each preceded by its length."""
    encoded = b""
    for text in np.ravel(np.asarray(value, object)):
        content = text.encode() if isinstance(text, str) else bytes(text)
        encoded += len(content).to_bytes(8, "little") + content
    return encoded
