"""The event of `scaleflow check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scaleflow.interfaces.events import Event


class DataChecked(Event, event="checked"):
    """`scaleflow check` has looked at a dataset."""

    findings: Sequence[Mapping[str, Any]]  # `rule`, `level`, `text`, `because` and `columns` of each, the worst first
    splits: Mapping[str, Mapping[str, int]]  # by split, the numbers of `examples` and of examples `looked_at`
