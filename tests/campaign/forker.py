"""A server that forks the workers of one case, and may be killed: `python -m tests.campaign.forker ADDRESS`."""

from __future__ import annotations

import os
import signal
import socket
import sys

from scaleflow.launcher.processes.fork_server import ForkServer


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(64)
    alive, held = os.pipe()
    ForkServer(listener, alive).run()
    os.close(held)


if __name__ == "__main__":
    main()
