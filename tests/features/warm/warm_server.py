"""A warm server in a folder of its own, and commands for it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from scaleflow.launcher.processes.handover import SERVER_ENV, WARM_ENV, ServerFiles, digest_interpreter
from scaleflow.launcher.processes.worker_process import ForkedProcess
from tests.conftest import clean_environment
from tests.event_log import events_in
from tests.launcher.test_supervisor import wait_for
from tests.processes import ROOT, server

RUN = ("training.epochs=1", "model.units=[8]", "evaluation=none")

#: A run that lasts until it is stopped.
LONG = ("training.epochs=100000", "model.units=[8]", "checkpoint=none", "tracking=none", "evaluation=none")


class Warm:
    """A warm server in a folder of its own, and commands for it.

    Args:
        folder: of the commands.
        runtime: the folder in which the folder of sockets is.
    """

    def __init__(self, folder: Path, runtime: Path) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in clean_environment().items() if name != SERVER_ENV},
            "XDG_RUNTIME_DIR": str(runtime),
            "PYTHONPATH": str(ROOT),
        }
        for name in (WARM_ENV, "PYTHONDONTWRITEBYTECODE"):  # the second is a flag of the interpreter
            self.environment.pop(name, None)
        self.sockets = runtime / f"scaleflow-{os.geteuid()}"
        self.sockets.mkdir(mode=0o700)
        self.files = ServerFiles(self.sockets, self.digest())
        self._process: ForkedProcess | None = None

    def digest(self) -> str:
        code = f"from {digest_interpreter.__module__} import digest_interpreter as digest; print(digest(()))"
        done = subprocess.run(
            [sys.executable, "-c", code], env=self.environment, capture_output=True, text=True, check=True, timeout=240
        )
        return done.stdout.strip()

    def serve(self, has_thread: bool = False, packages: Path | None = None, **constants: float) -> None:
        """Starts the server, with one more folder of packages. The constants are those of its module."""
        if packages is not None:
            self.environment["PYTHONPATH"] += f"{os.pathsep}{packages}"
            self.files = ServerFiles(self.sockets, self.digest())
        log = self.sockets / "test.log"
        self._process = ForkedProcess(server(), log, self.environment, module="tests.features.warm.server_process")
        options = {"socket": str(self.files.socket), "constants": constants, "has_thread": has_thread}
        options["packages"] = str(packages or "")
        self._process.send(json.dumps(options).encode() + b"\n")
        wait_for(lambda: self.files.ready.exists() or self.has_ended())

    @property
    def pid(self) -> int:
        assert self._process is not None
        assert self._process.poll() is None
        return self._process.pid

    def has_ended(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process.close()

    def start(self, *words: str, module: str = "scaleflow", **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", *module.split(), *words],
            cwd=self.folder,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,  # as a shell does: the kernel ignores Ctrl-Z in a group that has no shell
        )

    def __call__(self, *words: str, module: str = "scaleflow", **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, module=module, **environment)
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def commands(self) -> list[psutil.Process]:
        """The commands that it runs, without the fork servers of their runs."""
        forked = sorted(psutil.Process(self.pid).children(), key=lambda process: process.create_time())
        return [process for process in forked if not process.children()]

    def served(self) -> int:
        (found,) = json.loads(self("warm", "status", "--json").stdout.splitlines()[-1])["servers"]
        return int(found["commands"])

    def read_events(self) -> list[dict[str, Any]]:
        """The events of the one run so far."""
        return [event for path in self.folder.glob("outputs/*/*/events.jsonl") for event in events_in(path)]

    def has_event(self, name: str) -> bool:
        with contextlib.suppress(json.JSONDecodeError):  # its last line is being written
            return name in [event["event"] for event in self.read_events()]
        return False


def find_processes_of(folder: Path) -> list[psutil.Process]:
    """The processes whose current folder is this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, FileNotFoundError):  # it may end meanwhile
            if process.cwd() == str(folder):
                found.append(process)
    return found
