"""A run whose processes are on the machines of a Ray cluster.

On each machine an actor stands for one process: it starts it as a launcher would, tells how it ended, and sends what it
writes where the run's folder is not on a path that the machine shares with this one. This command stays the run's only
launcher: what it shows, records and starts again is as with processes of its own.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scaleflow.cluster import TF_CONFIG, ray, roles, workers
from scaleflow.errors import Refusal
from scaleflow.events import Event, Reader
from scaleflow.interfaces import Plan
from scaleflow.launch import Outcome, WorkerRun
from scaleflow.plan import make_plan
from scaleflow.process import Watched, WorkerProcess, serving
from scaleflow.resume import keep_terms
from scaleflow.sampling import Machine, Values, of_host, sampled
from scaleflow.worker import EVENTS, Job

#: How many calls an actor answers at a time: one waits for news, the others are short.
CALLS_AT_ONCE = 4

#: How long an actor waits for news before it says that there are none.
SECONDS_OF_SILENCE = 0.25

#: How long an actor that is there may take to answer.
SECONDS_TO_ANSWER = 60.0

#: Bytes of a file that are sent at a time.
PORTION = 4 << 20

#: What the launcher itself writes to a run's folder, or nobody reads.
NOT_SENT = ("*.lock", "record.json*", "*.partial")


@dataclass(frozen=True)
class Spot:
    """Where an actor is.

    Attributes:
        address: where its process is to listen, as HOST:PORT.
        host: the machine's name.
    """

    address: str
    host: str


@dataclass(frozen=True)
class News:
    """What an actor has to say.

    Attributes:
        files: (name below the run's folder, offset, bytes) of what was written there; at offset 0 the file is new.
        returncode: how the process ended, once it has, and all of its files are sent.
    """

    files: Sequence[tuple[str, int, bytes]]
    returncode: int | None


# ---------------------------------------------------------------------------------------------
# On the machines
# ---------------------------------------------------------------------------------------------


class Post:
    """Stands on a machine for one process of a run; an actor of Ray's."""

    def __init__(self, folder: str) -> None:
        if Path(folder).is_dir():  # relative paths are what they are where the command was typed
            os.chdir(folder)
        self._open = contextlib.ExitStack()
        self._server = self._open.enter_context(serving())  # imports TensorFlow while the others are placed
        self._port = socket.socket()
        self._port.bind(("", 0))
        self._process: WorkerProcess | None = None
        self._sent: Iterator[tuple[str, int, bytes]] | None = None
        self._seen: dict[str, tuple[int, int]] = {}
        self._measure: Callable[[], Values] | None = None
        self._is_mirrored = False
        self._made: Path | None = None

    def spot(self) -> Spot:
        import ray as engine

        host = engine.util.get_node_ip_address()
        return Spot(f"{host}:{self._port.getsockname()[1]}", socket.gethostname())

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
        job = Job.from_json(told)
        if not is_shared:
            self._mirror(job, earlier)
        self._port.close()
        self._process = WorkerProcess(job, environment, self._server)
        return self._pid()

    def _mirror(self, job: Job, earlier: bytes) -> None:
        """Begins a folder of the same name, to be sent.

        Raises:
            Refusal: if it can't be.
        """
        self._is_mirrored = True
        try:
            if not job.folder.exists():
                job.folder.mkdir(parents=True)
                self._made = job.folder
            if job.records:
                job.events.write_bytes(earlier)
                self._seen[EVENTS] = (len(earlier), 0)
        except OSError as error:
            raise Refusal(
                f"hydra.run.dir={job.folder}: can't be written on {socket.gethostname()} ({error.strerror}); "
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

    def news(self) -> News:
        """Waits a little for the process's end, or files of its."""
        assert self._process is not None
        if self._sent is None:
            self._process.wait(SECONDS_OF_SILENCE)
        returncode = self._process.returncode
        files = list(self._portion()) if self._is_mirrored else []
        return News(files, None if files else returncode)

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
            if not is_others(path, job.folder) and path not in own:
                yield from self._changed(path, job.folder)
        for path, end in ends.items():
            yield from self._appended(path, end)

    def _changed(self, path: Path, folder: Path) -> Iterator[tuple[str, int, bytes]]:
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

    def _appended(self, path: Path, end: int) -> Iterator[tuple[str, int, bytes]]:
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
            self._measure = Machine(self._process.job.folder, [self._process]).measure
        return of_host(self._measure(), self._process.job, socket.gethostname())

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


def is_others(path: Path, folder: Path) -> bool:
    """Whether a file of the run's folder is another process's own, or not for the launcher."""
    if path.parent == folder and (path.suffix == ".log" or path.match("events*.jsonl")):
        return True
    return any(path.match(pattern) for pattern in NOT_SENT)


# ---------------------------------------------------------------------------------------------
# Here
# ---------------------------------------------------------------------------------------------


class RemoteProcess(Watched):
    """A process on another machine.

    Args:
        job: what it is told.
        actor: stands for it there.
        environment: added to the machine's.
        is_shared: whether the machine sees the run's folder.
        host: the machine's name.
    """

    def __init__(self, job: Job, actor: Any, environment: Mapping[str, str], is_shared: bool, host: str) -> None:
        super().__init__(job)
        self._actor = actor
        self._host = host
        self._returncode: int | None = None
        self._is_there = True
        self._heard = threading.Condition()
        earlier = job.events.read_bytes() if job.records and job.goes_on and not is_shared else b""
        self._pid = self._ask("start", job.to_json(), environment, is_shared, earlier) or 0
        self._listen()

    def _listen(self) -> None:
        self._listener = threading.Thread(target=self._hear, name=f"news of {self.job.name}", daemon=True)
        self._listener.start()

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Calls the actor; None where it is gone.

        Raises:
            Refusal: where it says so.
        """
        import ray as engine

        try:
            return engine.get(getattr(self._actor, name).remote(*arguments), timeout=SECONDS_TO_ANSWER)
        except Exception as error:
            if isinstance(error, Refusal):
                raise Refusal(str(getattr(error, "cause", error))) from None  # without the traceback that Ray adds
            self._lose()
            return None

    def _lose(self) -> None:
        with self._heard:
            if self._returncode is None:
                self._returncode, self._is_there = 1, False
            self._heard.notify_all()

    def _hear(self) -> None:
        """Takes what the actor says until the process has ended."""
        import ray as engine

        while self._returncode is None:
            try:
                news = engine.get(self._actor.news.remote(), timeout=SECONDS_TO_ANSWER)
                for name, offset, data in news.files:
                    self._write(name, offset, data)
            except Exception:  # the actor, its machine, or the cluster is gone; or this machine's disk is full
                self._lose()
                return
            with self._heard:
                self._returncode = news.returncode
                self._heard.notify_all()

    def _write(self, name: str, offset: int, data: bytes) -> None:
        path = self.job.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        grows = offset > 0 or path in (self.job.events, self.job.log)
        with path.open("ab" if grows else "wb") as file:
            file.write(data)

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def actor(self) -> Any:
        return self._actor

    @property
    def has_server(self) -> bool:
        return self._is_there

    @property
    def returncode(self) -> int | None:
        return self._returncode

    def wait(self, seconds: float) -> None:
        with self._heard:
            self._heard.wait_for(lambda: self._returncode is not None, seconds)

    def how_it_ended(self) -> str:
        return super().how_it_ended() if self._is_there else f"was lost with its place on {self._host}"

    def start_again(self) -> str:
        how = self.how_it_ended()
        self._begin()
        self._returncode = None
        self._pid = self._ask("start_again") or 0
        self._listen()
        return how

    def stop(self) -> None:
        self._actor.stop.remote()

    def kill(self) -> None:
        if self.is_alive:
            self.was_ended = True
            self._actor.kill.remote()

    def close(self) -> None:
        """Takes away what was there for it; it has ended."""
        self.wait(SECONDS_TO_ANSWER)
        if self._is_there:
            self._ask("close")


class RayRun(WorkerRun):
    """A run whose workers are on the machines of a Ray cluster."""

    def run(self) -> Outcome:
        self._asked = workers(self._job.plan)
        try:
            with ray.connected(self._job.plan.cluster, sum(roles(self._job.plan).values())):
                return super().run()
        except Refusal as refusal:
            self._reason = str(refusal), True
            self._say_how_it_ended()
            self._show_events()
            self._display.close()
            self._outcome.code = self._code()
            return self._outcome

    def _lives_of_a_server(self) -> bool:
        """The run's lives; each machine has a server of its own."""
        self._server = ""
        while self._live():
            self._job = replace(self._job, life=self._job.life + 1)
        return False

    @contextlib.contextmanager
    def _processes(self) -> Iterator[Sequence[Watched]]:
        told_to_stop = self._stop.is_set
        self._job = self._fitted(self._job) if self._job.life else self._job
        cluster, count = self._job.plan.cluster, sum(roles(self._job.plan).values())
        with ray.places(cluster, count, told_to_stop) as group, contextlib.ExitStack() as until_it_ended:
            if group is None:
                raise Refusal("stopped while it waited for room")
            processes = posted(self._job, group, until_it_ended)
            self._began = time.time()
            with sampled(self._job, lambda: lambda: measured(processes)):
                yield processes

    def _fitted(self, job: Job) -> Job:
        """The job with as many workers as there is room for, after a loss.

        Raises:
            Refusal: if that is not enough.
        """
        plan, cluster = job.plan, job.plan.cluster
        others = sum(roles(plan).values()) - workers(plan)
        least = cluster.min_workers or self._asked
        found = ray.settled_room(cluster, self._asked + others, least + others, self._stop.is_set) - others
        if found < least:
            raise Refusal(
                f"cluster.min_workers={least}: there is room for {max(0, found)} worker(s) on the machines that are "
                "left"
            )
        if found == workers(plan):
            return job
        fewer = with_workers(plan, found, least, first_ready(job))
        self._display.line(f"goes on with {workers(fewer)} worker(s) in place of {workers(plan)}")
        return replace(job, plan=fewer)


def posted(job: Job, group: Any, until_it_ended: contextlib.ExitStack) -> list[RemoteProcess]:
    """The processes of a run, each at its place of a group.

    Raises:
        Refusal: if a machine can't take its part.
    """
    import ray as engine

    cluster, names = job.plan.cluster, roles(job.plan)
    count = sum(names.values())
    remote = engine.remote(Post)
    actors = [
        remote.options(max_concurrency=CALLS_AT_ONCE, **ray.on(group, place, cluster)).remote(str(Path.cwd()))
        for place in range(count)
    ]
    for actor in actors:
        until_it_ended.callback(engine.kill, actor)
    spots = asked(actors, "spot")
    is_shared = seen(actors, job.folder)
    check_checkpoints(job, actors, is_shared, spots)
    configs = [{TF_CONFIG: text} for text in tf_configs(names, spots)] if count > 1 else [{}]
    limits = threads(cluster.cpus)
    processes: list[RemoteProcess] = []
    for number, (actor, config, spot) in enumerate(zip(actors, configs, spots, strict=True)):
        environment = {**job.environment, **limits, **config}
        process = RemoteProcess(replace(job, worker=number), actor, environment, is_shared[number], spot.host)
        until_it_ended.callback(process.close)
        processes.append(process)
    for process in processes:
        until_it_ended.callback(process.kill)  # all of them, before the first one's end is waited for
    return processes


def asked(actors: Sequence[Any], name: str, *arguments: Any) -> list[Any]:
    """What each actor answers."""
    import ray as engine

    try:
        return list(
            engine.get([getattr(actor, name).remote(*arguments) for actor in actors], timeout=SECONDS_TO_ANSWER)
        )
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise Refusal(f"cluster=ray: its machines do not answer: {said[-1]}") from error


def seen(actors: Sequence[Any], folder: Path) -> list[bool]:
    """Which machines see a folder of this one."""
    token = folder / f".seen-{secrets.token_hex(8)}"
    token.touch()
    try:
        return asked(actors, "sees", str(token))
    finally:
        token.unlink()


def check_checkpoints(job: Job, actors: Sequence[Any], is_shared: Sequence[bool], spots: Sequence[Spot]) -> None:
    """Refuses checkpoints that some of the machines would not find again.

    Raises:
        Refusal: naming the machine.
    """
    options = job.plan.checkpoint
    if options.name == "none" or "://" in job.checkpoints:
        return
    sees = is_shared
    if options.folder is not None:
        folder = Path(options.folder)
        folder.mkdir(parents=True, exist_ok=True)
        sees = seen(actors, folder)
    if not all(sees):
        host = next(spot.host for spot, there in zip(spots, sees, strict=True) if not there)
        raise Refusal(
            f"checkpoint={options.name}: {job.checkpoints} is not on a path that {host} shares with this machine, so "
            "no other one could go on from there; use checkpoint.folder=PATH that all see, or an object store's "
            "(gs://...), or checkpoint=none"
        )


def tf_configs(names: Mapping[str, int], spots: Sequence[Spot]) -> list[str]:
    """TF_CONFIG for each process, as they are numbered."""
    addresses = iter(spot.address for spot in spots)
    cluster = {role: [next(addresses) for _ in range(count)] for role, count in names.items()}
    tasks = [{"type": role, "index": index} for role, count in names.items() for index in range(count)]
    return [json.dumps({"cluster": cluster, "task": task}) for task in tasks]


def threads(cpus: int | None) -> dict[str, str]:
    """Has TensorFlow use the cores that were set aside for a process, and no others."""
    return {} if cpus is None else dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), str(cpus))


