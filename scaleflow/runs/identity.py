"""What identifies a run: which values of its config decide what it computes."""

from collections.abc import Mapping
from typing import Any

from scaleflow.config.parse import flatten_config

#: Sections and keys that do not change what a run computes: with other values of them it is the same run.
IGNORED_KEYS = (
    *("tracking", "checkpoint", "evaluation", "export", "promotion", "profiler", "sweep"),
    *("resume", "resume_data", "resume_code"),
    *("cluster.max_restarts", "cluster.stall_seconds", "cluster.start_seconds", "debug.inline"),
)

#: Keys in these sections that decide which model a run tests and exports.
MODEL_KEYS = ("checkpoint.best", "checkpoint.export")

IGNORED_SECTIONS = tuple(f"{key}." for key in IGNORED_KEYS)


def is_computed_by(key: str) -> bool:
    """Whether a key of a config decides what a run computes. A value that `auto` stood for does not."""
    return not f"{key}.".startswith(("resolved.", *IGNORED_SECTIONS))


def list_job_leaves(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a config that decide what a job computes, by their dotted keys."""
    leaves = flatten_config(config)
    return {key: value for key, value in leaves.items() if key.startswith(MODEL_KEYS) or is_computed_by(key)}
