"""Sets up a worker process: devices, strategy, precision, the division of a batch, and the startup timer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaleflow.cluster.gpus import drop_assigned_devices
from scaleflow.cluster.tasks import count_synchronous_workers, process_names
from scaleflow.cluster.tf_config import TF_CONFIG, parse_tf_config
from scaleflow.config.plan import check_rules, make_batching, set_values
from scaleflow.errors import ConfigError
from scaleflow.interfaces import LEARNED_FILES, Batching, Plan
from scaleflow.interfaces.clock import measure_since
from scaleflow.interfaces.events import Emit, Note, PeersMet, Waiting
from scaleflow.interfaces.parent_process import end_with_parent
from scaleflow.runs import RunSpec
from scaleflow.worker import keras_import

if TYPE_CHECKING:
    import tensorflow as tf

    from scaleflow.hardware import Devices
    from scaleflow.training import WorkerSync


#: Minimum number of examples per evaluation step on CPUs, over all replicas.
EVALUATION_BATCH = 256


@dataclass(frozen=True)
class Runtime:
    """The basis of a worker process: devices, the strategy over them, the precision, the division of a batch."""

    devices: Devices
    strategy_name: str
    strategy: tf.distribute.Strategy
    #: The strategy for evaluations; a coordinator evaluates in its own process
    evaluation_strategy: tf.distribute.Strategy
    policy: str
    batching: Batching
    worker_sync: WorkerSync

    @property
    def is_divided(self) -> bool:
        """Whether the model is divided into pipeline stages on several devices."""
        return self.strategy_name == "pipeline"

    def read_batching(self, batching: Batching) -> Batching:
        """Returns how the loop reads such global batches. A pipeline divides them among its replicas itself."""
        if not self.is_divided:
            return batching
        return Batching(batching.batch_size * batching.replicas, batching.accumulate, replicas=1)

    def to_values(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy_name,
            "precision": self.policy,
            "hardware": self.devices.kind.lower(),
            "replicas": self.batching.replicas,
            "batch_size": self.batching.batch_size,
            "global_batch_size": self.batching.global_size,
        }


def setup_runtime(plan: Plan, emit: Emit) -> Runtime:
    """Sets up TensorFlow and Keras in this process. Call it before any TensorFlow operation."""
    import keras

    from scaleflow import hardware, model, precision, strategy, training

    model.correct_keras_add()
    model.read_rows_in_take()
    hardware.apply_debug(plan.debug)
    with guard_tpu_connection(plan, emit):
        devices = hardware.configure_devices(drop_assigned_devices(plan.hardware, os.environ))
    name = strategy.resolve_strategy(plan.strategy, devices.names)
    policy = precision.resolve_policy(plan.precision, devices.kind)
    known = {"strategy.name": name, "hardware.name": devices.kind.lower(), "precision.name": policy}
    warnings = check_rules(set_values(plan, known))
    with guard_rendezvous(plan, emit):
        tf_strategy, strategy_note = strategy.create_strategy(name, devices.names, plan.strategy, tpu=devices.tpu)
        worker_sync = training.WorkerSync(tf_strategy, count_synchronous_workers(plan), bool)
        if not worker_sync.is_same(digest_plan(plan)):
            worker_sync.leave()
            raise ConfigError(
                "strategy=multi_worker: the workers were not all started with the same config, TensorFlow version "
                "and model.init_from; start each with the same command"
            )
    keras.utils.set_random_seed(plan.seed)
    precision.apply_policy(policy)
    for note in filter(None, (strategy_note, *warnings)):
        emit(Note(note))
    local = strategy.create_strategy("one_device", devices.names)[0] if name == "parameter_server" else tf_strategy
    replicas = plan.strategy.replicas if name == "pipeline" else tf_strategy.num_replicas_in_sync
    batching = make_batching(plan.training, replicas, is_resumed=plan.resume is not None)
    return Runtime(
        devices, name, tf_strategy, evaluation_strategy=local, policy=policy, batching=batching, worker_sync=worker_sync
    )


def divide_evaluation(runtime: Runtime, plan: Plan) -> Batching:
    """Returns the division of the run's evaluation batches."""
    multiple = plan.strategy.micro_batches if runtime.is_divided else 1
    return make_evaluation_batching(runtime.batching, runtime.devices.kind, multiple)


