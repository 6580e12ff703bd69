"""Passes a command to the warm server, which forks it from an interpreter with everything imported.

This module is the client. It is imported first, so it imports little itself. A server is found by the digest of
everything that an interpreter reads at its start. Everything else is handed over: words, folder, environment, umask,
soft limits, ignored signals and the standard streams. The process that typed the command stays, forwards signals, and
ends when the command ends.

A command that cannot be handed over starts cold. A forked command no longer needs the server.
"""

import contextlib
import hashlib
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from scaleflow.compat.python import list_flags

#: Prefixes of the variables that Python, TensorFlow, Keras, MLflow and their dependencies read at import.
#: `tests/features/warm/test_environment.py` compares them with the variables that are actually read.
IMPORT_PREFIXES = (
    *("ABSL_", "ARROW_", "AZURE_LOG", "CI", "CUDA_", "DATABRICKS_", "DO_NOT_TRACK", "EAGER_IMPORT", "GCS_"),
    *("GFORTRAN_", "GOMP_", "GOTO_", "GRPC_", "HDF5_", "HOME", "JAX_", "JE_ARROW_", "JOBLIB_", "KERAS_"),
    *("KMP_", "LANG", "LC_", "LD_", "LOKY_", "LSB_JOBID", "MALLOC_", "MATPLOTLIBRC", "MKL_"),
    *("MLFLOW_CONFIGURE", "MLFLOW_DISABLE", "MLFLOW_LOGGING", "MPLCONFIG", "NPY_", "NUMPY_", "NVIDIA_", "OMP_"),
    *("OPENBLAS_", "OPENSSL_", "OTEL_", "PANDAS_", "PBS_JOBID", "PILLOW_", "PROTOCOL_BUFFERS_", "PYDANTIC_"),
    *("PYTHON", "SCIPY_", "SKLEARN_", "SLURM_JOB_ID", "SQLITE_", "SSL", "TF_", "TORCH_", "TQDM_", "WRAPT_"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XLA_"),
)

#: Variables with such a prefix that may differ between commands: they are read later, or libraries set them.
READ_LATER = (
    *("CUDA_VISIBLE_DEVICES", "HDF5_PLUGIN_PATH", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
    *("PYTHONBREAKPOINT", "PYTHONSTARTUP", "PYTHONUNBUFFERED", "TF_CONFIG"),
)

#: Linux namespaces that decide which files, processes and networks a process sees.
NAMESPACES = ("mnt", "pid", "net", "user")


def digest_interpreter(flags: Sequence[str]) -> str:
    """Returns the digest of everything that `python FLAGS` would read if this process started it: 16 hexadecimal
    digits.
    """
    environment = []
    for name, value in {**os.environ, **locate_modules()}.items():
        if name.startswith(IMPORT_PREFIXES) and name not in READ_LATER:
            environment.append(f"{name}={value}")
    environment.sort()
    hard_limits = [resource.getrlimit(number)[1] for _, number in list_limits()]
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES]  # noqa: PTH115
    user = os.geteuid(), os.getegid(), os.getgroups(), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)
    taken_in = [sys.executable, sys.version, *flags, environment, hard_limits, namespaces, user]
    taken_in += [read_group_limits(), describe_installation()]
    return hashlib.blake2b(repr(taken_in).encode(errors="surrogatepass"), digest_size=8).hexdigest()


def locate_modules() -> dict[str, str]:
    """Returns PYTHONPATH with absolute folders. Adds scaleflow's folder if it may be found only in the current folder.

    `python -m` also searches the current folder.
    """
    folders = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]  # noqa: PTH100
    package = str(Path(__file__).parents[3])
    if package not in sys.path[1:]:
        folders.append(package)
    return {"PYTHONPATH": os.pathsep.join(folders)} if folders else {}


