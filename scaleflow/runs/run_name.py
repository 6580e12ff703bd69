"""The name of a run: what was typed for its model and optimizer, and its main options."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from scaleflow.interfaces import Plan
from scaleflow.interfaces.secret_masking import MASK, mask_override

#: The overrides that a run's name tells, since its other parts do not.
TOLD_BY_NAME = re.compile(r"\+*(optimizer|(model|optimizer)\.[\w.]+)=")

#: The most letters of a value in a run's name.
MOST = 24


def label_overrides(overrides: Sequence[str]) -> str:
    """Returns the keys of model and optimizer that were typed, for the run's name: `units=64 learning_rate=0.1`.

    Secrets are left out, and long values are cut. A later override of a key replaces an earlier one.
    """
    typed = dict(mask_override(word).lstrip("+").split("=", 1) for word in overrides if TOLD_BY_NAME.match(word))
    last = Counter(key.rpartition(".")[2] for key in typed)
    names = {key: leaf if last[leaf := key.rpartition(".")[2]] == 1 else key for key in typed}
    values = {key: " ".join(value.split()) for key, value in typed.items() if MASK not in value}
    return " ".join(f"{names[key]}={value[:MOST]}{'...' if value[MOST:] else ''}" for key, value in values.items())


def make_run_name(plan: Plan, resolved: Mapping[str, Any], label: str) -> str:
    """Returns the name of the run: `tracking.run_name` and the label, or the label and the main options.

    The label comes before the options because lists of runs show only the first 20 letters of a name.
    """
    if plan.tracking.run_name:
        return f"{plan.tracking.run_name} {label}".rstrip()
    chosen = plan.choices
    parts = (chosen.get("dataset", "?"), chosen.get("model", "?"), resolved["strategy"], resolved["precision"])
    words = label.split()
    return f"{label} {'-'.join(part for part in parts if part not in words)}".strip()
