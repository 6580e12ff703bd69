"""What features do in a run, at fixed points of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scaleflow.interfaces.config import Plan
from scaleflow.interfaces.data import Rows, Source
from scaleflow.interfaces.events import Emit
from scaleflow.interfaces.training import Workers


@dataclass(frozen=True, kw_only=True)
class ReadData:
    """The data of a run, or of an evaluation, before their preprocessing."""

    plan: Plan
    source: Source
    #: The splits by name, that for training first; of an evaluation, the evaluated one alone.
    splits: Mapping[str, Rows]
    #: The raw inputs of a few examples.
    few: Any
    #: A sample of the training split, as columns. None in workers that are not the chief, and if there is `earlier`.
    sample: Any = None
    #: The schema of the data of an earlier run that goes on, or is evaluated; empty if it kept none. None: a new run.
    earlier: Mapping[str, Any] | None = None
    #: All workers of the run. They call each hook in the same order, with the same values except for `sample`.
    workers: Workers
    emit: Emit
    #: Emits an event after the first batch was read: data that cannot be read have an error of their own by then.
    emit_late: Emit


class WorkerHook:
    """What a feature does in each worker. Subclass it, and name the subclass in `Feature.worker`.

    An error in a hook is told in a note with the name of the feature, and does not end the run.
    """

    def after_data(self, data: ReadData) -> Mapping[str, Any]:
        """Looks at the data, before `ready`. Returns what is kept in the run's schema of them, as JSON can hold it.

        Raises:
            ConfigError: if the run is refused.
        """
        return {}
