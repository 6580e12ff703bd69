"""Connects to a Ray cluster and reserves slots for processes on its nodes. Imports Ray only when it is needed.

https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
"""

import contextlib
import logging
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

from scaleflow.cluster.engines import ClusterEngine
from scaleflow.cluster.network import is_address, is_listening
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Cluster, Plan, Rule

#: Ray's own environment variable for the cluster's address.
ADDRESS_VARIABLE = "RAY_ADDRESS"

#: Ray's addresses: of a cluster that already runs on this machine, and of a new one for this run only.
RUNNING_CLUSTER = "auto"
NEW_CLUSTER = "local"

LOOPBACK = "127.0.0.1"

#: Seconds between polls of the cluster.
POLL_SECONDS = 0.2

#: Seconds to wait for slots before printing that the run waits.
NOTICE_SECONDS = 2.0

#: Ray may still list a lost node as alive for this many seconds.
NODE_LOSS_SECONDS = 1.0

#: Seconds to wait for a lost process's node to return before the run continues with fewer workers.
NODE_RETURN_SECONDS = 5.0

#: A Unix socket path has at most 107 bytes, and Ray's socket names take about 70 of them.
MAX_FOLDER_LENGTH = 30

#: Maximum seconds without the cluster's head. Ray ends this process after a minute.
HEAD_SECONDS = 20.0

_connection_lock = threading.RLock()
_connections = 0
_head = ""
_folders: list[tempfile.TemporaryDirectory[str]] = []


@dataclass(frozen=True)
class RayCluster(Cluster):
    """Keys that only a Ray cluster has. conf/cluster/ray.yaml describes them."""

    name: str = "ray"
    min_workers: int | None = field(default=None, metadata={"at_least": 1, "at_most": 4096})
    address: str | None = None
    placement: Literal["spread", "pack"] = "spread"


def ray_options(plan: Plan) -> RayCluster:
    assert isinstance(plan.cluster, RayCluster)
    return plan.cluster


def check_address(cluster: RayCluster) -> None:
    """Checks that the cluster can be reached, without importing Ray.

    Raises ConfigError if Ray is not installed, the address is invalid, or nothing answers there.
    """
    if find_spec("ray") is None:
        raise ConfigError("cluster=ray: Ray is not installed; pip install 'scaleflow[ray]'")
    address = address_of(cluster)
    if address in (RUNNING_CLUSTER, NEW_CLUSTER):
        return
    key = "cluster.address" if cluster.address else ADDRESS_VARIABLE
    if "://" in address or not is_address(address):
        raise ConfigError(
            f"{key}={address}: expected HOST:PORT or auto; from a machine outside of the cluster use "
            "ray job submit -- scaleflow cluster=ray ..."
        )
    if not is_listening(address):
        raise ConfigError(f"{key}={address}: no Ray cluster answers there; start one with ray start --head --port=6379")


def address_of(cluster: RayCluster) -> str:
    return cluster.address or os.environ.get(ADDRESS_VARIABLE) or NEW_CLUSTER


def loopback(cluster: RayCluster) -> str | None:
    """Returns the loopback address if all processes are on this machine, or None if other machines must reach them."""
    return LOOPBACK if address_of(cluster) == NEW_CLUSTER else None


@contextlib.contextmanager
def connect_ray(cluster: RayCluster, count: int) -> Iterator[None]:
    """Connects this process to the cluster as a driver. The jobs of a sweep share one connection.

    A new local cluster has room for `count` processes, however few cores there are. Raises ConfigError if Ray can't
    connect or start a local cluster.
    """
    global _connections
    with _connection_lock:
        if not _connections:
            connect_or_start(address_of(cluster), count * (cluster.cpus or 1))
        _connections += 1
    try:
        yield
    finally:
        with _connection_lock:
            _connections -= 1
            if not _connections:
                disconnect()


