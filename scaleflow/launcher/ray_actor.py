"""What stands on a machine of a Ray cluster for one process of a run.

It starts the process as a launcher would, tells how it ended, and sends what it writes where the run's folder is not on
a path that the machine shares with the launcher.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaleflow.errors import ConfigError
from scaleflow.events import EVENTS
from scaleflow.launcher.system_metrics import MachineMetrics, Values, name_by_host
from scaleflow.launcher.worker_process import WorkerProcess, start_fork_server
from scaleflow.worker.main import RunSpec

#: How long it waits for news before it says that there are none.
SECONDS_OF_SILENCE = 0.25

#: Bytes of a file that are sent at a time.
PORTION = 4 << 20

#: What the launcher itself writes to a run's folder, or nobody reads.
NOT_SENT = ("*.lock", "record.json*", "*.partial")


@dataclass(frozen=True)
class ActorLocation:
    """Where an actor is.

    Attributes:
        address: where its process is to listen, as HOST:PORT.
        host: the machine's name.
    """

    address: str
    host: str


@dataclass(frozen=True)
class ActorUpdate:
    """What an actor has to say.

    Attributes:
        files: (name below the run's folder, offset, bytes) of what was written there; at offset 0 the file is new.
        returncode: how the process ended, once it has, and all of its files are sent.
    """

    files: Sequence[tuple[str, int, bytes]]
    returncode: int | None


class WorkerActor:
    """Stands on a machine for one process of a run; an actor of Ray's."""

    def __init__(self, folder: str) -> None:
        if Path(folder).is_dir():  # relative paths are what they are where the command was typed
            os.chdir(folder)
        self._open = contextlib.ExitStack()
        self._temporary = tempfile.TemporaryDirectory(prefix="scaleflow-", ignore_cleanup_errors=True)
        self._open.enter_context(self._temporary)
        self._server = self._open.enter_context(start_fork_server())  # imports TensorFlow while the others are placed
        self._port = socket.socket()
        self._port.bind(("", 0))
        self._process: WorkerProcess | None = None
        self._sent: Iterator[tuple[str, int, bytes]] | None = None
        self._seen: dict[str, tuple[int, int]] = {}
        self._measure: Callable[[], Values] | None = None
        self._is_mirrored = False
        self._made: Path | None = None

    def spot(self, address: str | None) -> ActorLocation:
        """Where it is; by an address that is given, or the machine's own."""
        import ray as engine

        host = address or engine.util.get_node_ip_address()
        return ActorLocation(f"{host}:{self._port.getsockname()[1]}", socket.gethostname())

    def sees(self, path: str) -> bool:
        return Path(path).exists()

    def start(self, told: str, environment: Mapping[str, str], is_shared: bool, earlier: bytes) -> int:
        """Starts the process; gives its number.

        Args:
            told: its job.
            environment: added to the machine's.
            is_shared: whether the run's folder here is the one that the launcher reads.
            earlier: what the chief has reported in earlier lives, where it is not.
        """
        job = RunSpec.from_json(told)
        if not is_shared:
            self._mirror(job, earlier)
        self._port.close()
        self._process = WorkerProcess(job, {"TMPDIR": self._temporary.name, **environment}, self._server)
        return self._pid()

    def _mirror(self, spec: RunSpec, earlier: bytes) -> None:
        """Begins a folder of the same name, to be sent.

        Raises:
            ConfigError: if it can't be.
        """
        self._is_mirrored = True
        try:
            if not spec.folder.exists():
                spec.folder.mkdir(parents=True)
                self._made = spec.folder
            if spec.records:
                spec.events.write_bytes(earlier)
                self._seen[EVENTS] = (len(earlier), 0)
        except OSError as error:
            raise ConfigError(
                f"hydra.run.dir={spec.folder}: can't be written on {socket.gethostname()} ({error.strerror}); "
                "use a path that all machines see"
            ) from error

    def _pid(self) -> int:
        """The process's number, which its server tells soon."""
        assert self._process is not None
        while not self._process.pid and self._process.is_alive:
            self._process.wait(0.05)
        return self._process.pid

    def start_again(self) -> int:
        assert self._process is not None
        self._process.start_again()
        return self._pid()

    def news(self) -> ActorUpdate:
        """Waits a little for the process's end, or files of its."""
        assert self._process is not None
        if self._sent is None:
            self._process.wait(SECONDS_OF_SILENCE)
        returncode = self._process.returncode
        files = list(self._portion()) if self._is_mirrored else []
        return ActorUpdate(files, None if files else returncode)

    def _portion(self) -> Iterator[tuple[str, int, bytes]]:
        """Some of what was written since it was asked last: an event after the files that it tells of."""
        size = 0
        self._sent = self._sent or self._changes()
        for name, offset, data in self._sent:
            yield name, offset, data
            size += len(data)
            if size >= PORTION:
                return
        self._sent = None

    def _changes(self) -> Iterator[tuple[str, int, bytes]]:
        assert self._process is not None
        job = self._process.job
        own = (job.events, job.log)
        ends = {path: path.stat().st_size for path in own if path.exists()}
        for path in sorted(p for p in job.folder.rglob("*") if p.is_file()):
            if not is_private_file(path, job.folder) and path not in own:
                yield from self._read_if_changed(path, job.folder)
        for path, end in ends.items():
            yield from self._read_appended(path, end)

    def _read_if_changed(self, path: Path, folder: Path) -> Iterator[tuple[str, int, bytes]]:
        """A file as it is now, if it is another one than it was."""
        name = str(path.relative_to(folder))
        with contextlib.suppress(FileNotFoundError):  # it was there for a moment
            state = (path.stat().st_size, path.stat().st_mtime_ns)
            if self._seen.get(name) == state:
                return
            with path.open("rb") as file:
                offset = 0
                while (data := file.read(PORTION)) or not offset:
                    yield name, offset, data
                    offset += len(data)
                    if not data:
                        break
            self._seen[name] = state

    def _read_appended(self, path: Path, end: int) -> Iterator[tuple[str, int, bytes]]:
        """Whole lines that a file has grown by."""
        sent, _ = self._seen.get(path.name, (0, 0))
        with path.open("rb") as file:
            file.seek(sent)
            data = file.read(end - sent)
        data = data[: data.rfind(b"\n") + 1]
        if data:
            self._seen[path.name] = (sent + len(data), 0)
            yield path.name, sent, data

    def measure(self) -> Values:
        """Of the machine, by its name, and of the process."""
        assert self._process is not None
        if self._measure is None:
            self._measure = MachineMetrics(self._process.job.folder, [self._process]).measure
        return name_by_host(self._measure(), self._process.job, socket.gethostname())

    def stop(self) -> None:
        assert self._process is not None
        self._process.stop()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    def close(self) -> None:
        """Ends all that was started here, and takes away what was only to be sent."""
        if self._process is not None:
            self._process.close()
        self._open.close()
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)


def is_private_file(path: Path, folder: Path) -> bool:
    """Whether a file of the run's folder is another process's own, or not for the launcher."""
    if path.parent == folder and (path.suffix == ".log" or path.match("events*.jsonl")):
        return True
    return any(path.match(pattern) for pattern in NOT_SENT)
