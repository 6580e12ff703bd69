"""Keeps failures of optional extras from ending a run.

Baselines, reports, pictures, summaries and messages are extras: a run without one of them is still good.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator

from scaleflow.errors import read_reason

#: The exit code of a process that SIGTERM stops.
TERMINATED = 143


@contextlib.contextmanager
def catch_any() -> Iterator[None]:
    """Turns `sys.exit` in other people's code into a RuntimeError, which can be caught like any other error.

    Not the exit that SIGTERM asks for.
    """
    try:
        yield
    except SystemExit as error:
        if error.code == TERMINATED:
            raise
        raise RuntimeError(f"it calls sys.exit({error.code!r})") from error


@contextlib.contextmanager
def guard_extra(
    missing: str, tell: Callable[[str], None], must_end: Callable[[Exception], bool] | None = None
) -> Iterator[None]:
    """Catches errors of the block. It reports what is missing and why, and writes the traceback to the log.

    Args:
        missing: the extra, such as `the report of the sweep`.
        tell: receives the text, for a note.
        must_end: returns whether an error must be raised, such as the loss of another process.
    """
    try:
        with catch_any():
            yield
    except Exception as error:  # an extra may fail in any way
        if must_end is not None and must_end(error):
            raise
        traceback.print_exc()
        with contextlib.suppress(Exception):  # for instance if the disk is full
            tell(f"{missing}: missing, and the rest goes on ({type(error).__name__}: {read_reason(error)})")