def connect_or_start(address: str, least: int) -> None:
    """Connects to the cluster, or starts a local one with at least `least` CPUs. Raises ConfigError if that fails."""
    if address == NEW_CLUSTER:  # a token keeps others out; `import ray` reads these variables
        variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
        os.environ.update({name: value for name, value in variables.items() if name not in os.environ})
    import ray

    logging.getLogger("ray").setLevel(logging.CRITICAL)  # the launcher itself reports lost nodes
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "namespace": "scaleflow"}
    if address == NEW_CLUSTER:
        options |= {"include_dashboard": False, "_node_ip_address": LOOPBACK}
        options |= {"num_cpus": max(least, len(os.sched_getaffinity(0))), "_temp_dir": make_cluster_folder()}
    global _head
    try:
        with preserve_signal_handlers():
            ray.init(address=address, **options)
        _head = ray.get_runtime_context().gcs_address
    except Exception as error:  # Ray raises many types
        reason = (str(error).strip().splitlines() or [""])[-1]
        if not reason or not isinstance(error, OSError | RuntimeError):
            reason = f"{type(error).__name__}: {reason}"
        raise ConfigError(
            f"cluster.address={address}: Ray cannot be reached ({reason}); check the address, and that the cluster runs"
        ) from error


def is_head_reachable() -> bool:
    """Returns whether the cluster's head answers within `HEAD_SECONDS`. After one failure the answer stays False."""
    global _head
    deadline = time.monotonic() + HEAD_SECONDS
    while _head and not is_listening(_head):
        if time.monotonic() > deadline:
            _head = ""
        time.sleep(POLL_SECONDS)
    return bool(_head)


def disconnect() -> None:
    """Disconnects, and stops a cluster started by `connect_or_start`.

    Skips Ray's shutdown, which would hang, without a head.
    """
    import ray

    if is_head_reachable():
        with preserve_signal_handlers():
            ray.shutdown()
    while _folders:
        _folders.pop().cleanup()


def make_cluster_folder() -> str:
    """Creates the temporary folder for a local cluster's logs and sockets. `disconnect` deletes it."""
    is_short = len(tempfile.gettempdir()) + len("/ray-12345678") <= MAX_FOLDER_LENGTH
    parent = None if is_short else "/tmp"
    _folders.append(tempfile.TemporaryDirectory(prefix="ray-", dir=parent, ignore_cleanup_errors=True))
    return _folders[-1].name


@contextlib.contextmanager
def preserve_signal_handlers() -> Iterator[None]:
    """Restores the handlers of SIGINT and SIGTERM: Ray replaces them by handlers that end the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def resource_bundle(cluster: RayCluster) -> dict[str, float]:
    return {"CPU": float(cluster.cpus or 1), **({"GPU": float(cluster.gpus)} if cluster.gpus else {})}


def count_slots(cluster: RayCluster) -> int:
    """Returns how many processes fit on the live nodes. Resources in use count as free."""
    import ray

    required = resource_bundle(cluster)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(int(min(resources.get(name, 0) // amount for name, amount in required.items())) for resources in nodes)


def reserve_slots(
    cluster: RayCluster, count: int, least: int, should_stop: Callable[[], bool], report: Callable[[str], None]
) -> Any:
    """Reserves a placement group with one slot per process. Returns None if it was not granted.

    While the cluster is large enough but busy, it waits without a limit. While the cluster is too small, it waits
    `cluster.start_seconds`, since an autoscaler may add nodes, or `NODE_RETURN_SECONDS` if fewer processes suffice.

    Args:
        cluster: the `cluster` options, with the resources of each process.
        least: minimum number of processes to continue the run with.
        should_stop: polled; when it returns true, the function gives up.
        report: called once with a message if the wait takes longer than `NOTICE_SECONDS`.
    """
    import ray
    from ray.util.placement_group import placement_group

    if address_of(cluster) == NEW_CLUSTER and count_slots(cluster) < count:
        return None  # a local cluster never grows
    group = placement_group([resource_bundle(cluster)] * count, strategy=cluster.placement.upper())
    patience = cluster.start_seconds if least == count else NODE_RETURN_SECONDS
    began = time.monotonic()
    deadline = began + patience
    has_reported = False
    ready = group.ready()
    while not should_stop() and time.monotonic() < deadline:
        if ray.wait([ready], timeout=POLL_SECONDS)[0]:
            return group
        if count_slots(cluster) >= count:
            deadline = time.monotonic() + patience
        if not has_reported and time.monotonic() - began > NOTICE_SECONDS:
            report(
                f"waiting for {count} process(es) with {describe_resources(cluster)} each; the cluster has room for "
                f"{count_slots(cluster)} in all"
            )
            has_reported = True
    release_slots(group)
    return None


def release_slots(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    if is_head_reachable():
        remove_placement_group(group)


def kill_actor(actor: Any) -> None:
    """Kills an actor, unless the cluster's head is gone."""
    import ray

    if is_head_reachable():
        ray.kill(actor)


