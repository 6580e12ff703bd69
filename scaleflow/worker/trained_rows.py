"""Finds the examples of a split that another run was trained on, by the identity of rows."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scaleflow.errors import ConfigError
from scaleflow.interfaces import EarlierState, Examples, Plan, name_leaves
from scaleflow.interfaces.events import Emit, StageBegan
from scaleflow.worker.earlier import open_source
from scaleflow.worker.metadata import describe_data_name

if TYPE_CHECKING:
    from scaleflow.worker.runtime import Runtime

Array = np.ndarray[Any, Any]


def write_seen(
    examples: Examples, plan: Plan, trained: Plan, earlier: EarlierState, runtime: Runtime, path: Path, emit: Emit
) -> None:
    """Writes which examples of a split are among those that a run was trained on.

    An example is identified by the column `evaluation.id`, if both configs have the same, otherwise by its raw inputs,
    as the run reads them.

    Args:
        examples: the split, before its preprocessing.
        plan: that it was read with.
        trained: the plan of the run that was trained.
        earlier: what that run learned.
        runtime: of this process.
        path: of the file, [examples] bool.
        emit: receives stages.

    Raises:
        ConfigError: if the data of the run cannot be read any more.
    """
    from scaleflow import dataset

    sys.path[:0] = [each for each in trained.search if each not in sys.path]
    emit(StageBegan(f"reading {describe_data_name(trained)}, which the champion was trained on"))
    column = plan.evaluation.id if plan.evaluation.id == trained.evaluation.id else None
    try:
        source = open_source(trained, earlier)
        options = replace(trained.dataset, shards=1, augment=None)
        splits = dataset.prepare_splits(source, options, trained.seed, runtime.worker_sync, emit, preprocesses=False)
        known = set(identify(splits.raw["train"], column))
    except ConfigError as error:
        raise ConfigError(
            f"the rows that the champion was trained on cannot be read, so they cannot be left out: {error}"
        ) from error
    np.save(path, np.array([each in known for each in identify(examples, column)], bool))


def identify(examples: Examples, column: str | None) -> Iterator[bytes]:
    """Yields what identifies each example, in the order of the split."""
    from scaleflow import dataset

    if column is not None:
        places = np.arange(len(examples))
        (values,) = dataset.open_columns(examples, [column], "evaluation.id")(places).values()
        yield from (str(value).encode() for value in np.asarray(values).tolist())
        return
    for inputs in dataset.read_input_batches(examples):
        yield from digest_rows(name_leaves(inputs))


def digest_rows(inputs: Mapping[str, Array]) -> Iterator[bytes]:
    """Yields a digest of the raw inputs of each example, [b, ...] by name; texts may be `str` or `bytes`."""
    names = sorted(inputs)
    columns = [np.asarray(inputs[name]) for name in names]
    label = repr([(name, each.dtype.kind in "OSU", each.shape[1:]) for name, each in zip(names, columns, strict=True)])
    for row in zip(*columns, strict=True):
        digest = hashlib.blake2b(label.encode(), digest_size=16)
        for value in row:
            is_text = isinstance(value, str | bytes) or np.asarray(value).dtype.kind in "OSU"
            digest.update(encode_texts(value) if is_text else np.ascontiguousarray(value).tobytes())
        yield digest.digest()


def encode_texts(value: Any) -> bytes:
    """Returns the bytes of a text, or of an array of texts, each after its length."""
    texts = [each.encode() if isinstance(each, str) else bytes(each) for each in np.ravel(np.asarray(value, object))]
    return b"".join(len(text).to_bytes(8, "little") + text for text in texts)
