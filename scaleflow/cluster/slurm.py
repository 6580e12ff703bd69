"""A launcher to each task of a Slurm step, as `srun -N4 python -m scaleflow cluster=slurm` starts them.

What tells them of each other follows from the variables that srun sets for a task (OUTPUT ENVIRONMENT VARIABLES in
https://slurm.schedmd.com/srun.html); they are read here, and not by TensorFlow's SlurmClusterResolver, which takes one
port for all jobs of a machine and knows of no servers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from scaleflow.cluster.tasks import HAS_RUN, check_enough, make_tf_config
from scaleflow.errors import ConfigError

#: Which task this is, and what the step consists of. In a batch script without srun the last three are missing.
TASK, NODE = "SLURM_PROCID", "SLURM_NODEID"
COUNT, NODES, SPREAD = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"

#: What `srun --resv-ports` has set aside for the step: `12000-12001`.
RESERVED = "SLURM_STEP_RESV_PORTS"
DISTRIBUTION = "SLURM_DISTRIBUTION"

#: Ports of a step for which none are reserved: below those that systems give to clients by themselves.
FIRST_PORT, PORTS = 10000, 20000

INSTEAD = (
    "start one to each task with srun (srun -N4 python -m scaleflow cluster=slurm ...); "
    "cluster.submit=print writes a batch script that does"
)


def tf_config(environment: Mapping[str, str], servers: int) -> str:
    """The TF_CONFIG of this task.

    Args:
        environment: of the task.
        servers: the last tasks of the step are so many parameter servers, and the first is the coordinator; with 0 all
            tasks are workers that go in step.

    Raises:
        ConfigError: if this is no task of a step, or the step does not suit.
    """
    missing = [name for name in (TASK, COUNT, NODES, SPREAD) if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"cluster=slurm: {', '.join(missing)} is not set, so this is no task of a Slurm step; {INSTEAD}"
        )
    task, count = int(environment[TASK]), int(environment[COUNT])
    places = assign_nodes(environment)
    if len(places) != count or (node := environment.get(NODE)) not in (None, str(places[task][0])):
        order = environment.get(DISTRIBUTION, "")
        raise ConfigError(
            f"cluster=slurm: its {count} tasks are not on the machines in turn ({DISTRIBUTION}={order}, "
            f"{SPREAD}={environment[SPREAD]}, task {task} on machine {node}); use srun --distribution=block"
        )
    check_enough(COUNT, count, servers, "use srun --ntasks={least} or more")
    hosts, ports = expand_node_list(environment[NODES]), choose_ports(environment)
    peers = [f"{hosts[node]}:{ports[place]}" for node, place in places]
    return make_tf_config(task, peers, servers)


def assign_nodes(environment: Mapping[str, str]) -> list[tuple[int, int]]:
    """To each task its machine's number, and its own among that machine's."""
    return [
        (node, place) for node, count in enumerate(parse_tasks_per_node(environment[SPREAD])) for place in range(count)
    ]


def parse_tasks_per_node(text: str) -> list[int]:
    """Tasks on each machine, from `2(x3),1`."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"{SPREAD}={text}: expected something like 2(x3),1")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def expand_node_list(text: str) -> list[str]:
    """The names in a list of machines, `gpu[01-03,7],login`."""
    return [name for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) for name in expand_range(part)]


def expand_range(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]+)\](.*)", part)
    if match is None:
        return [part]
    begin, ranges, rest = match.groups()
    numbers: list[str] = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return [f"{begin}{number}{end}" for number in numbers for end in expand_range(rest)]


def choose_ports(environment: Mapping[str, str]) -> Sequence[int]:
    """Ports for the tasks of one machine: those reserved for the step, else some that follow from its number."""
    most = max(parse_tasks_per_node(environment[SPREAD]))
    if reserved := environment.get(RESERVED):
        first, _, last = reserved.partition("-")
        found = range(int(first), int(last or first) + 1)
        if len(found) >= most:
            return found
    job, step = (int(environment.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    first_port = FIRST_PORT + (job * 101 + step * 11) % PORTS
    return range(first_port, first_port + most)


def render_batch_script(name: str, tasks: int, words: Sequence[str], folder: str | None = None) -> str:
    """A batch script that runs a command as one run, and goes on with it when Slurm starts it again.

    Args:
        name: the job's.
        tasks: how many launchers.
        words: the command, quoted for a shell.
        folder: the run's; null for one that has the job's number.
    """
    where = "outputs/slurm-$SLURM_JOB_ID" if folder is None else shlex.quote(folder)
    return SCRIPT.format(name=shlex.quote(name), tasks=tasks, words=" ".join(words), folder=where, ready=HAS_RUN)


SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={tasks}
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120
# For the site to say, and to uncomment:
##SBATCH --partition=...
##SBATCH --time=24:00:00
##SBATCH --cpus-per-task=8
##SBATCH --gpus-per-node=1

# A folder that all machines see. Two minutes before its time is up (--signal), or when something more urgent takes its
# place, the run saves and stops; when the job starts again, it goes on from there.
run={folder}
if {ready}; then
    where=(resume="$run")
else
    where=(hydra.run.dir="$run")
fi

srun {words} \\
    "${{where[@]}}"
code=$?

if [ $code -eq 143 ]; then  # stopped by SIGTERM, with a checkpoint
    scontrol requeue "$SLURM_JOB_ID" || true
fi
exit $code
"""
