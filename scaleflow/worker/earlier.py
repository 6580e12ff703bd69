"""What an earlier run learned: finds its record for a run that resumes or fine-tunes, and gives it to the dataset."""

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

#: The keys that identify a split in its description in the event `data`.
DIGEST_KEYS = ("examples", "digest", "covers", "version")


def find_earlier(plan: Plan, resumed: Path | None, worker_sync: WorkerSync) -> EarlierState | None:
    """Returns what was learned by the run that is resumed or fine-tuned; None if there is no such run, or no record
    beside its weights.

    All workers must call it; only the chief may see the folder `resumed`. Raises ConfigError if the record cannot be
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
    """Returns what was learned by the run whose weights `model.init_from` takes; None if there is no record.

    Raises ConfigError if the record cannot be read, or if `model.init_from_preprocessing=old` needs one.
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
    """Returns how what a new run learned differs from what the run learned whose weights it takes; a note says so.

    None: there is no such run, or nothing is known about it.

    Raises ConfigError if the new run has classes or inputs that it may not have.
    """
    before = read_initial_state(plan)
    mode = plan.model.init_from_preprocessing
    setting = f"model.init_from={plan.model.init_from}"
    if before is None:
        has_meaning = learned.preprocessing or any(each.names for each in name_leaves(learned.outputs).values())
        if plan.weights is not None and has_meaning:
            emit(Note(f"{setting}: nothing is known about the preprocessing and the classes of these weights"))
        return None
    changes = LearnedChanges(before, learned, is_anew=mode == "new", maps_rows=mode != "new" and is_own_model(plan))
    if changes.is_other and (mode == "old" or (mode == "extend" and not is_own_model(plan))):
        raise ConfigError(
            f"{setting}: {changes.describe()}; which weights belong to that is not known; use the columns and classes "
            "of the first run, or model.init_from_preprocessing=new, which learns them anew"
        )
    if differences := changes.describe():
        emit(Note(f"{setting}: {differences}"))
    return changes


def describe_seen_rows(plan: Plan, learned: LearnedState | None, splits: SplitDigests) -> str:
    """Returns a note on splits with rows that the run whose weights are taken may have seen; "" without such a split.

    Nothing is said of a split that this run evaluates as that one did, and of data that is read in another way.
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
    """Returns whether the model is scaleflow's, in which the rows of weights that belong to a word are known."""
    return plan.model.target.path.startswith("scaleflow.model.")


def open_source(plan: Plan, earlier: EarlierState | None = None) -> Source:
    """Makes the source of a plan, with the classes of an earlier run.

    A source that takes the earlier record gets it. Other classes of its outputs are matched by name. Raises what the
    source raises, and ConfigError if the outputs are of other kinds.
    """
    from scaleflow import dataset

    target = plan.dataset.target
    make = bind_target(target)
    is_ours = target.path.startswith("scaleflow.")
    takes_split = is_ours and "split" in inspect.signature(locate_target(target)).parameters
    given: dict[str, Any] = {"split": plan.dataset.split} if takes_split else {}
    given |= {"earlier": earlier} if earlier is not None and takes_earlier(locate_target(target)) else {}
    source = make(**given)
    source = source if earlier is None else dataset.match_source(source, earlier)
    if plan.objective.levels is None:
        return source
    source = dataset.LevelledSource(source, plan.objective.levels)
    check_levels(source.outputs, plan.objective.levels)
    return source


def check_levels(outputs: OutputStructure, levels: Sequence[float]) -> None:
    """Raises ConfigError if quantiles of the targets cannot be predicted."""
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
