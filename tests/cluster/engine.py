"""A Slurm cluster of this one machine, or of several hosts, with a key, ports and folders of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from scaleflow.cluster.network import free_ports
from tests.cluster.hosts import Host

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue", "sinfo")

CONF = """\
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdTimeout={timeout}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def lacking() -> str:
    """Why there can be no cluster here; empty where there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"Slurm is not installed (slurm-wlm and munge): no {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "Slurm's daemons are started by root"


#: Seconds until a node that does not answer is taken for dead. By default Slurm waits for 300.
NODE_TIMEOUT = 10


@contextlib.contextmanager
def cluster(machines: Sequence[Host] = ()) -> Iterator[dict[str, str]]:
    """Runs it as long as the block lasts; gives what its commands need in their environment.

    Its nodes are the `machines`, of which the first is the controller's, too; without any it is this machine.
    """
    with (
        tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder,  # the path of a socket must be short
        cluster_in(Path(folder), machines) as environment,
    ):
        yield environment


@contextlib.contextmanager
def cluster_in(folder: Path, machines: Sequence[Host]) -> Iterator[dict[str, str]]:
    """The same, with its files in a folder."""
    addresses = {host.name: host.address for host in machines}
    addresses = addresses or {socket.gethostname().partition(".")[0]: "127.0.0.1"}
    for name in ("munge", "state", *(f"spool-{name}" for name in addresses)):
        (folder / name).mkdir()
    folder.chmod(0o755)
    key, conf = folder / "munge" / "key", folder / "slurm.conf"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    controller = "{}({})".format(*next(iter(addresses.items())))
    nodes = [f"NodeName={name} NodeAddr={address} CPUs=4 State=UNKNOWN" for name, address in addresses.items()]
    options = {"controller": controller, "nodes": "\n".join(nodes), "timeout": NODE_TIMEOUT if machines else 300}
    conf.write_text(CONF.format(folder=folder, ports=free_ports(2), **options))
    if machines:  # entering a host hides /sys/fs/cgroup, from which Slurm would tell the plugin; no job uses one
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    own = {name: str(folder / "munge" / name) for name in ("socket", "pid", "log", "seed")}
    munge = [f"--{name}-file={own[name]}" for name in ("pid", "log", "seed")]
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={own['socket']}", *munge]
    places = [*machines] or [None]
    with contextlib.ExitStack() as until_the_end:

        def start(daemon: Sequence[str], place: Host | None) -> None:
            until_the_end.enter_context(running(daemon, environment, folder, place))

        start(munged, None)  # its socket is a file, which all hosts see
        until(lambda: Path(own["socket"]).exists(), "munged does not listen")
        start(["slurmctld", "-D", "-f", str(conf)], places[0])
        for place in places:
            start(["slurmd", "-D", "-f", str(conf)], place)

        def has_all() -> bool:
            words = ["sinfo", "-h", "-N", "-o", "%T"]
            return said(words, environment, places[0]).split() == ["idle"] * len(places)

        until(has_all, "the nodes do not come up")
        yield {"SLURM_CONF": str(conf)}


@contextlib.contextmanager
def running(daemon: Sequence[str], environment: Mapping[str, str], folder: Path, place: Host | None) -> Iterator[None]:
    """Runs a daemon, on a host if there is one, as long as the block lasts."""
    with (folder / f"{daemon[0]}-{place.name if place else ''}.out").open("wb") as out:
        if place is None:
            process = subprocess.Popen(daemon, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        else:
            process = place.start(daemon, folder, environment, stdout=out.fileno(), stderr=out.fileno())
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def said(words: Sequence[str], environment: Mapping[str, str], place: Host | None = None) -> str:
    if place is not None:
        return place.start(words, Path.cwd(), environment).communicate(timeout=240)[0].strip()
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=120, check=False
    ).stdout.strip()


def until(condition: Callable[[], object], otherwise: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.1)
