"""Runs one launcher per task of a Slurm step, as `srun -N4 scaleflow cluster=slurm` starts them.

TF_CONFIG is derived from the variables that srun sets (OUTPUT ENVIRONMENT VARIABLES in
https://slurm.schedmd.com/srun.html). TensorFlow's SlurmClusterResolver is not used: all jobs on a machine would get the
same port, and it does not support parameter servers.
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from scaleflow.cluster.engines import ClusterEngine
from scaleflow.cluster.tasks import HAS_RUN, check_enough, count_servers, make_tf_config
from scaleflow.errors import ConfigError

#: Variables of this task and its node, and of the step's tasks and nodes. A batch script without srun has no
#: SLURM_STEP_* variables.
TASK = "SLURM_PROCID"
NODE = "SLURM_NODEID"
COUNT = "SLURM_STEP_NUM_TASKS"
NODES = "SLURM_STEP_NODELIST"
TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"

#: Ports that `srun --resv-ports` reserved for the step, such as `12000-12001`.
RESERVED_PORTS = "SLURM_STEP_RESV_PORTS"
DISTRIBUTION = "SLURM_DISTRIBUTION"

#: Range of ports if none are reserved. It is below the ephemeral ports of common systems.
FIRST_PORT = 10000
PORT_COUNT = 20000

SRUN_HINT = (
    "start the command once for each task with srun (srun -N4 scaleflow cluster=slurm ...), or use "
    "cluster.submit=print to write a batch script that does"
)


def make_task_config(environment: Mapping[str, str], servers: int) -> str:
    """Returns the TF_CONFIG of this task, with the variables of its `environment`.

    `servers` is the number of parameter servers, or 0. Raises ConfigError if this process is not a task of a step, the
    step's tasks are not distributed in blocks, or there are too few of them.
    """
    missing = [name for name in (TASK, COUNT, NODES, TASKS_PER_NODE) if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"cluster=slurm: {', '.join(missing)} is not set, so this process is not a task of a Slurm step; "
            f"{SRUN_HINT}"
        )
    task = int(environment[TASK])
    count = int(environment[COUNT])
    per_node = parse_tasks_per_node(environment[TASKS_PER_NODE])
    places = [(node, place) for node, tasks in enumerate(per_node) for place in range(tasks)]
    node = environment.get(NODE)
    is_in_blocks = len(places) == count and node in (None, str(places[task][0]))
    if not is_in_blocks:
        order = environment.get(DISTRIBUTION, "")
        raise ConfigError(
            f"cluster=slurm: the {count} tasks are not distributed over the machines in blocks "
            f"({DISTRIBUTION}={order}, {TASKS_PER_NODE}={environment[TASKS_PER_NODE]}, task {task} on machine {node}); "
            "use srun --distribution=block"
        )
    check_enough(COUNT, count, servers, instead="use srun --ntasks={least} or more")
    hosts = expand_node_list(environment[NODES])
    ports = choose_ports(environment, max(per_node))
    peers = [f"{hosts[node]}:{ports[place]}" for node, place in places]
    return make_tf_config(task, peers, servers)


def parse_tasks_per_node(text: str) -> list[int]:
    """Returns the number of tasks on each node: `2(x3),1` becomes [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"{TASKS_PER_NODE}={text}: expected something like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_node_list(text: str) -> list[str]:
    """Returns the host names in a Slurm node list such as `gpu[01-03,7],login`."""
    return [name for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) for name in expand_range(part)]


def expand_range(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]+)\](.*)", part)
    if match is None:
        return [part]
    prefix, ranges, rest = match.groups()
    numbers: list[str] = []
    for number_range in ranges.split(","):
        first, _, last = number_range.partition("-")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return [f"{prefix}{number}{suffix}" for number in numbers for suffix in expand_range(rest)]


def choose_ports(environment: Mapping[str, str], count: int) -> Sequence[int]:
    """Returns the ports of `count` tasks on one node: the step's reserved ports, or ports derived from the job's
    number.
    """
    reserved = environment.get(RESERVED_PORTS)
    if reserved:
        first, _, last = reserved.partition("-")
        ports = range(int(first), int(last or first) + 1)
        if len(ports) >= count:
            return ports
    job, step = (int(environment.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    first_port = FIRST_PORT + (job * 101 + step * 11) % PORT_COUNT
    return range(first_port, first_port + count)


def render_batch_script(name: str, tasks: int, words: Sequence[str], folder: str | None = None) -> str:
    """Returns a batch script that runs a command as one run, and resumes the run when Slurm requeues the job.

    The `words` of the command must be quoted for a shell. Without a `folder`, the run's folder has the job's number.
    """
    path = "outputs/slurm-$SLURM_JOB_ID" if folder is None else shlex.quote(folder)
    return SCRIPT.format(name=shlex.quote(name), tasks=tasks, words=" ".join(words), folder=path, ready=HAS_RUN)


SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={tasks}
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120
# Options of your site; remove one # from those that you need:
##SBATCH --partition=...
##SBATCH --time=24:00:00
##SBATCH --cpus-per-task=8
##SBATCH --gpus-per-node=1

# The run's folder, which all machines must see. The run saves and stops two minutes before the time limit (--signal),
# or when Slurm preempts the job. When the job starts again, it resumes the run.
run={folder}
if {ready}; then
    words=("resume='$run'")
else
    words=("hydra.run.dir='$run'")
fi

srun {words} \\
    "${{words[@]}}"
code=$?

if [ $code -eq 143 ]; then  # stopped by SIGTERM, with a checkpoint
    scontrol requeue "$SLURM_JOB_ID" || true
fi
exit $code
"""


ENGINE = ClusterEngine(
    name="slurm",
    variables=(
        *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", TASK),
        *("SLURM_LOCALID", NODE, "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_MEM_PER_NODE"),
    ),
    read_tf_config=lambda plan, environment: make_task_config(environment, count_servers(plan)),
    render_job=lambda plan, tasks, words, folder, _: render_batch_script(
        " ".join(filter(None, ("scaleflow", plan.tracking.run_name))),
        tasks,
        [shlex.quote(word) for word in (sys.executable, "-m", "scaleflow", *words)],
        folder=folder,
    ),
)
