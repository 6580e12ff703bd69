"""A dataset as MLflow shows it among a run's inputs, from what a worker tells: made without TensorFlow or pandas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.types import Schema, TensorSpec
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

#: What MLflow's store takes of a profile or a source.
LONGEST = 16_000


def make_dataset_inputs(told: Mapping[str, Any]) -> list[DatasetInput]:
    """One to each split; the tag `mlflow.data.context` says which it is."""
    return [
        DatasetInput(describe_split(told, split), [InputTag(MLFLOW_DATASET_CONTEXT, name)])
        for name, split in told["splits"].items()
    ]


def describe_split(told: Mapping[str, Any], split: Mapping[str, Any]) -> Dataset:
    source_type, source = make_dataset_source(told["source"])
    profile = {"num_rows": split["examples"], "kind": told["kind"]}
    if told["classes"]:
        profile["classes"] = told["classes"]
    if len(json.dumps(profile)) > LONGEST:
        profile["classes"] = len(told["classes"])
    tensors = {name: to_tensor_spec(split[name]).to_json() for name in ("inputs", "targets")}
    schema = {"mlflow_tensorspec": {"features": tensors["inputs"], "targets": tensors["targets"]}}
    return Dataset(
        name=told["name"],
        digest=split["digest"],
        source_type=source_type,
        source=json.dumps(source)[:LONGEST],
        schema=json.dumps(schema),
        profile=json.dumps(profile),
    )


def make_dataset_source(told: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A kind of source that MLflow knows, and what it needs: a path, or else the code that gives the data."""
    if told["path"] is not None:
        return "local", {"uri": told["path"]}
    arguments = {key: json.dumps(value, default=str) for key, value in told["arguments"].items()}
    return "code", {"tags": {"_target_": told["target"], **arguments}}


def to_tensor_spec(told: Mapping[str, Any]) -> Schema:
    kind = np.dtype(object if told["dtype"] == "string" else told["dtype"])
    return Schema([TensorSpec(kind, (-1, *told["shape"]))])