def describe_resources(cluster: RayCluster) -> str:
    """Returns the resources of one process as text, such as `2 CPU and 1 GPU`."""
    return " and ".join(f"{amount:g} {name}" for name, amount in resource_bundle(cluster).items())


def explain_too_large(cluster: RayCluster, count: int) -> str:
    import ray

    resources = ray.cluster_resources()
    available = ", ".join(f"{resources.get(name, 0):g} {name}" for name in resource_bundle(cluster))
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    return (
        f"cluster=ray: {count} process(es) with {describe_resources(cluster)} each do not fit: the cluster has "
        f"{available} on {nodes} machine(s), which is room for {count_slots(cluster)}; use fewer cluster.workers, or "
        f"add machines within cluster.start_seconds={cluster.start_seconds:g}"
    )


def wait_for_slots(cluster: RayCluster, wanted: int, least: int, should_stop: Callable[[], bool]) -> int:
    """Returns how many processes, at most `wanted`, fit on the cluster after it lost a process.

    It waits `NODE_LOSS_SECONDS` for Ray to notice a lost node, `NODE_RETURN_SECONDS` while there is room for `least`
    but not for `wanted`, and `cluster.start_seconds` while there is not even room for `least`. Returns 0 if it should
    stop.
    """
    began = time.monotonic()
    while not should_stop():
        slots = min(wanted, count_slots(cluster))
        waited = time.monotonic() - began
        patience = NODE_LOSS_SECONDS if slots == wanted else NODE_RETURN_SECONDS
        if waited > (patience if slots >= least else cluster.start_seconds):
            return slots
        time.sleep(POLL_SECONDS)
    return 0


def actor_options(group: Any, place: int, cluster: RayCluster) -> dict[str, Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    required = resource_bundle(cluster)
    return {
        "num_cpus": required["CPU"],
        "num_gpus": required.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
    }


ENGINE = ClusterEngine(
    name="ray",
    section=RayCluster,
    place="a Ray cluster",
    remote_host="scaleflow.features.ray.host:RayHost",
    assigns_resources=True,
    check_reachable=check_address,
    rules=(
        Rule(
            "cluster.min_workers!=null",
            "the run would start with fewer workers than the minimum",
            "use more cluster.workers, or a smaller cluster.min_workers",
            keys=("cluster.min_workers", "cluster.workers"),
            only_if=lambda p: (ray_options(p).min_workers or 0) > (p.cluster.workers or 2),
        ),
        Rule(
            "cluster.min_workers!=null & strategy not in multi_worker|parameter_server",
            "this strategy runs in one process",
            "use strategy=multi_worker or parameter_server, or leave it null",
        ),
        Rule(
            "debug.inline & cluster=ray",
            "Ray can run the process on a machine without the debugger's terminal",
            "use cluster=local",
        ),
    ),
)
