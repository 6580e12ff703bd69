"""Requests to stop a run: Ctrl-C and SIGTERM."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

#: Seconds that the processes have to save and end after SIGTERM, before they are killed.
GRACE_SECONDS = 30.0


class StopRequest:
    """A signal handler that remembers whether the user or the system asked for the end of the run.

    Attributes:
        signal: the number of the first signal; None if there was none.
        times: the number of signals.
        limit: the limit that has passed, if that is the reason and no signal; else empty.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.times = 0
        self.limit = ""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self.times += 1

    def is_set(self) -> bool:
        return self.signal is not None

    def check(self) -> None:
        """Raises Stopped if the end was asked for."""
        if self.is_set():
            raise Stopped(self)

    @property
    def signal_name(self) -> str:
        """`SIGINT` or `SIGTERM`; of a limit what was typed."""
        return self.limit or signal.Signals(self.signal or signal.SIGTERM).name

    @property
    def exit_code(self) -> int:
        """The exit code of a command that was stopped: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + (self.signal or signal.SIGTERM)


class Stopped(Exception):
    """A signal has stopped the command, which ends with `exit_code`."""

    def __init__(self, stop: StopRequest) -> None:
        super().__init__(f"stopped by {stop.signal_name}")
        self.exit_code = stop.exit_code


class PartStop(StopRequest):
    """Requests the end of a part of what a command does: together with all of it, or alone."""

    def __init__(self, whole: StopRequest) -> None:
        self._whole = whole
        self._own: int | None = None

    @property
    def signal(self) -> int | None:  # type: ignore[override]
        return self._whole.signal or self._own

    @property
    def times(self) -> int:  # type: ignore[override]
        return self._whole.times

    @property
    def limit(self) -> str:  # type: ignore[override]
        return self._whole.limit

    def end_part(self) -> None:
        self._own = signal.SIGTERM


@contextlib.contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Turns SIGINT and SIGTERM into a `StopRequest` while the block lasts.

    Only the main thread can do that. In other threads the request is never set.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
