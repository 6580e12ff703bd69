"""Counts and names the processes of a plan, assigns their roles, and writes their TF_CONFIG."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from scaleflow.cluster.network import free_ports, is_listening
from scaleflow.cluster.tf_config import TF_CONFIG
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Plan


def make_tf_config_environments(roles: Mapping[str, int]) -> list[Mapping[str, str]]:
    """Returns the environment variables of each process on this machine: TF_CONFIG if there are several processes."""
    count = sum(roles.values())
    if count == 1:
        return [{}]
    peers = [f"127.0.0.1:{port}" for port in free_ports(count)]
    return [{TF_CONFIG: text} for text in make_tf_configs(roles, peers)]


def make_tf_configs(roles: Mapping[str, int], peers: Sequence[str], first: int = 0) -> Iterator[str]:
    """Yields the TF_CONFIG of each process, starting with process number `first`.

    Each TF_CONFIG contains the addresses of all n processes, so a list of all would hold n * n addresses.

    Args:
        roles: the number of processes in each TF_CONFIG role, in the order of their numbers.
        peers: the HOST:PORT of each process.
        first: the number of the first process.
    """
    addresses = {}
    tasks = []
    begin = 0
    for role, count in roles.items():
        addresses[role] = list(peers[begin : begin + count])
        tasks += [{"type": role, "index": index} for index in range(count)]
        begin += count
    compact = (",", ":")  # Linux limits an environment variable to 128 KiB
    cluster = json.dumps(addresses, separators=compact)
    for task in tasks[first:]:
        yield f'{{"cluster":{cluster},"task":{json.dumps(task, separators=compact)}}}'


def count_servers(plan: Plan) -> int:
    """Returns the number of parameter servers; 0 for a strategy without them."""
    return (plan.cluster.servers or 1) if plan.strategy.has_coordinator else 0


def make_tf_config(task: int, peers: Sequence[str], servers: int) -> str:
    """Returns the TF_CONFIG of one task. `peers` has the HOST:PORT of each task.

    The last `servers` tasks are parameter servers, and the first task is the coordinator. With `servers=0` all tasks
    are synchronous workers.
    """
    count = len(peers)
    roles = {"chief": 1, "worker": count - servers - 1, "ps": servers} if servers else {"worker": count}
    return next(make_tf_configs(roles, peers, task))


def check_enough(variable: str, count: int, servers: int, instead: str) -> None:
    """Raises ConfigError if there are too few tasks for a coordinator, the servers and at least one worker.

    Args:
        variable: the variable with the number of tasks, for the message.
        count: the number of tasks.
        servers: the number of parameter servers. With 0 there is no coordinator, and any count is valid.
        instead: advice for the message. `{least}` stands for the smallest valid number of tasks.
    """
    least = servers + 2
    if servers and count < least:
        raise ConfigError(
            f"{variable}={count}: strategy=parameter_server with cluster.servers={servers} also needs a coordinator "
            f"and a worker; {instead.format(least=least)}"
        )


#: Environment variable with the number of copies of this command -> the program that started them.
COPIES = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec"}


def describe_copies(plan: Plan, environment: Mapping[str, str]) -> str | None:
    """Returns a note if a program such as srun started several copies of a command with a local cluster, else None.

    Raises ConfigError if the strategy uses several processes, because each copy would start all of them.
    """
    variable = find_copies(environment)
    if variable is None:
        return None
    program = COPIES[variable]
    what = f"{program} has started this command {environment[variable]} times ({variable})"
    words = "cluster=slurm" if program == "srun" else "cluster=slurm, and start it with srun"
    if plan.strategy.has_several_processes:
        raise ConfigError(f"strategy={plan.strategy.name}: {what}, and each would be a whole run; add {words}")
    return f"note: {what}, and each is a whole run; for one run add strategy=multi_worker {words}"


def find_copies(environment: Mapping[str, str]) -> str | None:
    """Returns the variable that counts several copies of this command; None without copies."""
    for variable in COPIES:
        count = environment.get(variable, "")
        if count.isdigit() and int(count) > 1:
            return variable
    return None


#: Shell test: the folder `$run` holds a run that can be resumed.
HAS_RUN = """grep -qs '"event": "ready"' "$run/events.jsonl\""""


#: Maximum number of simultaneous probes. Each probe takes a thread and a connection.
MAX_PROBES = 256


def count_processes(plan: Plan) -> Mapping[str, int]:
    """Returns the number of processes in each TF_CONFIG role, on all machines, in the order of their numbers."""
    if not plan.strategy.has_several_processes:
        return {"worker": 1}
    task = plan.task
    if plan.strategy.has_coordinator:
        if task:
            return {"chief": 1, "worker": len(task.peers) - 1 - task.servers, "ps": task.servers}
        return {"chief": 1, "worker": plan.cluster.workers or 2, "ps": count_servers(plan)}
    return {"worker": len(task.peers) if task else plan.cluster.workers or 2}


def process_names(plan: Plan) -> list[str]:
    """Returns the names of all processes for messages, in the order of their numbers."""
    names = []
    for role, count in count_processes(plan).items():
        names += [make_name(role, index) for index in range(count)]
    return names


def process_name(plan: Plan, number: int) -> str:
    """Returns the name of one process. Faster than `process_names` in large clusters."""
    for role, count in count_processes(plan).items():
        if number < count:
            return make_name(role, number)
        number -= count
    raise IndexError(f"the plan has no such process: {number} after the last")


def make_name(role: str, index: int) -> str:
    """Returns the name of a process from its TF_CONFIG role and its index within the role."""
    if role == "chief":
        return "coordinator"
    return f"{'server' if role == 'ps' else role} {index}"


def find_unreachable(plan: Plan, peers: Sequence[str]) -> str:
    """Returns the names and addresses of the processes that do not answer, as text; "" if all answer."""
    with ThreadPoolExecutor(min(len(peers), MAX_PROBES)) as threads:  # probing an unreachable machine takes seconds
        answers = list(threads.map(is_listening, peers))
    unreachable = []
    for name, peer, has_answered in zip(process_names(plan), peers, answers, strict=True):
        if not has_answered:
            unreachable.append(f"{name} ({peer})")
    return ", ".join(unreachable)


def count_workers(plan: Plan) -> int:
    """Returns the number of processes that train, on all machines."""
    return count_processes(plan)["worker"]


def count_synchronous_workers(plan: Plan) -> int:
    """Returns the number of processes that compute each step together."""
    return count_workers(plan) if plan.strategy.is_synchronous else 1
