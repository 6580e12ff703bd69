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

from scaleflow.cluster import TF_CONFIG, count_processes, count_workers, make_tf_configs, ray
from scaleflow.config.plan import make_plan
from scaleflow.errors import ConfigError
from scaleflow.events import Event, EventReader
from scaleflow.interfaces import Plan
from scaleflow.launcher.ray_actor import ActorLocation, WorkerActor
from scaleflow.launcher.resume import keep_batching
from scaleflow.launcher.supervisor import POLL_SECONDS, RunState, WorkerRun
from scaleflow.launcher.system_metrics import Values, record_system_metrics
from scaleflow.launcher.worker_process import THREADS, RunProcess
from scaleflow.worker.main import RunSpec

#: How many calls an actor answers at a time: one waits for news, the others are short.
PARALLEL_CALLS = 4

#: How long an actor that is there may take to answer.
SECONDS_TO_ANSWER = 60.0

#: How long no news are heard of an actor before it is looked whether the cluster is there.
SECONDS_BETWEEN_LOOKS = 5.0

#: So often machines are sought behind a loss, that do not answer then.
TRIES = 3

#: How long Ray may take to miss a machine whose processes the others miss already.
SECONDS_TO_MISS = 5.0


class RayProcess(RunProcess):
    """A process on another machine.

    Args:
        spec: what it is told.
        actor: stands for it there.
        environment: added to the machine's.
        is_shared: whether the machine sees the run's folder.
        host: the machine's name.
    """

    def __init__(self, spec: RunSpec, actor: Any, environment: Mapping[str, str], is_shared: bool, host: str) -> None:
        super().__init__(spec)
        self._actor = actor
        self._host = host
        self._returncode: int | None = None
        self._is_there = True
        self._why_lost = ""
        self._heard = threading.Condition()
        earlier = spec.events.read_bytes() if spec.records and spec.is_resumed and not is_shared else b""
        self._pid = self._ask("start", spec.to_json(environment), environment, is_shared, earlier) or 0
        self._listen()

    def _listen(self) -> None:
        self._listener = threading.Thread(target=self._receive, name=f"news of {self.job.name}", daemon=True)
        self._listener.start()

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Calls the actor; None where it is gone.

        Raises:
            ConfigError: where it says so.
        """
        import ray as engine

        if not ray.is_head_reachable():
            self._mark_lost()
            return None
        try:
            return engine.get(getattr(self._actor, name).remote(*arguments), timeout=SECONDS_TO_ANSWER)
        except Exception as error:
            if isinstance(error, ConfigError):
                raise ConfigError(str(getattr(error, "cause", error))) from None  # without the traceback that Ray adds
            self._mark_lost(raised_by_actor(error))
            return None

    def _mark_lost(self, why: str = "") -> None:
        with self._heard:
            self._why_lost = self._why_lost or why
            if self._returncode is None:
                self._returncode, self._is_there = 1, False
            self._heard.notify_all()

    def _receive(self) -> None:
        """Takes what the actor says until the process has ended."""
        import ray as engine

        while self._returncode is None:
            try:
                asked = self._actor.news.remote()
                while not engine.wait([asked], timeout=SECONDS_BETWEEN_LOOKS)[0]:
                    if not ray.is_head_reachable():
                        self._mark_lost()
                        return
                news = engine.get(asked)
                for name, offset, data in news.files:
                    self._write(name, offset, data)
            except Exception as error:  # the actor, its machine, or the cluster is gone; or this machine's disk is full
                self._mark_lost(raised_by_actor(error))
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

    def describe_exit(self) -> str:
        if self._is_there:
            return super().describe_exit()
        return f"was lost with its place on {self._host}" + (f": {self._why_lost}" if self._why_lost else "")

    def start_again(self) -> str:
        how = self.describe_exit()
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


class ActorUnanswered(ConfigError):
    """A machine does not answer."""


class RayRun(WorkerRun):
    """A run whose workers are on the machines of a Ray cluster."""

    def run(self) -> RunState:
        self._asked = count_workers(self._job.plan)
        try:
            with ray.connect(self._job.plan.cluster, sum(count_processes(self._job.plan).values())):
                return super().run()
        except ConfigError as refusal:
            self._reason, self._has_logs = (str(refusal), True), False
            return self._finish()

    def _run_attempts(self) -> bool:
        """The run's lives; each machine has a server of its own."""
        self._server = ""
        while self._run_attempt():
            self._job = replace(self._job, attempt=self._job.attempt + 1)
        return False

    @contextlib.contextmanager
    def _processes(self) -> Iterator[Sequence[RunProcess]]:
        with contextlib.ExitStack() as until_it_ended:
            processes = self._start_processes(until_it_ended)
            self._began = time.monotonic()
            with record_system_metrics(self._job, lambda: lambda: measure_machines(processes)):
                yield processes

    def _start_processes(self, until_it_ended: contextlib.ExitStack) -> list[RayProcess]:
        """The processes, each at its place; behind a loss another machine may turn out to be lost, too.

        Raises:
            ConfigError: if there is no place for them.
        """
        tries = TRIES if self._job.attempt else 1
        while True:
            tries -= 1
            with contextlib.ExitStack() as this_time:
                group = self._reserve_slots()
                this_time.callback(ray.release_slots, group)
                try:
                    processes = start_processes(self._job, group, this_time)
                except ActorUnanswered:
                    if not tries or not ray.is_head_reachable():
                        raise
                    continue
                until_it_ended.push(this_time.pop_all())
                return processes

    def _reserve_slots(self) -> Any:
        """Places for the run's processes: for all that were asked for, or behind a loss for as many as there can be.

        Raises:
            ConfigError: if there are none.
        """
        while True:
            self._job = self._resize_job(self._job) if self._job.attempt else self._job
            plan = self._job.plan
            count = sum(count_processes(plan).values())
            least = count - count_workers(plan) + min(self._least, count_workers(plan)) if self._job.attempt else count
            group = ray.reserve_slots(plan.cluster, count, least, self._stop.is_set, self._display.print_line)
            if group is not None:
                return group
            if self._stop.is_set() or least == count:
                raise ConfigError(ray.explain_too_large(plan.cluster, count))

    def _find_reason(self, processes: Sequence[RunProcess]) -> tuple[str, bool]:
        """What the others say of a loss comes before Ray's word of a machine."""
        deadline = time.monotonic() + SECONDS_TO_MISS
        while (
            ray.is_head_reachable() and all(process.has_server for process in processes) and time.monotonic() < deadline
        ):
            if not any(process.is_lost and process.reason().follows for process in processes):
                break
            time.sleep(POLL_SECONDS)
        return super()._find_reason(processes)

    def _should_restart(self, why: str, is_own_word: bool) -> bool:
        if not ray.is_head_reachable():
            why, is_own_word = f"the head of the Ray cluster is gone: {why}", True
            self._reason = why, is_own_word
        return super()._should_restart(why, is_own_word)

    @property
    def _least(self) -> int:
        """With how many workers the run goes on behind a loss."""
        return self._job.plan.cluster.min_workers or self._asked

    def _resize_job(self, spec: RunSpec) -> RunSpec:
        """The job with as many workers as there is room for, after a loss.

        Raises:
            ConfigError: if that is not enough.
        """
        plan, cluster = spec.plan, spec.plan.cluster
        others = sum(count_processes(plan).values()) - count_workers(plan)
        least = self._least
        found = ray.wait_for_slots(cluster, self._asked + others, least + others, self._stop.is_set) - others
        if found < least:
            raise ConfigError(
                f"there is room for {max(0, found)} worker(s) on the machines that are left, and the run goes on with "
                f"{least} or more (cluster.min_workers)"
            )
        if found == count_workers(plan):
            return spec
        fewer = resize_plan(plan, found, least, read_first_ready(spec))
        self._display.print_line(f"goes on with {count_workers(fewer)} worker(s) in place of {count_workers(plan)}")
        return replace(spec, plan=fewer)


