"""Ends a worker whose launcher is gone, after it has had the time to save."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import BinaryIO

#: Seconds that a worker has to save and end after its launcher is gone.
SECONDS_TO_SAVE = 30.0


def end_with_launcher(pipe: BinaryIO, released: threading.Event, stop: threading.Event, patience: float) -> None:
    """Releases this process at the launcher's first byte, and asks it to save and end when the launcher is gone.

    A process that hangs in a collective operation is ended.

    `pipe` is at its end when the launcher is gone; `stop` is set to ask for the end; `patience` is the seconds until
    the process is ended.
    """
    while pipe.read(1):
        released.set()
    print("the launcher has ended, so this worker ends, too", file=sys.stderr, flush=True)
    if patience and released.is_set():
        stop.set()
        time.sleep(patience)
    os._exit(1)