def list_limits() -> list[tuple[str, int]]:
    """Returns the names and numbers of this system's process limits."""
    return [(name, getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]


def read_group_limits() -> list[str]:
    """Returns the memory and processor limits of this process's control groups (cgroup v2)."""
    limits = []
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        group = Path("/sys/fs/cgroup", next(line for line in lines if line.startswith("0::"))[4:])
        for folder in (group, *group.parents[:-3]):
            for name in ("memory.max", "cpu.max", "cpuset.cpus.effective"):
                with contextlib.suppress(OSError):
                    limits.append((folder / name).read_text())
    return limits


def describe_installation() -> list[tuple[str, int, int]]:
    """Returns the path, the size in bytes and the last change of package folders and of scaleflow's own files.

    scaleflow's own files are its modules and YAML files.
    """
    files = describe_files(folder for folder in sys.path if folder.endswith("-packages"))
    folders = [str(Path(__file__).parents[2])]
    for folder in folders:
        for entry in os.scandir(folder):
            if entry.is_dir():
                if entry.name != "__pycache__":
                    folders.append(entry.path)
            elif entry.name.endswith((".py", ".yaml")):
                status = entry.stat()
                files.append((entry.path, status.st_size, status.st_mtime_ns))
    return sorted(files)


def describe_files(paths: Iterable[str]) -> list[tuple[str, int, int]]:
    """Returns the same facts for some files and folders. Missing ones are left out."""
    files = []
    for path in paths:
        with contextlib.suppress(OSError):
            status = os.stat(path)  # noqa: PTH116
            files.append((path, status.st_size, status.st_mtime_ns))
    return files


#: 1: use a warm server, and start one if there is none. 0: do not use one. Unset: use one that runs.
WARM_ENV = "SCALEFLOW_WARM"

#: The variable with a running fork server's address. Commands that see it start no server and are not handed over.
SERVER_ENV = "SCALEFLOW_SERVER"

#: The module name that requests a command from a warm server. The command's process gets the server's address,
#: `sys.orig_argv` as JSON, `sys.argv`, and the descriptor of its link to the client.
COMMAND = "command"

#: Words of commands that only print. They use a server that is ready, but do not wait for one.
PRINTING = ("-sc", "--shell-completion", "--version", "--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i")

#: Seconds to wait for an answer: of a server that still imports, and of one that is ready.
IMPORT_SECONDS = 120.0
READY_SECONDS = 10.0

#: Seconds to wait for a command's process after it reported its exit code. Its children may keep the link open.
EXIT_SECONDS = 5.0

#: Maximum length of the path to the sockets' folder, without its name. A Unix socket's path may have 107 bytes.
MAX_BASE_LENGTH = 55

#: The signals that the client forwards to the command.
PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")

#: Seconds between two checks for Ctrl-Z.
STOP_CHECK_SECONDS = 0.05


class NotWarm(Exception):
    """The reason why a command starts cold."""


class ServerFiles:
    """The files of the warm server for a digest: its socket, its log, and a file that exists when
    the server is ready.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        self.socket = folder / f"{digest}.socket"
        self.log = folder / f"{digest}.log"
        self.ready = folder / f"{digest}.ready"

    def remove(self) -> None:
        """Removes the files of a server that ends or was killed."""
        for path in (self.socket, self.ready, self.log):
            path.unlink(missing_ok=True)

    def connect(self) -> socket.socket:
        """Connects to the server. Raises OSError if there is none, and NotWarm if it belongs to another user."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self.socket))
            check_peer(connection)
        except BaseException:
            connection.close()
            raise
        return connection


#: The files of the warm server that forked this process. Empty if an interpreter started this process.
FORKED_BY: list[ServerFiles] = []


def find_sockets_folder() -> Path:
    """Returns the user's folder of sockets. It may not exist."""
    base = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(base if len(base) < MAX_BASE_LENGTH else "/tmp", f"scaleflow-{os.geteuid()}")


def make_sockets_folder() -> Path:
    """Makes the folder of sockets. Raises NotWarm if it cannot be made, or if others may write to it."""
    folder = find_sockets_folder()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise NotWarm(f"{folder} cannot be made: {error.strerror}") from error
    check_sockets_folder(folder)
    return folder


def check_sockets_folder(folder: Path) -> None:
    """Raises NotWarm unless the folder belongs only to this user."""
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o170777 != 0o40700:
        raise NotWarm(f"{folder} must be a folder of this user with mode 0700")


def check_peer(connection: socket.socket) -> None:
    """Raises NotWarm unless the process at the other end belongs to this user."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.geteuid():
        raise NotWarm(f"the socket belongs to the user {user}")


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lets one command at a time start or remove servers."""
    import fcntl

    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def find_servers() -> list[ServerFiles]:
    """Returns the files of this user's servers, and removes the files of killed servers."""
    folder = find_sockets_folder()
    servers = [ServerFiles(folder, path.stem) for path in sorted(folder.glob("*.socket"))]
    for files in list(servers):
        try:
            files.connect().close()
        except ConnectionRefusedError:
            servers.remove(files)
            files.remove()
        except (NotWarm, OSError):
            servers.remove(files)
    return servers


def find_warm_server(flags: Sequence[str] = (), waits: bool = True) -> ServerFiles | None:
    """Returns the files of the server for `python FLAGS`; None if no server should be used.

    With `SCALEFLOW_WARM=1` it starts a server if none runs, and `waits` until it is ready. Raises NotWarm if a server
    is required but not available.
    """
    wanted = os.environ.get(WARM_ENV, "")
    folder = find_sockets_folder()
    if FORKED_BY and wanted != "0":
        return FORKED_BY[0]
    if wanted == "0" or os.environ.get(SERVER_ENV):
        return None
    if wanted not in ("", "1"):
        raise NotWarm(f"{WARM_ENV}={wanted}: expected 0 or 1")
    if not wanted and not (folder.is_dir() and folder.lstat().st_uid == os.geteuid()):
        return None
    if not hasattr(os, "pidfd_open"):
        raise NotWarm("it takes Linux 5.3 or newer")
    files = ServerFiles(make_sockets_folder(), digest_interpreter(flags))
    if wanted and waits:
        start_warm_server(files, flags)
        return files
    sign = files.socket if waits else files.ready
    return files if sign.exists() else None


def start_warm_server(files: ServerFiles, flags: Sequence[str]) -> bool:
    """Starts the server unless it runs. Returns whether it was started; it may still be importing. Raises NotWarm."""
    part = files.socket.with_suffix(".part")  # renamed when it accepts connections
    environment = {name: value for name, value in os.environ.items() if name not in (*READ_LATER, "MPLBACKEND")}
    try:
        with lock_folder(files.socket.parent):
            with contextlib.suppress(OSError):
                files.connect().close()
                return False
            find_servers()
            for path in (files.socket, files.ready, part):
                path.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener, files.log.open("wb") as log:
                listener.bind(str(part))
                listener.listen(128)
                subprocess.Popen(
                    [sys.executable, *flags, "-m", find_server_module(), str(files.socket)],
                    stdin=listener.fileno(),
                    stdout=log,
                    stderr=log,
                    cwd=files.socket.parent,
                    env={**environment, **locate_modules(), "KERAS_BACKEND": "tensorflow"},
                    start_new_session=True,
                )
                part.rename(files.socket)
    except OSError as error:
        raise NotWarm(f"it cannot be started: {error}") from error
    return True


def find_server_module() -> str:
    """Returns the module of the warm server, which a feature provides. Raises NotWarm without such a feature."""
    from scaleflow.interfaces.features import list_features  # commands that are handed over do not need it

    modules = [feature.warm_server for feature in list_features().values() if feature.warm_server]
    if not modules:
        raise NotWarm("no feature has a warm server")
    return modules[0]


def request_process(files: ServerFiles, descriptors: Sequence[int], **task: Any) -> tuple[socket.socket, int]:
    """Requests a process from the server. Returns the connection and the process id.

    Args:
        descriptors: the process's standard input, output and error, and others.
        task: the fields of `become_process`.

    Raises NotWarm if there is no answer, or if the server may not fork.
    """
    limits = {name: resource.getrlimit(number)[0] for name, number in list_limits()}
    task |= {"folder": os.getcwd(), "umask": read_umask(), "limits": limits}  # noqa: PTH109
    connection = None
    try:
        connection = files.connect()
        line = json.dumps(task).encode() + b"\n"
        sent = socket.send_fds(connection, [line], list(descriptors))
        connection.sendall(line[sent:])
        answer = receive_answer(connection, files)
        if "pid" not in answer:
            raise NotWarm(answer.get("refused") or f"it ended; its log is {files.log}")
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, ConnectionRefusedError):  # it was killed
            with contextlib.suppress(OSError), lock_folder(files.socket.parent):
                find_servers()
        if isinstance(error, OSError):
            raise NotWarm(f"it does not answer: {error}") from error
        raise
    return connection, answer["pid"]


