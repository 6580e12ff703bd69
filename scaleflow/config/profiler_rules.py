"""The rules about traces."""

import itertools
from collections.abc import Sequence

from scaleflow.interfaces import Plan, Rule


def has_windows_after_the_end(plan: Plan) -> bool:
    longest = plan.training.max_steps
    return longest is not None and any(last > longest for _, last in plan.profiler.windows)


def has_windows_that_overlap(plan: Plan) -> bool:
    windows = plan.profiler.windows
    return any(following <= last for (_, last), (following, _) in itertools.pairwise(windows))


PROFILER_RULES: Sequence[Rule] = (
    Rule(
        "profiler=trace & debug.fast",
        "debug.fast runs a single step, whose time is mostly compilation",
        "use profiler=none, or training.max_steps=100 instead of debug=fast",
    ),
    Rule(
        "profiler=trace & training.max_steps!=null",
        "the run ends before the last step to trace",
        "start earlier, trace fewer steps, or train longer",
        keys=("profiler.start_step", "profiler.steps", "training.max_steps"),
        only_if=has_windows_after_the_end,
    ),
    Rule(
        "profiler=trace & profiler.start_step=[]",
        "the list is empty, so there is no step to start at",
        "set profiler.start_step=50",
        keys=("profiler.start_step",),
    ),
    Rule(
        "profiler=trace",
        "a window starts before the previous one ends",
        "use starts that are further apart, or fewer steps",
        keys=("profiler.start_step", "profiler.steps"),
        only_if=has_windows_that_overlap,
    ),
    Rule(
        "profiler=trace & debug.eager",
        "the trace would show Python's time, not that of a compiled run",
        "use only one of the two",
    ),
    Rule(
        "profiler=trace & training.engine=fit & training.steps_per_loop>1",
        "Keras's fit cannot run the traced steps one by one",
        "use training.steps_per_loop=1, or training.engine=loop",
    ),
    Rule(
        "profiler=trace & strategy=tpu",
        "this has not been tried on a TPU, and the trace of a TPU on the network contains only the host's part",
        "check the trace before you trust its summary",
        "warning",
    ),
)