def measured(processes: Sequence[RemoteProcess]) -> Values:
    """The values of all machines; of one that does not answer, none."""
    import ray as engine

    values: Values = {}
    for process in processes:
        with contextlib.suppress(Exception):
            values |= engine.get(process.actor.measure.remote(), timeout=SECONDS_TO_ANSWER)
    return values


def first_ready(job: Job) -> Event:
    return next(event for event in Reader(job.events).read() if event["event"] == "ready")


def with_workers(plan: Plan, most: int, least: int, ready: Event) -> Plan:
    """The plan on other workers, at most so many, with the global batch that it was begun with.

    Raises:
        Refusal: if that divides among none of the numbers that there is room for.
    """
    config = copy.deepcopy(dict(plan.config))
    keep_terms(config, ready)
    size, was = int(config["training"]["global_batch_size"]), int(ready["params"]["resolved.workers"])
    each = max(1, int(ready["params"]["resolved.replicas"]) // was) * plan.training.accumulate
    in_step = plan.strategy.name == "multi_worker"
    for count in range(most, least - 1, -1):
        if not in_step or size % (count * each) == 0:
            config["cluster"] = {**config["cluster"], "workers": count}
            return make_plan(config, plan.choices, plan.search, look_outside=False)
    fits = [count for count in range(1, was + 1) if size % (count * each) == 0]
    raise Refusal(
        f"there is room for {most} worker(s), and the global batch of {size} divides among "
        f"{', '.join(map(str, fits))}; cluster.min_workers={fits[0]} goes on with those"
    )
