"""Starts the processes of a run on the machines of a Ray cluster.

An actor (`actor.py`) runs each process. This command is the run's only launcher: it displays, records and restarts the
run as it does with local processes. All machines must see the run's folder.
"""

import contextlib
import copy
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaleflow.cluster.tasks import count_processes, count_workers, make_tf_configs
from scaleflow.cluster.tf_config import TF_CONFIG
from scaleflow.config.plan import check_plan, set_values
from scaleflow.errors import ConfigError
from scaleflow.features.ray import engine as ray
from scaleflow.features.ray.actor import ActorLocation, WorkerActor
from scaleflow.interfaces import Plan
from scaleflow.launcher.processes.supervisor import choose_reason
from scaleflow.launcher.processes.worker_process import THREADS_ENV, EndReason, RunProcess
from scaleflow.launcher.recording.monitor import POLL_SECONDS, RunMonitor
from scaleflow.launcher.recording.system_metrics import Values, record_system_metrics
from scaleflow.runs import RunSpec, RunState
from scaleflow.runs.resume import keep_batching

#: Calls that an actor runs concurrently: one waits for the end of the process, the others are short.
CONCURRENT_CALLS = 4

#: Number of processes started at the same time. Until a process has started, its environment, which names all
#: processes, stays in memory.
STARTS_AT_ONCE = 64

#: Seconds to wait for an answer from an actor.
ANSWER_SECONDS = 60.0

#: Seconds without an answer from an actor after which the launcher checks the cluster's head.
HEAD_CHECK_SECONDS = 5.0

#: Attempts to start the processes after a loss. Ray may still offer slots on a lost machine.
MAX_START_ATTEMPTS = 3

#: Seconds for Ray to report a lost machine after other processes noticed the lost connection.
LOSS_REPORT_SECONDS = 5.0


class RayProcess(RunProcess):
    """A process of the run on another machine, `host`. A `WorkerActor` runs it; `actor` is Ray's handle to that."""

    returncode: int | None = None
    pid = 0
    has_server = True

    def __init__(self, spec: RunSpec, actor: Any, environment: Mapping[str, str], host: str) -> None:
        super().__init__(spec)
        self._actor = actor
        self._host = host
        self._why_lost = ""
        self._changed = threading.Condition()
        self._answer = self.request("start", spec.without_credentials(), environment)

    def await_start(self) -> None:
        """Waits until the actor has started the process. Raises ConfigError if the actor raises one."""
        self.pid = self._receive(self._answer) or 0

    def request(self, name: str, *arguments: Any) -> Any:
        """Calls a method of the actor. Returns Ray's reference to the answer, or None if the cluster is gone."""
        return getattr(self._actor, name).remote(*arguments) if ray.is_head_reachable() else None

    def _receive(self, answer: Any) -> Any:
        """Returns the actor's answer, or None if the actor is gone. Raises ConfigError if its method raises one."""
        import ray as engine

        if answer is None:
            self.mark_lost()
            return None
        try:
            return engine.get(answer, timeout=ANSWER_SECONDS)
        except Exception as error:
            if isinstance(error, ConfigError):
                raise ConfigError(str(getattr(error, "cause", error))) from None  # without Ray's traceback
            self.mark_lost(format_actor_error(error))
            return None

    def mark_lost(self, why: str = "") -> None:
        with self._changed:
            self._why_lost = self._why_lost or why
            if self.returncode is None:
                self.returncode = 1
                self.has_server = False
            self._changed.notify_all()

    def receive_exit(self, answer: Any) -> bool:
        """Takes the answer to a `wait` request. Returns whether the process still runs."""
        import ray as engine

        try:
            returncode = engine.get(answer)
        except Exception as error:  # the actor, its machine, or the cluster is gone
            self.mark_lost(format_actor_error(error))
            return False
        with self._changed:
            self.returncode = returncode
            self._changed.notify_all()
        return returncode is None

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.returncode is not None, seconds)

    def describe_exit(self) -> str:
        if self.has_server:
            return super().describe_exit()
        return f"was lost with its Ray actor on {self._host}" + (f": {self._why_lost}" if self._why_lost else "")

    def start_again(self) -> str:
        exit_description = self.describe_exit()
        self._begin()
        self.returncode = None
        self.pid = self._receive(self.request("start_again")) or 0
        watch_exits([self])
        return exit_description

    def stop(self) -> None:
        self._actor.stop.remote()

    def kill(self) -> None:
        if self.is_alive:
            self.was_ended = True
            self._actor.kill.remote()


