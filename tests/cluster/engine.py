"""A Slurm cluster of this one machine, with a key, ports and folders of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from scaleflow.cluster.network import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue", "sinfo")

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
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
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def lacking() -> str:
    """Why there can be no cluster here; empty where there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"Slurm is not installed (slurm-wlm and munge): no {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "Slurm's daemons are started by root"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Runs it as long as the block lasts; gives what its commands need in their environment."""
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    key, conf = folder / "munge" / "key", folder / "slurm.conf"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    conf.write_text(CONF.format(folder=folder, host=host, ports=free_ports(2)))
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    own = {name: str(folder / "munge" / name) for name in ("socket", "pid", "log", "seed")}
    munge = [f"--{name}-file={own[name]}" for name in ("pid", "log", "seed")]
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={own['socket']}", *munge],
        ["slurmctld", "-D", "-f", str(conf)],
        ["slurmd", "-D", "-f", str(conf)],
    ]
    with contextlib.ExitStack() as until_the_end:
        for daemon in daemons:
            until_the_end.enter_context(running(daemon, environment, folder))
            if daemon[0] == "munged":
                until(lambda: Path(own["socket"]).exists(), "munged does not listen")
        until(lambda: said(["sinfo", "-h", "-o", "%T"], environment) == "idle", "the node does not come up")
        yield {"SLURM_CONF": str(conf)}


@contextlib.contextmanager
def running(daemon: Sequence[str], environment: dict[str, str], folder: Path) -> Iterator[None]:
    with (folder / f"{daemon[0]}.out").open("wb") as out:
        process = subprocess.Popen(daemon, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def said(words: Sequence[str], environment: dict[str, str]) -> str:
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=20, check=False
    ).stdout.strip()


def until(condition: Callable[[], object], otherwise: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.1)
