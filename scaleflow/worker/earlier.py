"""What an earlier run learned: finds its record for a run that resumes or fine-tunes, and gives it to the dataset."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING

from scaleflow.config.targets import bind_target, locate_target
from scaleflow.interfaces import EarlierState, LearnedState, Plan, Source
from scaleflow.runs.learned_state import read_learned_state

if TYPE_CHECKING:
    from scaleflow.training import WorkerSync


def find_earlier(plan: Plan, resumed: Path | None, worker_sync: WorkerSync) -> EarlierState | None:
    """Returns what the run that is resumed, or whose weights are taken, learned; None if there is no record.

    All workers must call it. Raises ConfigError if the record cannot be read.

    Args:
        plan: of the run.
        resumed: the folder of the run that is resumed, which only the chief may see; None for a new run.
        worker_sync: of the workers.
    """
    if resumed is not None:

        def read_text() -> str:
            state = read_learned_state(resumed)
            return json.dumps(state and state.to_json())

        record = json.loads(worker_sync.from_chief(read_text))
        return None if record is None else EarlierState(LearnedState.from_json(record))
    if plan.model.init_from is None:
        return None
    state = read_learned_state(Path(plan.model.init_from).parent)
    return None if state is None else EarlierState(state, extends=True)


def open_source(plan: Plan, earlier: EarlierState | None = None) -> Source:
    """Makes the source of a plan, with the classes of an earlier run.

    A source that takes the earlier record gets it. Other classes of its outputs are matched by name. Raises what the
    source raises, and ConfigError if the outputs are of other kinds.
    """
    from scaleflow import dataset

    target = plan.dataset.target
    make = bind_target(target)
    if earlier is None:
        return make()  # type: ignore[no-any-return]
    given = {"earlier": earlier} if takes_earlier(locate_target(target)) else {}
    return dataset.match_source(make(**given), earlier)


def takes_earlier(source_class: object) -> bool:
    """Returns whether a source has the argument `earlier`."""
    return callable(source_class) and "earlier" in inspect.signature(source_class).parameters