def make_evaluation_batching(batching: Batching, kind: str, multiple: int = 1) -> Batching:
    """Returns the division of evaluation batches on devices of a kind (`CPU`, `GPU` or `TPU`).

    On a device with its own memory, a replica takes as many examples at once as in training: more may not fit. On CPUs
    there are no micro-batches, since there are no gradients to store. A replica's share is divisible by `multiple`.
    """
    share = max(batching.share, EVALUATION_BATCH // batching.replicas) if kind == "CPU" else batching.batch_size
    return Batching(-(-share // multiple) * multiple, 1, batching.replicas)


def compute_peak(plan: Plan, runtime: Runtime) -> float | None:
    """Computes the peak of all workers' devices, in floating-point operations per second; None if unknown."""
    from scaleflow import hardware

    if runtime.strategy_name == "parameter_server":
        return None  # the coordinator does not see the devices of its workers
    workers = count_synchronous_workers(plan)
    kind = runtime.devices.kind
    names = runtime.devices.names
    devices = len(names) if runtime.is_divided else runtime.batching.replicas // workers
    local_peak = hardware.process_peak(kind, runtime.policy, -(-devices // plan.hardware.logical_devices))
    return None if local_peak is None else local_peak * workers


@contextlib.contextmanager
def guard_rendezvous(plan: Plan, emit: Emit) -> Iterator[None]:
    """Wraps code in which processes wait for each other. The launcher may kill a process that waits too long."""
    if len(process_names(plan)) == 1:
        yield
        return
    with allow_kill(emit, peers=parse_tf_config(os.environ.get(TF_CONFIG)).peers, seconds=plan.cluster.start_seconds):
        yield


@contextlib.contextmanager
def guard_tpu_connection(plan: Plan, emit: Emit) -> Iterator[None]:
    """Wraps the connection to a TPU. It waits forever if something else answers at the address."""
    if plan.hardware.name != "tpu":
        yield
        return
    seconds = plan.cluster.start_seconds
    vain = f"hardware.tpu={plan.hardware.tpu}: no TPU answers there within cluster.start_seconds={seconds:g}"
    with allow_kill(emit, vain=vain, seconds=seconds):
        yield


@contextlib.contextmanager
def allow_kill(emit: Emit, **what: Any) -> Iterator[None]:
    """Wraps a TensorFlow call that may never return and that blocks all Python threads of this process."""
    emit(Waiting(**what))
    end_with_parent(signal.SIGKILL)  # the thread that watches the launcher is blocked as well
    yield
    end_with_parent(0)
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # TensorFlow's runtime has replaced the handler
    emit(PeersMet())


def is_chief(plan: Plan) -> bool:
    """Returns whether the events of this process are the run's events."""
    return len(process_names(plan)) == 1 or parse_tf_config(os.environ.get(TF_CONFIG)).worker == 0


def digest_plan(plan: Plan) -> str:
    """Returns a text that must be equal on all workers: the config, TensorFlow's version and the initial weights."""
    excluded = ("tracking", "cluster", "resume", "resume_data", "resume_code")
    config = {key: value for key, value in plan.config.items() if key not in excluded}
    files = []
    if plan.weights is not None:
        files.append(plan.weights)
        files += [str(Path(plan.weights).with_name(name)) for name in LEARNED_FILES]
    digests = [digest_file(file) for file in files]
    return json.dumps([config, version("tensorflow"), digests], sort_keys=True)


def digest_file(file: str) -> str | None:
    if not Path(file).exists():
        return None
    with Path(file).open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


class StartupTimer:
    """Divides the time since the command began (seconds since the epoch) into named parts.

    `known` has parts that were measured elsewhere, in seconds. They are subtracted from the part that ends first.
    """

    def __init__(self, began: float, **known: float) -> None:
        self._began = began
        self._last = sum(known.values())
        self.seconds: dict[str, float] = dict(known)

    def end_part(self, part: str) -> None:
        """Ends a part, which began when the previous part ended. Parts of the same name are added up."""
        now = measure_since(self._began)
        self.seconds[part] = self.seconds.get(part, 0.0) + max(0.0, now - self._last)
        self._last = now

    def values(self) -> dict[str, float]:
        """Returns the metrics: the total time and its parts, in seconds."""
        parts = {f"{TOTAL}_{part}": seconds for part, seconds in self.seconds.items()}
        return {TOTAL: sum(self.seconds.values())} | parts


def make_startup_timer(spec: RunSpec) -> StartupTimer:
    """Makes the startup timer, and ends its part `launch`.

    The import of Keras counts only if this command caused it, not if a shared fork server did it earlier.
    """
    seconds = keras_import.import_seconds if keras_import.imported_at > spec.started else 0.0
    startup_timer = StartupTimer(spec.started, **{"import": seconds})
    startup_timer.end_part("launch")
    return startup_timer


TOTAL = "perf/seconds_to_first_step"
