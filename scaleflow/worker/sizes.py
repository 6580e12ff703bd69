"""Fills in values that depend on the training split: `by_size`, and the monitor of the best checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scaleflow.config.plan import find_batch_multiple
from scaleflow.config.targets import locate_target
from scaleflow.config.words import TABLES
from scaleflow.errors import ConfigError
from scaleflow.interfaces import BY_SIZE, Plan
from scaleflow.interfaces.recording_config import Best
from scaleflow.worker.data import PreparedData

if TYPE_CHECKING:
    from scaleflow.dataset import Splits


#: The function of the model that tables get for keys that the default model lacks.
MLP = "scaleflow.model.mlp.build"


def fill_sizes(plan: Plan, data: PreparedData) -> tuple[Plan, PreparedData, Mapping[str, Any]]:
    """Replaces `by_size` in the plan. All workers get the same numbers.

    Returns:
        The plan, the data in global batches of its size, and the values for the `resolved.` params by key.

    Raises:
        ConfigError: if the model's function has no rule for an argument that is `by_size`.
    """
    from scaleflow import training

    examples = len(data.splits.train)
    batching = data.runtime.batching
    parts = batching.replicas * batching.accumulate * find_batch_multiple(plan)
    options = training.choose_length_by_size(plan.training, examples, parts)
    arguments = fill_arguments(plan, data)
    target = replace(plan.model.target, arguments={**plan.model.target.arguments, **arguments})
    if data.splits.folds and target.arguments.get("shared", True):
        cause, advice = "model.shared: is missing", "add shared: by_size to the model's config"
        if plan.resume is not None:
            cause, advice = f"resume={plan.resume}: an earlier version began this run", "start a new run"
        raise ConfigError(
            f"{cause}, so that the members share embeddings, and their validation of each other is not honest; {advice}"
        )
    found: dict[str, Any] = {f"model.{key}": json.dumps(value) for key, value in arguments.items()}
    if plan.training.epochs == BY_SIZE:
        found["training.epochs"] = options.epochs
    if options.global_batch_size is not None and plan.training.global_batch_size is None:
        # What is typed is of one replica.
        found["training.batch_size"] = options.global_batch_size // (batching.replicas * batching.accumulate)
        data = data.divide(options)
    return replace(plan, training=options, model=replace(plan.model, target=target)), data, found


def describe_sizes(plan: Plan, sizes: Mapping[str, Any], splits: Splits) -> str:
    """Returns a note on the model of a table, the values that `fill_sizes` found, and the folds; "" without these."""
    is_table, chosen = plan.choices.get("dataset") in TABLES, plan.choices.get("model")
    found = ", ".join(f"{key}={value}" for key, value in sizes.items() if not str(value).startswith("{"))
    parts = [f"{len(splits.train):,} training examples get {found}"] if found else []
    if splits.folds:
        parts.append(f"each member leaves out one of {splits.folds} parts of them, and is validated on that")
    if is_table and chosen == "mlp" and plan.model.target.path == MLP:
        parts = ["not model=tabular, the default of tables", *parts]
    text = "; ".join(parts)
    return f"model={chosen}: {text}" if is_table and text else text


def fill_arguments(plan: Plan, data: PreparedData) -> dict[str, Any]:
    """Returns the values for the model's arguments that are `by_size`, which its function's `choose_sizes` knows.

    Those of the run whose weights are taken stay, and those of new columns are added.
    """
    target = plan.model.target
    wanted = [name for name, value in target.arguments.items() if value == BY_SIZE]
    if not wanted:
        return {}
    known = choose_model_sizes(plan, data)
    for name in wanted:
        if name not in known:
            raise ConfigError(f"model.{name}={BY_SIZE}: {target.path} has no rule for it; set a number, or model=mlp")
        if isinstance(known[name], Mapping):
            known[name] = {**known[name], **data.sizes.get(name, {})}
        else:
            known[name] = data.sizes.get(name, known[name])
    return {name: known[name] for name in wanted}


def choose_model_sizes(plan: Plan, data: PreparedData) -> dict[str, Any]:
    """Returns what the model's function knows of arguments that can be `by_size`; empty if there are none."""
    choose = getattr(locate_target(plan.model.target), "choose_sizes", None)
    return {} if choose is None else dict(choose(data.splits.inputs, len(data.splits.train), data.splits.folds))


def list_model_sizes(plan: Plan, data: PreparedData) -> dict[str, Any]:
    """Returns the model's arguments that can be `by_size`, as they are in a plan without that word."""
    return {name: plan.model.target.arguments.get(name, size) for name, size in choose_model_sizes(plan, data).items()}


def choose_best_checkpoint(plan: Plan, validates: bool) -> Plan:
    """Replaces `auto` in `checkpoint.best`: without a validation split there is no best checkpoint."""
    checkpoint, best = plan.checkpoint, plan.checkpoint.best
    if best is None or best.monitor != "auto":
        return plan
    if validates:
        return replace(plan, checkpoint=replace(checkpoint, best=replace(best, monitor=Best.monitor)))
    return replace(plan, checkpoint=replace(checkpoint, best=None, export="last"))
