"""A Ray cluster: how it is reached, and places on its machines. Ray itself is imported when it is needed.

https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from scaleflow.cluster.tf_config import is_address, is_listening
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Cluster

#: What Ray itself takes for its address.
VARIABLE = "RAY_ADDRESS"

#: The address of a cluster that runs on this machine already, and of one that is started for this run alone.
AUTO, OWN = "auto", "local"

LOOPBACK = "127.0.0.1"

#: Between looks whether there is room.
SECONDS_BETWEEN_LOOKS = 0.2

#: How long it is waited for places before the user is told.
SECONDS_TO_TELL = 2.0

#: How long a machine that is lost may still count as there.
SECONDS_TO_SHOW = 1.0

#: How long the machines of a lost process are waited for, before a run goes on with fewer.
SECONDS_TO_COME_BACK = 5.0

#: The path of Ray's sockets, 70 bytes below its folder, has 107 at most.
LONGEST_FOLDER = 30

#: How long the cluster's head may be away. Ray ends this process when it has been for a minute.
SECONDS_TO_RETURN = 20.0

_using = threading.RLock()
_users = 0
_head = ""
_made: list[tempfile.TemporaryDirectory[str]] = []


def check_address(cluster: Cluster) -> None:
    """Refuses a cluster that can't be reached, as far as that can be told without Ray.

    Raises:
        ConfigError: if Ray is not installed, or nothing answers at the address.
    """
    if find_spec("ray") is None:
        raise ConfigError("cluster=ray: Ray is not installed; pip install 'scaleflow[ray]'")
    address = address_of(cluster)
    if address in (AUTO, OWN):
        return
    key = "cluster.address" if cluster.address else VARIABLE
    if "://" in address or not is_address(address):
        raise ConfigError(
            f"{key}={address}: expected HOST:PORT or auto; from a machine outside of the cluster use "
            "ray job submit -- python -m scaleflow cluster=ray ..."
        )
    if not is_listening(address):
        raise ConfigError(f"{key}={address}: nothing answers there; start it with ray start --head --port=6379")


def address_of(cluster: Cluster) -> str:
    return cluster.address or os.environ.get(VARIABLE) or OWN


def loopback(cluster: Cluster) -> str | None:
    """The address of processes that only this machine has to reach; None where others have to."""
    return LOOPBACK if address_of(cluster) == OWN else None


@contextlib.contextmanager
def connect(cluster: Cluster, count: int) -> Iterator[None]:
    """This process as a driver of the cluster; the jobs of a sweep share one connection.

    Args:
        cluster: with its address.
        count: processes that a cluster of this machine alone has room for, however few cores there are.

    Raises:
        ConfigError: if there is none.
    """
    global _users
    with _using:
        if not _users:
            connect_or_start(address_of(cluster), count * (cluster.cpus or 1))
        _users += 1
    try:
        yield
    finally:
        with _using:
            _users -= 1
            if not _users:
                disconnect()


def connect_or_start(address: str, least: int) -> None:
    """Connects, or starts a cluster of this machine alone, with at least so many cores to give away.

    Raises:
        ConfigError: if that fails.
    """
    if address == OWN:
        restrict_to_loopback()
    import ray

    logging.getLogger("ray").setLevel(logging.CRITICAL)  # what comes of a loss is ours to say
    quietly: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "namespace": "scaleflow"}
    if address == OWN:
        quietly |= {"include_dashboard": False, "_node_ip_address": LOOPBACK}
        quietly |= {"num_cpus": max(least, len(os.sched_getaffinity(0))), "_temp_dir": make_cluster_folder()}
    global _head
    try:
        with preserve_signal_handlers():
            ray.init(address=address, **quietly)
        _head = ray.get_runtime_context().gcs_address
    except Exception as error:  # Ray's own of many kinds
        said = (str(error).strip().splitlines() or [""])[-1]
        if not said or not isinstance(error, OSError | RuntimeError):
            said = f"{type(error).__name__}: {said}"
        raise ConfigError(f"cluster.address={address}: Ray can't be reached: {said}") from error


def is_head_reachable() -> bool:
    """Whether the cluster's head answers, or comes back within `SECONDS_TO_RETURN`; what is gone is gone for good."""
    global _head
    deadline = time.monotonic() + SECONDS_TO_RETURN
    while _head and not is_listening(_head):
        if time.monotonic() > deadline:
            _head = ""
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return bool(_head)


def disconnect() -> None:
    """Disconnects, and ends a cluster that `connect_or_start` has started. Without its head Ray would wait for that for
    ever.
    """
    import ray

    if is_head_reachable():
        with preserve_signal_handlers():
            ray.shutdown()
    while _made:
        _made.pop().cleanup()