def start_processes(spec: RunSpec, group: Any, until_it_ended: contextlib.ExitStack) -> list[RayProcess]:
    """The processes of a run, each at its place of a group.

    Raises:
        ConfigError: if a machine can't take its part.
    """
    import ray as engine

    cluster, names = spec.plan.cluster, count_processes(spec.plan)
    count = sum(names.values())
    remote = engine.remote(WorkerActor)
    actors = [
        remote.options(max_concurrency=PARALLEL_CALLS, **ray.actor_options(group, place, cluster)).remote(
            str(Path.cwd())
        )
        for place in range(count)
    ]
    for actor in actors:
        until_it_ended.callback(ray.kill_actor, actor)
    spots = call_actors(actors, "spot", ray.loopback(cluster), seconds=cluster.start_seconds)
    is_shared = list_sharing(actors, spec.folder)
    check_checkpoints(spec, actors, is_shared, spots)
    configs = (
        [{TF_CONFIG: text} for text in make_tf_configs(names, [spot.address for spot in spots])] if count > 1 else [{}]
    )
    limits = thread_environment(cluster.cpus)
    processes: list[RayProcess] = []
    for number, (actor, config, spot) in enumerate(zip(actors, configs, spots, strict=True)):
        environment = {**spec.environment, **limits, **config}
        process = RayProcess(replace(spec, worker=number), actor, environment, is_shared[number], spot.host)
        until_it_ended.callback(process.close)
        processes.append(process)
    for process in processes:
        until_it_ended.callback(process.kill)  # all of them, before the first one's end is waited for
    return processes


