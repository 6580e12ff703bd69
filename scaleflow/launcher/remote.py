"""A run whose processes are on the machines of a Ray cluster.

On each machine an actor stands for one process (`post.py`). This command stays the run's only launcher: what it shows,
records and starts again is as with processes of its own.
"""

from __future__ import annotations

import contextlib
import copy
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaleflow.cluster import TF_CONFIG, ray, roles, tf_configs, workers
from scaleflow.config.plan import make_plan
from scaleflow.errors import Refusal
from scaleflow.events import Event, Reader
from scaleflow.interfaces import Plan
from scaleflow.launcher.launch import POLL_SECONDS, Outcome, WorkerRun
from scaleflow.launcher.post import Post, Spot
from scaleflow.launcher.process import THREADS, Watched
from scaleflow.launcher.resume import keep_terms
from scaleflow.launcher.sampling import Values, sampled
from scaleflow.worker.life import Job

#: How many calls an actor answers at a time: one waits for news, the others are short.
CALLS_AT_ONCE = 4

#: How long an actor that is there may take to answer.
SECONDS_TO_ANSWER = 60.0

#: How long no news are heard of an actor before it is looked whether the cluster is there.
SECONDS_BETWEEN_LOOKS = 5.0

#: So often machines are sought behind a loss, that do not answer then.
TRIES = 3

#: How long Ray may take to miss a machine whose processes the others miss already.
SECONDS_TO_MISS = 5.0


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
        self._why_lost = ""
        self._heard = threading.Condition()
        earlier = job.events.read_bytes() if job.records and job.goes_on and not is_shared else b""
        self._pid = self._ask("start", job.to_json(environment), environment, is_shared, earlier) or 0
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

        if not ray.is_there():
            self._lose()
            return None
        try:
            return engine.get(getattr(self._actor, name).remote(*arguments), timeout=SECONDS_TO_ANSWER)
        except Exception as error:
            if isinstance(error, Refusal):
                raise Refusal(str(getattr(error, "cause", error))) from None  # without the traceback that Ray adds
            self._lose(raised_by_actor(error))
            return None

    def _lose(self, why: str = "") -> None:
        with self._heard:
            self._why_lost = self._why_lost or why
            if self._returncode is None:
                self._returncode, self._is_there = 1, False
            self._heard.notify_all()

    def _hear(self) -> None:
        """Takes what the actor says until the process has ended."""
        import ray as engine

        while self._returncode is None:
            try:
                asked = self._actor.news.remote()
                while not engine.wait([asked], timeout=SECONDS_BETWEEN_LOOKS)[0]:
                    if not ray.is_there():
                        self._lose()
                        return
                news = engine.get(asked)
                for name, offset, data in news.files:
                    self._write(name, offset, data)
            except Exception as error:  # the actor, its machine, or the cluster is gone; or this machine's disk is full
                self._lose(raised_by_actor(error))
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
    def has_server(self) -> bool:
        return self._is_there

    @property
    def returncode(self) -> int | None:
        return self._returncode

    def wait(self, seconds: float) -> None:
        with self._heard:
            self._heard.wait_for(lambda: self._returncode is not None, seconds)

    def how_it_ended(self) -> str:
        if self._is_there:
            return super().how_it_ended()
        return f"was lost with its place on {self._host}" + (f": {self._why_lost}" if self._why_lost else "")

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

    def measure(self) -> Values:
        """Of its machine and itself; nothing where that does not answer."""
        import ray as engine

        with contextlib.suppress(Exception):
            return dict(engine.get(self._actor.measure.remote(), timeout=SECONDS_TO_ANSWER))
        return {}

    def close(self) -> None:
        """Takes away what was there for it; it has ended."""
        self.wait(SECONDS_TO_ANSWER)
        if self._is_there:
            self._ask("close")


class Unanswered(Refusal):
    """A machine does not answer."""