def make_cluster_folder() -> str:
    """Where a cluster of this machine alone keeps its logs and sockets, as long as it is there."""
    is_short = len(tempfile.gettempdir()) + len("/ray-12345678") <= LONGEST_FOLDER
    parent = None if is_short else "/tmp"
    _made.append(tempfile.TemporaryDirectory(prefix="ray-", dir=parent, ignore_cleanup_errors=True))
    return _made[-1].name


def restrict_to_loopback() -> None:
    """Has a cluster of this machine alone answer nobody else; before Ray is imported, which reads it then."""
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.update({name: value for name, value in own.items() if name not in os.environ})


@contextlib.contextmanager
def preserve_signal_handlers() -> Iterator[None]:
    """What SIGINT and SIGTERM do stays as it is: Ray would end the process with them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def resource_bundle(cluster: Cluster) -> dict[str, float]:
    """What each process takes of its machine."""
    return {"CPU": float(cluster.cpus or 1), **({"GPU": float(cluster.gpus)} if cluster.gpus else {})}


def count_slots(cluster: Cluster) -> int:
    """For how many processes the machines that are there have room, if nobody else were on them."""
    import ray

    wants = resource_bundle(cluster)
    there = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(int(min(resources.get(name, 0) // amount for name, amount in wants.items())) for resources in there)


def reserve_slots(
    cluster: Cluster, count: int, least: int, should_stop: Callable[[], bool], tell: Callable[[str], None]
) -> Any:
    """A placement group with a place to each process; None where there comes none.

    It is waited for as long as others have what it needs; for what the cluster has not got at all,
    `cluster.start_seconds`: an autoscaler may bring it. Where there is room for `least`, it is not waited for more.

    Args:
        cluster: what each process needs.
        count: of processes.
        least: of processes that would do.
        should_stop: gives up at once where it says so.
        tell: is told, once, that it is waited for.
    """
    import ray
    from ray.util.placement_group import placement_group

    if address_of(cluster) == OWN and count_slots(cluster) < count:
        return None  # nobody adds to it
    group = placement_group([resource_bundle(cluster)] * count, strategy=cluster.placement.upper())
    patience = cluster.start_seconds if least == count else SECONDS_TO_COME_BACK
    began = time.monotonic()
    deadline, is_told = began + patience, False
    waited = group.ready()
    while not should_stop() and time.monotonic() < deadline:
        if ray.wait([waited], timeout=SECONDS_BETWEEN_LOOKS)[0]:
            return group
        if count_slots(cluster) >= count:
            deadline = time.monotonic() + patience
        if not is_told and time.monotonic() - began > SECONDS_TO_TELL:
            tell(
                f"waits for {count} places with {describe_resources(cluster)} each; the cluster has "
                f"{count_slots(cluster)} in all"
            )
            is_told = True
    release_slots(group)
    return None


def release_slots(group: Any) -> None:
    """Gives the places of a group back."""
    from ray.util.placement_group import remove_placement_group

    if is_head_reachable():
        remove_placement_group(group)


def kill_actor(actor: Any) -> None:
    """Ends an actor at once."""
    import ray

    if is_head_reachable():
        ray.kill(actor)


def describe_resources(cluster: Cluster) -> str:
    """What a process takes, in words."""
    return " and ".join(f"{amount:g} {name}" for name, amount in resource_bundle(cluster).items())


def explain_too_large(cluster: Cluster, count: int) -> str:
    import ray

    there = ray.cluster_resources()
    has = ", ".join(f"{there.get(name, 0):g} {name}" for name in resource_bundle(cluster))
    return (
        f"cluster=ray: {count} process(es) with {describe_resources(cluster)} each do not fit: there are {has} "
        f"on {count_nodes()} "
        f"machine(s), and room for {count_slots(cluster)}; use fewer cluster.workers, or add machines within "
        f"cluster.start_seconds={cluster.start_seconds:g}"
    )


def count_nodes() -> int:
    """How many machines the cluster has."""
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes())


def wait_for_slots(cluster: Cluster, wanted: int, least: int, should_stop: Callable[[], bool]) -> int:
    """For how many processes there is room once a loss has shown, at most `list_needed_splits`.

    Machines that come back within `SECONDS_TO_COME_BACK` count; for `least`, `cluster.start_seconds` are waited.
    """
    began = time.monotonic()
    while not should_stop():
        found, waited = min(wanted, count_slots(cluster)), time.monotonic() - began
        enough = SECONDS_TO_SHOW if found == wanted else SECONDS_TO_COME_BACK
        if waited > (enough if found >= least else cluster.start_seconds):
            return found
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return 0


def actor_options(group: Any, place: int, cluster: Cluster) -> dict[str, Any]:
    """The options of an actor at a place of a group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    wants = resource_bundle(cluster)
    return {
        "num_cpus": wants["CPU"],
        "num_gpus": wants.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place),
    }