class ActorUnanswered(ConfigError):
    """An actor, or its machine, does not answer."""


class RayHost:
    """Starts the processes of a run on the machines of a Ray cluster."""

    first_phase = "starting the processes on Ray"
    builds_meanwhile = False

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor
        self._cluster = ray.ray_options(monitor.spec.plan)
        self._workers = count_workers(monitor.spec.plan)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        self._monitor.display.begin_phase("connecting to Ray")
        with ray.connect_ray(self._cluster, sum(count_processes(self._monitor.spec.plan).values())):
            yield

    @contextlib.contextmanager
    def start(self, spec: RunSpec) -> Iterator[tuple[RunSpec, Sequence[RunProcess]]]:
        with contextlib.ExitStack() as cleanup:
            spec, processes = self._start_processes(spec, cleanup)

            with record_system_metrics(spec, lambda: lambda: measure_processes(processes)):
                yield spec, processes

    def _start_processes(self, spec: RunSpec, cleanup: contextlib.ExitStack) -> tuple[RunSpec, list[RayProcess]]:
        """Starts all processes. `cleanup` ends them. After a loss it retries, because Ray may offer a machine that is
        gone.

        Raises ConfigError if there is no room, or a machine does not see a folder of the run.
        """
        tries = MAX_START_ATTEMPTS if spec.attempt else 1
        while True:
            tries -= 1
            with contextlib.ExitStack() as this_try:
                spec, group = self._reserve_slots(spec)
                this_try.callback(ray.release_slots, group)
                try:
                    processes = start_processes(spec, group, this_try)
                except ActorUnanswered:
                    if not tries or not ray.is_head_reachable():
                        raise
                    continue
                cleanup.push(this_try.pop_all())
                return spec, processes

    def _reserve_slots(self, spec: RunSpec) -> tuple[RunSpec, Any]:
        """Returns a placement group with one slot per process. After a loss it may be for fewer workers.

        Raises ConfigError if there is not enough room.
        """
        should_stop = self._monitor.stop.is_set
        display = self._monitor.display
        while True:
            spec = self._resize(spec) if spec.attempt else spec
            plan = spec.plan
            count = sum(count_processes(plan).values())
            least = count - count_workers(plan) + min(self._least, count_workers(plan)) if spec.attempt else count
            cluster = ray.ray_options(plan)
            report = display.print_line
            group = ray.reserve_slots(cluster, count, least, should_stop=should_stop, report=report)
            if group is not None:
                return spec, group
            if should_stop() or least == count:
                raise ConfigError(ray.explain_too_large(cluster, count))

    def find_reason(self, processes: Sequence[RunProcess]) -> EndReason:
        """Returns why the attempt ended. Waits for Ray to report a loss that processes may have noticed earlier."""
        deadline = time.monotonic() + LOSS_REPORT_SECONDS
        while (
            ray.is_head_reachable() and all(process.has_server for process in processes) and time.monotonic() < deadline
        ):
            if not any(process.is_lost and process.find_reason().is_lost_peer for process in processes):
                break
            time.sleep(POLL_SECONDS)
        return choose_reason(processes)

    def explain_loss(self) -> str | None:
        return None if ray.is_head_reachable() else "the head of the Ray cluster was lost"

    @property
    def _least(self) -> int:
        """Minimum number of workers to continue the run with after a loss."""
        return self._cluster.min_workers or self._workers

    def _resize(self, spec: RunSpec) -> RunSpec:
        """Returns the spec with as many workers as fit after a loss.

        Raises ConfigError if too few fit.
        """
        plan = spec.plan
        others = sum(count_processes(plan).values()) - count_workers(plan)
        least = self._least
        wanted = self._workers + others
        stop = self._monitor.stop
        available = ray.wait_for_slots(self._cluster, wanted, least + others, should_stop=stop.is_set) - others
        if available < least:
            raise ConfigError(
                f"the remaining machines have room for {max(0, available)} worker(s), and the run needs at least "
                f"{least} (cluster.min_workers)"
            )
        if available == count_workers(plan):
            return spec
        resized = resize_plan(plan, available, least, params=RunState.read(spec.folder).params)
        self._monitor.display.print_line(
            f"continues with {count_workers(resized)} worker(s) instead of {count_workers(plan)}"
        )
        return replace(spec, plan=resized)