class RayRun(WorkerRun):
    """A run whose workers are on the machines of a Ray cluster."""

    def run(self) -> Outcome:
        self._asked = workers(self._job.plan)
        try:
            with ray.connected(self._job.plan.cluster, sum(roles(self._job.plan).values())):
                return super().run()
        except Refusal as refusal:
            self._reason, self._has_logs = (str(refusal), True), False
            return self._ended()

    def _lives_of_a_server(self) -> bool:
        """The run's lives; each machine has a server of its own."""
        self._server = ""
        while self._live():
            self._job = replace(self._job, life=self._job.life + 1)
        return False

    @contextlib.contextmanager
    def _processes(self) -> Iterator[Sequence[Watched]]:
        with contextlib.ExitStack() as until_it_ended:
            processes = self._posted(until_it_ended)
            self._began = time.monotonic()
            with sampled(self._job, lambda: lambda: measured(processes)):
                yield processes

    def _posted(self, until_it_ended: contextlib.ExitStack) -> list[RemoteProcess]:
        """The processes, each at its place; behind a loss another machine may turn out to be lost, too.

        Raises:
            Refusal: if there is no place for them.
        """
        tries = TRIES if self._job.life else 1
        while True:
            tries -= 1
            with contextlib.ExitStack() as this_time:
                group = self._reserved()
                this_time.callback(ray.release, group)
                try:
                    processes = posted(self._job, group, this_time)
                except Unanswered:
                    if not tries or not ray.is_there():
                        raise
                    continue
                until_it_ended.push(this_time.pop_all())
                return processes

    def _reserved(self) -> Any:
        """Places for the run's processes: for all that were asked for, or behind a loss for as many as there can be.

        Raises:
            Refusal: if there are none.
        """
        while True:
            self._job = self._fitted(self._job) if self._job.life else self._job
            plan = self._job.plan
            count = sum(roles(plan).values())
            least = count - workers(plan) + min(self._least, workers(plan)) if self._job.life else count
            group = ray.reserved(plan.cluster, count, least, self._stop.is_set, self._display.line)
            if group is not None:
                return group
            if self._stop.is_set() or least == count:
                raise Refusal(ray.too_large(plan.cluster, count))

    def _why(self, processes: Sequence[Watched]) -> tuple[str, bool]:
        """What the others say of a loss comes before Ray's word of a machine."""
        deadline = time.monotonic() + SECONDS_TO_MISS
        while ray.is_there() and all(process.has_server for process in processes) and time.monotonic() < deadline:
            if not any(process.is_lost and process.reason().follows for process in processes):
                break
            time.sleep(POLL_SECONDS)
        return super()._why(processes)

    def _goes_on_after(self, why: str, is_own_word: bool) -> bool:
        if not ray.is_there():
            why, is_own_word = f"the head of the Ray cluster is gone: {why}", True
            self._reason = why, is_own_word
        return super()._goes_on_after(why, is_own_word)

    @property
    def _least(self) -> int:
        """With how many workers the run goes on behind a loss."""
        return self._job.plan.cluster.min_workers or self._asked

    def _fitted(self, job: Job) -> Job:
        """The job with as many workers as there is room for, after a loss.

        Raises:
            Refusal: if that is not enough.
        """
        plan, cluster = job.plan, job.plan.cluster
        others = sum(roles(plan).values()) - workers(plan)
        least = self._least
        found = ray.settled_room(cluster, self._asked + others, least + others, self._stop.is_set) - others
        if found < least:
            raise Refusal(
                f"there is room for {max(0, found)} worker(s) on the machines that are left, and the run goes on with "
                f"{least} or more (cluster.min_workers)"
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
        until_it_ended.callback(ray.end, actor)
    spots = asked(actors, "spot", ray.loopback(cluster), seconds=cluster.start_seconds)
    is_shared = seen(actors, job.folder)
    check_checkpoints(job, actors, is_shared, spots)
    configs = [{TF_CONFIG: text} for text in tf_configs(names, [spot.address for spot in spots])] if count > 1 else [{}]
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


def asked(actors: Sequence[Any], name: str, *arguments: Any, seconds: float = SECONDS_TO_ANSWER) -> list[Any]:
    """What each actor answers, within so many seconds."""
    import ray as engine

    try:
        return list(engine.get([getattr(actor, name).remote(*arguments) for actor in actors], timeout=seconds))
    except Exception as error:
        if why := raised_by_actor(error):
            raise Refusal(f"cluster=ray: a machine can't take its part: {why}") from error
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise Unanswered(f"cluster=ray: its machines do not answer: {said[-1]}") from error


def raised_by_actor(error: Exception) -> str:
    """What an actor itself raised, its constructor too, in a line; empty if it, or its machine, is gone."""
    from ray.exceptions import RayTaskError

    if not (isinstance(error, RayTaskError) or getattr(error, "_actor_init_failed", False)):
        return ""
    return str(error).strip().splitlines()[-1]


def seen(actors: Sequence[Any], folder: Path) -> list[bool]:
    """Which machines see a folder of this one.

    Raises:
        Refusal: if it can't be written here.
    """
    token = folder / f".seen-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        token.touch()
    except OSError as error:
        raise Refusal(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error
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
        sees = seen(actors, Path(options.folder))
    if not all(sees):
        host = next(spot.host for spot, there in zip(spots, sees, strict=True) if not there)
        raise Refusal(
            f"checkpoint={options.name}: {job.checkpoints} is not on a path that {host} shares with this machine, so "
            "no other one could go on from there; use checkpoint.folder=PATH that all see, or an object store's "
            "(gs://...), or checkpoint=none"
        )


def threads(cpus: int | None) -> dict[str, str]:
    """Has TensorFlow use the cores that were set aside for a process, and no others."""
    return {} if cpus is None else dict.fromkeys(THREADS, str(cpus))


def measured(processes: Sequence[RemoteProcess]) -> Values:
    """The values of all machines."""
    return {key: value for process in processes for key, value in process.measure().items()}


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
