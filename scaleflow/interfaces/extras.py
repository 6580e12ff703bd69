"""Keeps an extra that only informs from ending what it informs about.

Baselines, reports, pictures, summaries and messages are extras: a run without one of them is as good.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator

from scaleflow.errors import read_reason


@contextlib.contextmanager
def guard_extra(
    missing: str, tell: Callable[[str], None], must_end: Callable[[Exception], bool] | None = None
) -> Iterator[None]:
    """Lets the block fail: a text then names what is missing, and why, and the traceback goes to the log.

    Args:
        missing: the extra, such as `the report of the sweep`.
        tell: gets the text, for a note.
        must_end: returns whether an error is not the extra's own, such as the loss of another process; it is raised.
    """
    try:
        yield
    except Exception as error:  # an extra may fail in any way
        if must_end is not None and must_end(error):
            raise
        traceback.print_exc()
        with contextlib.suppress(Exception):  # such as a full disk
            tell(f"{missing}: missing, and the rest goes on ({type(error).__name__}: {read_reason(error)})")
