"""A warm server in a fork of the session's server, which has imported everything: it is ready at once."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path

import hydra_plugins
from scaleflow.features.warm import forked_command, server


def main() -> None:
    """Serves at the socket that the line on standard input names, with other constants of the module."""
    options = json.loads(sys.stdin.buffer.raw.readline())  # type: ignore[attr-defined]
    for name, value in options["constants"].items():
        setattr(server, name, value)
    server.WarmServer.check_seconds = 0.05
    sys.path += filter(None, [options["packages"]])
    forked_command.PLUGIN_FOLDERS[:] = hydra_plugins.__path__
    listener = socket.socket(socket.AF_UNIX)
    part = Path(options["socket"]).with_suffix(".part")
    listener.bind(str(part))
    listener.listen(64)
    part.rename(options["socket"])
    warm = server.WarmServer(listener, server.ServerFiles(part.parent, part.stem))
    if options["has_thread"]:
        threading.Thread(target=threading.Event().wait, daemon=True, name="one more").start()
    warm.run()
    os._exit(0)
