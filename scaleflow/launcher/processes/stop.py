"""Requests to stop a run: Ctrl-C and SIGTERM."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

#: Seconds that processes have to save and end after SIGTERM. Then they are killed.
GRACE_SECONDS = 30.0


class StopRequest:
    """A signal handler that remembers whether the user or the system requested the end of the run.

    Attributes:
        signal: the number of the first signal; None without a signal.
        times: the number of signals.
        limit: the limit that was reached, if it is the reason instead of a signal; otherwise empty.
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
        """Raises Stopped if the end was requested."""
        if self.is_set():
            raise Stopped(self)

    @property
    def signal_name(self) -> str:
        """`SIGINT` or `SIGTERM`; if a limit was reached, the words that set it."""
        return self.limit or signal.Signals(self.signal or signal.SIGTERM).name

    @property
    def exit_code(self) -> int:
        """The exit code of a command that was stopped: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + (self.signal or signal.SIGTERM)


class Stopped(Exception):
    """A signal stopped the command. It ends with `exit_code`."""

    def __init__(self, stop: StopRequest) -> None:
        super().__init__(f"stopped by {stop.signal_name}")
        self.exit_code = stop.exit_code


class PartStop(StopRequest):
    """Requests the end of a part of a command's work, alone or together with the whole command."""

    def __init__(self, whole: StopRequest) -> None:
        self._whole = whole
        self._own_signal: int | None = None

    @property
    def signal(self) -> int | None:  # type: ignore[override]
        return self._whole.signal or self._own_signal

    @property
    def times(self) -> int:  # type: ignore[override]
        return self._whole.times

    @property
    def limit(self) -> str:  # type: ignore[override]
        return self._whole.limit

    def end_part(self) -> None:
        self._own_signal = signal.SIGTERM


@contextlib.contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Turns SIGINT and SIGTERM into a `StopRequest` during the block.

    Only the main thread can catch signals. In other threads the request is never set.
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