def ask_server(files: ServerFiles, question: str) -> dict[str, Any]:
    """Asks the server for its `status`, or to `stop`: then it ends after its last command. Raises NotWarm."""
    try:
        with files.connect() as connection:
            connection.sendall(json.dumps({"ask": question}).encode() + b"\n")
            answer = receive_answer(connection, files)
    except OSError as error:
        raise NotWarm(f"it does not answer: {error}") from error
    if not answer:
        raise NotWarm(f"it ended; its log is {files.log}")
    return answer


def receive_answer(connection: socket.socket, files: ServerFiles) -> dict[str, Any]:
    """Receives an answer of the server; {} if the server has ended. Waits while it imports. Raises TimeoutError."""
    deadline = time.monotonic() + IMPORT_SECONDS
    is_ready = False
    connection.settimeout(0.5)
    data = b""
    while not data.endswith(b"\n"):
        try:
            part = connection.recv(4096)
        except TimeoutError:
            if not is_ready and files.ready.exists():
                is_ready = True
                deadline = min(deadline, time.monotonic() + READY_SECONDS)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {READY_SECONDS if is_ready else IMPORT_SECONDS:g} s") from None
            continue
        if not part:
            return {}
        data += part
    connection.settimeout(None)
    answer: dict[str, Any] = json.loads(data.splitlines()[0])
    return answer


