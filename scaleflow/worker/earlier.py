"""Finds the learned state of an earlier run, for a run that resumes or fine-tunes it, and passes it to the dataset."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.config.plan import set_values
from scaleflow.config.targets import bind_target, locate_target
from scaleflow.errors import ConfigError
from scaleflow.interfaces import EarlierState, LearnedChanges, LearnedState, OutputStructure, Plan, Source, name_leaves
from scaleflow.interfaces.events import Emit, Note
from scaleflow.runs.data_digest import ALL_VALUES, FILES, SplitDigests
from scaleflow.runs.learned_state import find_learned_state, read_learned_state

if TYPE_CHECKING:
    from scaleflow.training import WorkerSync

#: The keys that identify a split within the event `data`.
DIGEST_KEYS = ("examples", "digest", "covers", "version")


def find_earlier(plan: Plan, resumed: Path | None, worker_sync: WorkerSync) -> EarlierState | None:
    """Returns the learned state of the run that is resumed or fine-tuned.

    Returns None if there is no such run, or no record next to its weights.

    All workers must call it; only the chief must see the folder `resumed`. Raises ConfigError if the record cannot be
    read.
    """
    if resumed is not None:

        def read_text() -> str:
            return json.dumps(read_learned_state(resumed).to_json())

        return EarlierState(LearnedState.from_json(json.loads(worker_sync.from_chief(read_text))))
    state = read_initial_state(plan)
    mode = plan.model.init_from_preprocessing
    if state is None or mode == "new":
        return None
    return EarlierState(state, extends=mode == "extend", counts_words=mode == "old" or not is_own_model(plan))


def read_initial_state(plan: Plan) -> LearnedState | None:
    """Returns the learned state of the run whose weights `model.init_from` loads; None without a record.

    Raises ConfigError if the record cannot be read, or if it is missing and `model.init_from_preprocessing=old` needs
    it.
    """
    if plan.weights is None:
        return None
    state = find_learned_state(Path(plan.weights).parent)
    if state is None and plan.model.init_from_preprocessing == "old":
        raise ConfigError(
            f"model.init_from_preprocessing=old: {plan.model.init_from} has no learned_state.json beside it, so the "
            "preprocessing of its run is not known; use a folder or a model that scaleflow wrote, or leave it out"
        )
    return state


def find_changes(plan: Plan, learned: LearnedState, emit: Emit) -> LearnedChanges | None:
    """Returns how the learned state differs from the run whose weights are loaded, and emits a note about it.

    Returns None if no weights are loaded, or if their run has no record.

    Raises ConfigError if the new run has classes or inputs that are not allowed.
    """
    before = read_initial_state(plan)
    mode = plan.model.init_from_preprocessing
    setting = f"model.init_from={plan.model.init_from}"
    if before is None:
        has_meaning = learned.preprocessing or any(output.names for output in name_leaves(learned.outputs).values())
        if plan.weights is not None and has_meaning:
            emit(Note(f"{setting}: nothing is known about the preprocessing and the classes of these weights"))
        return None
    changes = LearnedChanges(before, learned, is_anew=mode == "new", maps_rows=mode != "new" and is_own_model(plan))
    if changes.is_other and (mode == "old" or (mode == "extend" and not is_own_model(plan))):
        raise ConfigError(
            f"{setting}: {changes.describe()}; which weights belong to that is not known; use the columns and classes "
            "of the first run, or model.init_from_preprocessing=new, which learns them anew"
        )
    differences = changes.describe()
    if differences:
        emit(Note(f"{setting}: {differences}"))
    return changes


def describe_seen_rows(plan: Plan, learned: LearnedState | None, splits: SplitDigests) -> str:
    """Returns a note on evaluated splits that may contain rows on which the loaded weights were trained; "" if none
    may.

    It ignores splits that are equal in both runs, and data that is read differently.
    """
    before = read_initial_state(plan)
    if before is None or learned is None or before.source != learned.source:
        return ""

    def is_same(name: str, other: str) -> bool:
        now = splits[name]
        known = before.splits.get(other, {})
        return now["covers"] in (ALL_VALUES, FILES) and all(known.get(key) == now[key] for key in DIGEST_KEYS)

    evaluated = [name for name in ("validation", "test") if name in splits]
    doubtful = [name for name in evaluated if is_same(name, "train") or not is_same(name, name)]
    if not doubtful:
        return ""
    return (
        f"model.init_from={plan.model.init_from}: if its run was trained on rows of the split "
        f"{' or '.join(doubtful)}, the figures of that are too good"
    )


def is_own_model(plan: Plan) -> bool:
    """Returns whether the model is scaleflow's own: then it is known which rows of its weights belong to which word."""
    return plan.model.target.path.startswith("scaleflow.model.")


def open_source(plan: Plan, earlier: EarlierState | None = None) -> Source:
    """Opens the dataset of a plan. Its classes match those of an earlier run, if there is one.

    A source with the argument `earlier` gets the earlier record. Otherwise classes are matched by name. Raises the
    source's own errors, and ConfigError if the outputs are of another kind.
    """
    from scaleflow import dataset

    target = plan.dataset.target
    make = bind_target(target)
    is_ours = target.path.startswith("scaleflow.")
    takes_split = is_ours and "split" in inspect.signature(locate_target(target)).parameters
    arguments: dict[str, Any] = {}
    if takes_split:
        arguments["split"] = plan.dataset.split
    if earlier is not None and takes_earlier(locate_target(target)):
        arguments["earlier"] = earlier
    source = make(**arguments)
    source = source if earlier is None else dataset.match_source(source, earlier)
    if plan.objective.levels is None:
        return source
    source = dataset.LevelledSource(source, plan.objective.levels)
    check_levels(source.outputs, plan.objective.levels)
    return source


def check_levels(outputs: OutputStructure, levels: Sequence[float]) -> None:
    """Raises ConfigError if the targets do not allow quantiles."""
    import numpy as np

    from scaleflow.evaluation.collector import choose_form
    from scaleflow.serving.prediction_columns import make_prediction_columns

    if isinstance(outputs, Mapping):
        raise ConfigError(
            f"objective.levels: is for one output, and the dataset has {len(outputs)} outputs; leave it null"
        )
    if outputs.kind != "regression" or len(outputs.shape) != 1 or choose_form(outputs) != "values":
        has = f"{outputs.kind} targets {outputs.shape}"
        raise ConfigError(f"objective.levels: is for one or a few numbers, and the dataset has {has}; leave it null")
    columns = make_prediction_columns({"": outputs}, {"": np.zeros((0, *outputs.model_shape))})
    if len(columns) < outputs.shape[0] * (1 + len(levels)):
        raise ConfigError(
            f"objective.levels={list(levels)}: two columns of predictions would have one name, of levels that are "
            f"equal to ten digits, or of the values {', '.join(outputs.names or ['prediction'])}; leave a level out, "
            "or rename a value"
        )


def take_whole(plan: Plan) -> Plan:
    """Returns the plan without test and validation splits that would be drawn from the training split."""
    target = plan.dataset.target
    values: dict[str, Any] = {"dataset.validation": None, "dataset.split": "random"}
    if target.path.startswith("scaleflow.") and "test" in inspect.signature(locate_target(target)).parameters:
        values["dataset.test"] = 0.0
    return set_values(plan, values)


def takes_earlier(source_class: object) -> bool:
    """Returns whether a source has the argument `earlier`."""
    return callable(source_class) and "earlier" in inspect.signature(source_class).parameters
