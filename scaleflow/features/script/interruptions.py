"""Exceptions that end a script from within.

They are no `Exception`: a script that catches all exceptions does not catch them.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

#: The folder of scaleflow's own code.
PACKAGE = Path(__file__).parents[2]

#: The module that executes the script.
RUNNER = Path(__file__).with_name("run_script.py")

#: Seconds after which Ctrl-C is tried again, if it came while scaleflow's own code ran.
SECONDS_BETWEEN_TRIES = 0.05


class ScriptStopped(BaseException):
    """The run is asked to stop."""


class ScriptInterrupted(ScriptStopped, KeyboardInterrupt):
    """Ctrl-C asks the run to stop. The script's `except KeyboardInterrupt` runs, as in plain Python."""


class ScriptRefused(BaseException):
    """The script does something that the command does not allow. The text is for the user."""


class StopRequests:
    """The request to stop a script. The script gets it once as an exception, and again at the end of each later `fit`.

    Args:
        should_stop: returns True if the run is asked to stop.

    Attributes:
        was_raised: whether the script got the request. It may have caught it.
    """

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop
        self._is_interrupt = False
        self._catches = False
        self.was_raised = False

    def is_asked(self) -> bool:
        return self._is_interrupt or self._should_stop()

    def raise_if_asked(self) -> None:
        """Raises ScriptStopped, or ScriptInterrupted after Ctrl-C, if the run is asked to stop."""
        if not self.is_asked():
            return
        self.was_raised = True
        raise ScriptInterrupted if self._is_interrupt else ScriptStopped

    @contextlib.contextmanager
    def catch_interrupts(self) -> Iterator[None]:
        """Raises ScriptInterrupted at Ctrl-C, at the line that the script runs inside the `with` block.

        While scaleflow's own code runs, such as a `fit` that it records, the exception waits for its end.
        """
        before = signal.signal(signal.SIGINT, self._interrupt)
        self._catches = True
        try:
            yield
        finally:
            self._catches = False
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupt = True
        if self.was_raised:
            return
        if runs_own_code(frame):
            again = threading.Timer(SECONDS_BETWEEN_TRIES, self._interrupt_again)
            again.daemon = True
            again.start()
            return
        self.was_raised = True
        raise ScriptInterrupted

    def _interrupt_again(self) -> None:
        if self._catches and not self.was_raised:
            signal.raise_signal(signal.SIGINT)


def runs_own_code(frame: FrameType | None) -> bool:
    """Returns whether the script has called scaleflow's code, which is running."""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file == RUNNER:
            return False
        if file.is_relative_to(PACKAGE):
            return True
        frame = frame.f_back
    return True