class ForkedCommand:
    """This process's command, which runs in the server."""

    def __init__(self, files: ServerFiles) -> None:
        self._link, theirs = socket.socketpair()
        is_unbuffered = getattr(sys.stdout, "write_through", False)  # with `python -u`
        environment = {**os.environ, **({"PYTHONUNBUFFERED": "1"} if is_unbuffered else {})}
        ignored = [n for n in range(1, signal.NSIG) if n in signal.valid_signals() and is_ignored(n)]
        with theirs:
            self._server, pid = request_process(
                files,
                [0, 1, 2, theirs.fileno()],
                module=COMMAND,
                words=[str(files.socket), json.dumps(sys.orig_argv), *sys.argv],
                environment=environment,
                path=sys.path,
                ignored=ignored,
            )
        try:
            self._process = os.pidfd_open(pid)
        except OSError as error:
            raise NotWarm(f"its process {pid} cannot be watched: {error}") from error

    def run(self) -> int:
        """Runs the command. Returns its exit status, with the same meaning as `Popen.returncode`."""
        for name in PASSED_ON:
            signal.signal(getattr(signal, name), self._pass_on)
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTSTP])
            threading.Thread(target=self._stop_together, name="job control", daemon=True).start()
        with contextlib.suppress(OSError):  # the command was killed
            # The command waits for this, so it cannot have begun if this process starts cold instead.
            self._link.sendall(b"\n")
        status: int | None = None
        sources = [self._link, self._server]
        while self._link in sources:
            ready = select.select(sources, [], [], None if status is None else EXIT_SECONDS)[0]
            if not ready:
                break
            for source in ready:
                try:
                    data = source.recv(4096)
                except ConnectionError:
                    data = b""
                if not data:
                    sources.remove(source)
                for line in data.splitlines():
                    status = json.loads(line).get("status", status)
        if status is None:  # killed: only the server knows the signal
            with contextlib.suppress(OSError, ValueError):
                self._server.settimeout(1.0)
                status = json.loads(self._server.recv(4096))["status"]
        return -signal.SIGKILL if status is None else status

    def _pass_on(self, number: int, frame: object = None) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, number)

    def _stop_together(self) -> None:
        """After Ctrl-Z, stops the command, which has no own terminal that would stop it, and then this process.

        SIGTSTP stays pending until the command has stopped; a SIGCONT that comes first cancels it. A handler would
        always stop this process, and nobody would continue it.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals must wake the main thread
        while True:
            time.sleep(STOP_CHECK_SECONDS)
            if signal.SIGTSTP in signal.sigpending():
                self._pass_on(signal.SIGSTOP)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTSTP])  # this process stops here
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTSTP])
                self._pass_on(signal.SIGCONT)


def is_ignored(number: int) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN and number not in (signal.SIGPIPE, signal.SIGXFSZ)


def read_umask() -> int:
    """Returns the umask, read from the kernel: `os.umask` would change it for other threads."""
    umask = re.search(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.M)
    return int(umask[1], 8) if umask else 0o022


def hand_over() -> None:
    """Runs this process's command in the warm server, and ends with it. Returns if the command must start cold."""
    flags = list_flags()
    try:
        files = find_warm_server(flags, waits=not any(word in PRINTING for word in sys.argv[1:]))
        if files is None:
            return
        for number in range(3):
            os.fstat(number)
        command = ForkedCommand(files)
    except (NotWarm, OSError) as why:
        give_up_warm_server(why)
        return
    end_as(command.run())


def give_up_warm_server(why: Exception) -> None:
    """Prints why no warm server is used. From now on, this process and its children do not look for one."""
    os.environ[WARM_ENV] = "0"
    print(f"scaleflow: the warm server is not used: {why}", file=sys.stderr)


def end_as(status: int) -> NoReturn:
    """Ends this process with an exit status, or with the signal that ended the command."""
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    os._exit(status)


def report_exit(link: socket.socket, code: int) -> None:
    """Reports this process's exit code to the client just before it ends. The client may be gone."""
    with contextlib.suppress(OSError):
        link.sendall(json.dumps({"status": code}).encode() + b"\n")