def start_processes(spec: RunSpec, group: Any, cleanup: contextlib.ExitStack) -> list[RayProcess]:
    """Starts an actor and a process in each slot of a placement group. `cleanup` ends them.

    Raises ConfigError if an actor cannot start, or a machine does not see a folder of the run.
    """
    import ray as engine

    cluster = ray.ray_options(spec.plan)
    names = count_processes(spec.plan)
    count = sum(names.values())
    remote = engine.remote(WorkerActor)
    actors = [
        remote.options(max_concurrency=CONCURRENT_CALLS, **ray.actor_options(group, slot, cluster)).remote(
            str(Path.cwd())
        )
        for slot in range(count)
    ]
    for actor in actors:
        cleanup.callback(ray.kill_actor, actor)
    locations = call_actors(actors, "locate", ray.loopback(cluster), seconds=cluster.start_seconds)
    check_folders(spec, actors, locations)
    addresses = [location.address for location in locations]
    configs = ({TF_CONFIG: text} for text in make_tf_configs(names, addresses)) if count > 1 else iter([{}])
    limits = {} if cluster.cpus is None else dict.fromkeys(THREADS_ENV, str(cluster.cpus))
    processes: list[RayProcess] = []
    cleanup.callback(close_processes, processes)
    try:
        for number, (actor, config, location) in enumerate(zip(actors, configs, locations, strict=True)):
            environment: Mapping[str, str] = {**spec.environment, **limits, **config}
            processes.append(RayProcess(replace(spec, worker=number), actor, environment, host=location.host))
            if number >= STARTS_AT_ONCE:
                processes[number - STARTS_AT_ONCE].await_start()
        for process in processes[-STARTS_AT_ONCE:]:
            process.await_start()
    finally:
        for process in processes:
            cleanup.callback(process.kill)  # runs before `close_processes`, which waits for them
        watch_exits(processes)
    return processes


def watch_exits(processes: Sequence[RayProcess]) -> None:
    """Starts a thread that asks the actors for exit statuses until all these processes have ended."""
    threading.Thread(target=wait_for_exits, args=(processes,), name="ends of processes", daemon=True).start()


def wait_for_exits(processes: Sequence[RayProcess]) -> None:
    import ray as engine

    waiting = [process for process in processes if process.is_alive]
    pending = dict[Any, RayProcess]()
    with contextlib.suppress(Exception):  # the cluster is gone
        while waiting or pending:
            answers = {process.request("wait"): process for process in waiting}
            if None in answers:
                break
            pending |= answers
            ready, _ = engine.wait(list(pending), timeout=HEAD_CHECK_SECONDS)
            if ready:  # others may have ended with it
                ready, _ = engine.wait(list(pending), num_returns=len(pending), timeout=0)
            elif not ray.is_head_reachable():
                break
            answered = {answer: pending.pop(answer) for answer in ready}
            waiting = [process for answer, process in answered.items() if process.receive_exit(answer)]
    for process in {*waiting, *pending.values()}:  # not all: another thread watches restarted ones
        if process.is_alive:
            process.mark_lost()  # with the cluster


def measure_processes(processes: Sequence[RayProcess]) -> Values:
    """Returns the system metrics of the processes and their machines, except for actors that do not answer."""
    import ray as engine

    values: Values = {}
    with contextlib.suppress(Exception):
        asked = [process.request("measure") for process in processes]
        for answer in engine.wait(asked, num_returns=len(asked), timeout=ANSWER_SECONDS)[0]:
            with contextlib.suppress(Exception):
                values |= engine.get(answer)
    return values


