"""The datasets of a run in MLflow, as they are read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def read_inputs() -> dict[str, dict[str, Any]]:
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

    from scaleflow.tracking.inputs import read_dataset_inputs

    profile = json.dumps({"num_rows": 9, "digest_covers": "all", "digest_version": 2})
    given = [
        DatasetInput(Dataset("table", digest, "local", "{}", profile=profile), [InputTag(MLFLOW_DATASET_CONTEXT, name)])
        for name, digest in (("train", "a"), ("test", "b"), ("evaluate", "b"), ("train", "c"))
    ]
    run: Any = SimpleNamespace(inputs=SimpleNamespace(dataset_inputs=given))
    return read_dataset_inputs(run)


def test_what_a_run_was_evaluated_on_is_none_of_its_splits(isolated: Callable[..., Any]) -> None:
    assert isolated(read_inputs) == {
        "train": {"version": None},
        "test": {"examples": 9, "digest": "b", "covers": "all", "version": 2},
    }
