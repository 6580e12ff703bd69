"""Shows what is written to the standard output of a script's process without `sys.stdout`.

Programs that the script starts write there, and so does TensorFlow's C++ code.
"""

from __future__ import annotations

import codecs
import os
import select
import threading
from typing import Any

from scaleflow.features.script.printing import LineStream, PrintedLines
from scaleflow.interfaces.secret_masking import MaskedStream

#: The descriptor of the standard output.
STDOUT = 1

#: Seconds between two looks whether the script has ended.
SECONDS_BETWEEN_LOOKS = 0.1

#: Maximum number of bytes that are read in one piece.
MAX_BYTES = 65536


class DescriptorOutput:
    """Replaces the standard output of the process by a pipe until `close`, and collects the lines from it.

    What the pipe gets is also written to the former output, the log of the process.

    Attributes:
        stream: the `sys.stdout` of the script.
    """

    def __init__(self, lines: PrintedLines) -> None:
        kept = os.dup(STDOUT)
        log: Any = MaskedStream(os.fdopen(kept, "w", buffering=1, encoding="utf-8", errors="replace"))
        self._log = log
        self._pid = os.getpid()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.stream = LineStream(log, lines, STDOUT, before_line=self.read)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._pipe, end = os.pipe()
        os.set_blocking(self._pipe, False)
        os.dup2(end, STDOUT)
        os.close(end)
        os.register_at_fork(after_in_child=self._close_in_child)
        self._thread = threading.Thread(target=self._read_repeatedly, name="descriptor output", daemon=True)
        self._thread.start()

    def read(self) -> None:
        """Collects what the pipe holds now. Does not wait for more."""
        if os.getpid() != self._pid:
            return  # a process that the script has forked must not take the lines
        with self._lock:
            while True:
                try:
                    data = os.read(self._pipe, MAX_BYTES)
                except BlockingIOError:
                    return
                if not data:
                    return
                text = self._decoder.decode(data)
                self._log.write(text)
                self.stream.collect(text)

    def close(self) -> None:
        """Restores the standard output. Programs that still run cannot write to it any more."""
        self._closing.set()
        self._thread.join()
        self.read()
        self.stream.end_line()
        self._log.flush()
        os.dup2(self._log.fileno(), STDOUT)
        self._log.close()
        os.close(self._pipe)

    def _close_in_child(self) -> None:
        """Closes the reading end in a process that the script forks: writing must fail there when nobody reads."""
        if not self._closing.is_set():
            os.close(self._pipe)

    def _read_repeatedly(self) -> None:
        while not self._closing.is_set():
            select.select([self._pipe], [], [], SECONDS_BETWEEN_LOOKS)
            self.read()