def call_actors(actors: Sequence[Any], name: str, *arguments: Any, seconds: float = SECONDS_TO_ANSWER) -> list[Any]:
    """What each actor answers, within so many seconds."""
    import ray as engine

    try:
        return list(engine.get([getattr(actor, name).remote(*arguments) for actor in actors], timeout=seconds))
    except Exception as error:
        if why := raised_by_actor(error):
            raise ConfigError(f"cluster=ray: a machine can't take its part: {why}") from error
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ActorUnanswered(f"cluster=ray: its machines do not answer: {said[-1]}") from error


def raised_by_actor(error: Exception) -> str:
    """What an actor itself raised, its constructor too, in a line; empty if it, or its machine, is gone."""
    from ray.exceptions import RayTaskError

    if not (isinstance(error, RayTaskError) or getattr(error, "_actor_init_failed", False)):
        return ""
    return str(error).strip().splitlines()[-1]


def list_sharing(actors: Sequence[Any], folder: Path) -> list[bool]:
    """Which machines see a folder of this one.

    Raises:
        ConfigError: if it can't be written here.
    """
    token = folder / f".seen-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        token.touch()
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error
    try:
        return call_actors(actors, "sees", str(token))
    finally:
        token.unlink()


def check_checkpoints(
    spec: RunSpec, actors: Sequence[Any], is_shared: Sequence[bool], spots: Sequence[ActorLocation]
) -> None:
    """Refuses checkpoints that some of the machines would not find again.

    Raises:
        ConfigError: naming the machine.
    """
    options = spec.plan.checkpoint
    if options.name == "none" or "://" in spec.checkpoints:
        return
    sees = is_shared
    if options.folder is not None:
        sees = list_sharing(actors, Path(options.folder))
    if not all(sees):
        host = next(spot.host for spot, there in zip(spots, sees, strict=True) if not there)
        raise ConfigError(
            f"checkpoint={options.name}: {spec.checkpoints} is not on a path that {host} shares with this machine, so "
            "no other one could go on from there; use checkpoint.folder=PATH that all see, or an object store's "
            "(gs://...), or checkpoint=none"
        )


def thread_environment(cpus: int | None) -> dict[str, str]:
    """Has TensorFlow use the cores that were set aside for a process, and no others."""
    return {} if cpus is None else dict.fromkeys(THREADS, str(cpus))


def measure_machines(processes: Sequence[RayProcess]) -> Values:
    """The values of all machines."""
    return {key: value for process in processes for key, value in process.measure().items()}


def read_first_ready(spec: RunSpec) -> Event:
    return next(event for event in EventReader(spec.events).read() if event["event"] == "ready")


def resize_plan(plan: Plan, most: int, least: int, ready: Event) -> Plan:
    """The plan on other workers, at most so many, with the global batch that it was begun with.

    Raises:
        ConfigError: if that divides among none of the numbers that there is room for.
    """
    config = copy.deepcopy(dict(plan.config))
    keep_batching(config, ready)
    size, was = int(config["training"]["global_batch_size"]), int(ready["params"]["resolved.workers"])
    each = max(1, int(ready["params"]["resolved.replicas"]) // was) * plan.training.accumulate
    in_step = plan.strategy.name == "multi_worker"
    for count in range(most, least - 1, -1):
        if not in_step or size % (count * each) == 0:
            config["cluster"] = {**config["cluster"], "workers": count}
            return make_plan(config, plan.choices, plan.search, look_outside=False)
    fits = [count for count in range(1, was + 1) if size % (count * each) == 0]
    raise ConfigError(
        f"there is room for {most} worker(s), and the global batch of {size} divides among "
        f"{', '.join(map(str, fits))}; cluster.min_workers={fits[0]} goes on with those"
    )
