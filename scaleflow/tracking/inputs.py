"""Converts the event `data` of a worker to MLflow dataset inputs, without TensorFlow or pandas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Run
from mlflow.types import Schema
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

from scaleflow.interfaces.events import DatasetDescribed
from scaleflow.tracking.mlflow_model import to_tensor_spec

#: Maximum length of a profile or source in MLflow's store, in characters.
MAX_TEXT = 16_000

#: The context of a dataset that `scaleflow evaluate` used after the run.
EVALUATED = "evaluate"

#: Keys of a profile about its digest: the part of the split that it covers, and the version of its computation.
DIGEST_KEYS = ("covers", "version")


def make_dataset_inputs(data: DatasetDescribed) -> list[DatasetInput]:
    """Returns one input per split. The tag `mlflow.data.context` names the split."""
    inputs = []
    for name, split in data.splits.items():
        tag = InputTag(MLFLOW_DATASET_CONTEXT, name)
        inputs.append(DatasetInput(describe_split(data, split), [tag]))
    return inputs


def describe_split(data: DatasetDescribed, split: Mapping[str, Any]) -> Dataset:
    """Returns a split as MLflow's description of a dataset."""
    source_type, source = make_dataset_source(data.source)
    profile = {"num_rows": split["examples"], "kind": data.kind}
    for key in DIGEST_KEYS:
        profile[f"digest_{key}"] = split[key]
    if data.classes:
        profile["classes"] = data.classes
    if len(json.dumps(profile)) > MAX_TEXT:
        profile["classes"] = count_class_names(data.classes)
    tensors = {"features": to_schema(split["inputs"]).to_json(), "targets": to_schema(split["targets"]).to_json()}
    schema = {"mlflow_tensorspec": tensors}
    return Dataset(
        name=data.name,
        digest=split["digest"],
        source_type=source_type,
        source=json.dumps(source)[:MAX_TEXT],
        schema=json.dumps(schema),
        profile=json.dumps(profile),
    )


def read_dataset_inputs(run: Run) -> dict[str, dict[str, Any]]:
    """Returns `examples`, `digest`, `covers` and `version` of each split that is an input of a run.

    Datasets of later evaluations are left out. If the run was resumed with changed data, a split has several inputs,
    and only `version` is returned for it, with the value None.
    """
    splits: dict[str, dict[str, Any]] = {}
    for dataset_input in run.inputs.dataset_inputs if run.inputs else ():
        profile = json.loads(dataset_input.dataset.profile or "{}")
        split = {"examples": profile.get("num_rows"), "digest": dataset_input.dataset.digest}
        for key in DIGEST_KEYS:
            split[key] = profile.get(f"digest_{key}")
        for tag in dataset_input.tags:
            if tag.key != MLFLOW_DATASET_CONTEXT or tag.value == EVALUATED:
                continue
            is_same = splits.get(tag.value, split) == split
            splits[tag.value] = split if is_same else {"version": None}
    return splits


def count_class_names(classes: Any) -> Any:
    """Returns the number of class names; with several outputs, a dict with the number for each."""
    if isinstance(classes, Mapping):
        return {output: count_class_names(names) for output, names in classes.items()}
    return len(classes)


def make_dataset_source(source: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns one of MLflow's source types and its content: the path of the data, or the code that loads it."""
    if source["path"] is not None:
        return "local", {"uri": source["path"]}
    arguments = {key: json.dumps(value, default=str) for key, value in source["arguments"].items()}
    return "code", {"tags": {"_target_": source["target"], **arguments}}


def to_schema(specs: Mapping[str, Any]) -> Schema:
    """Converts the dtype and shape of one example's tensor, or of a dict of tensors, to an MLflow schema."""
    is_single = isinstance(specs.get("dtype"), str)
    named = {None: specs} if is_single else specs
    tensors = []
    for name, spec in named.items():
        batch = {**spec, "shape": (-1, *spec["shape"])}
        tensors.append(to_tensor_spec(batch, name))
    return Schema(tensors)