def close_processes(processes: Sequence[RayProcess]) -> None:
    """Waits until processes have ended, then lets their actors release their resources."""
    import ray as engine

    deadline = time.monotonic() + ANSWER_SECONDS
    for process in processes:
        process.wait(max(0.0, deadline - time.monotonic()))
    if ray.is_head_reachable():
        closing = [process.request("close") for process in processes if process.has_server]
        if closing:
            engine.wait(closing, num_returns=len(closing), timeout=ANSWER_SECONDS)


def call_actors(actors: Sequence[Any], name: str, *arguments: Any, seconds: float = ANSWER_SECONDS) -> list[Any]:
    """Calls a method of all actors at the same time and returns their answers.

    Raises `ActorUnanswered` if an actor or its machine is gone or does not answer within `seconds`. Raises ConfigError
    if an actor raises an exception.
    """
    import ray as engine

    try:
        return list(engine.get([getattr(actor, name).remote(*arguments) for actor in actors], timeout=seconds))
    except Exception as error:
        why = format_actor_error(error)
        if why:
            raise ConfigError(f"cluster=ray: a machine cannot run its process: {why}") from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ActorUnanswered(f"cluster=ray: its machines do not answer: {lines[-1]}") from error


def format_actor_error(error: Exception) -> str:
    """Returns the last line of an exception raised in an actor's method or constructor, or "" for a lost actor."""
    from ray.exceptions import RayTaskError

    if not (isinstance(error, RayTaskError) or getattr(error, "actor_init_failed", False)):
        return ""
    return str(error).strip().splitlines()[-1]


def check_folders(spec: RunSpec, actors: Sequence[Any], locations: Sequence[ActorLocation]) -> None:
    """Raises ConfigError if a machine does not see the run's folder, or `checkpoint.folder` if that is a path."""
    host = find_host_without(spec.folder, actors, locations)
    if host:
        key = "hydra.run.dir" if spec.parent is None else "hydra.sweep.dir"
        raise ConfigError(
            f"cluster=ray: {host} does not see the run's folder, {spec.folder}; use {key}=PATH on a path that all "
            "machines see"
        )
    options = spec.plan.checkpoint
    if options.name == "none" or options.folder is None or "://" in options.folder:
        return
    host = find_host_without(Path(options.folder), actors, locations)
    if host:
        raise ConfigError(
            f"checkpoint={options.name}: {spec.checkpoints} is not on a path that {host} shares with this machine, so "
            "other machines could not resume from it; use checkpoint.folder=PATH on a path that all machines see or "
            "in an object store (s3://...), or checkpoint=none"
        )


def find_host_without(folder: Path, actors: Sequence[Any], locations: Sequence[ActorLocation]) -> str | None:
    """Returns the name of a machine that does not see a folder of this machine, or None if all see it.

    A file with a random name distinguishes the folder from another one at the same path. Raises ConfigError if this
    machine cannot write to the folder.
    """
    probe = folder / f".seen-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error
    try:
        answers = call_actors(actors, "sees", str(probe))
    finally:
        probe.unlink()
    return next((location.host for location, sees in zip(locations, answers, strict=True) if not sees), None)


def resize_plan(plan: Plan, most: int, least: int, params: Mapping[str, str]) -> Plan:
    """Returns the plan for the largest number of workers, from `least` to `most`, that divides the run's global batch.

    `params` has the run's original numbers of workers and replicas, and its batch size. Raises ConfigError if no number
    divides the global batch.
    """
    config = copy.deepcopy(dict(plan.config))
    keep_batching(config, params)
    size = int(config["training"]["global_batch_size"])
    was = int(params["resolved.workers"])
    parts_of_worker = max(1, int(params["resolved.replicas"]) // was) * plan.training.accumulate
    for count in range(most, least - 1, -1):
        if not plan.strategy.is_synchronous or size % (count * parts_of_worker) == 0:
            kept = {key: config[key] for key in ("training", "dataset")}
            resized = set_values(plan, {**kept, "cluster.workers": count})
            check_plan(resized)
            return resized
    fitting = [count for count in range(1, was + 1) if size % (count * parts_of_worker) == 0]
    raise ConfigError(
        f"there is room for {most} worker(s), and the global batch of {size} is divisible among "
        f"{', '.join(map(str, fitting))}; use cluster.min_workers={fitting[0]} to allow such a number"
    )
