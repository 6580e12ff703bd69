"""The rules about hardware, strategies, precision and clusters."""

from collections.abc import Sequence

from scaleflow.cluster.engines import find_engine
from scaleflow.interfaces import Partitioner, Plan, Rule


def has_invalid_indices(plan: Plan) -> bool:
    indices = plan.hardware.devices or []
    return any(index < 0 for index in indices) or len(set(indices)) < len(indices)


def is_started_elsewhere(plan: Plan) -> bool:
    return find_engine(plan.cluster).is_started_elsewhere


def runs_elsewhere(plan: Plan) -> bool:
    """Whether at least one process of the run is not started on this machine by this command."""
    return not find_engine(plan.cluster).is_local


def has_several_tasks(plan: Plan) -> bool:
    return plan.task is not None and len(plan.task.peers) > 1


DEVICE_RULES: Sequence[Rule] = (
    Rule(
        "hardware.memory_limit_mb!=null & hardware=cpu",
        "only a GPU can have a memory limit",
        "use hardware=gpu, or leave it null",
    ),
    Rule(
        "hardware.memory_growth & hardware.memory_limit_mb!=null",
        "TensorFlow supports memory growth or a memory limit, not both",
        "use only one of the two",
    ),
    Rule(
        "hardware.logical_devices>1 & hardware=gpu & hardware.memory_limit_mb=null",
        "each logical device of a GPU needs a memory limit",
        "set hardware.memory_limit_mb",
        keys=("hardware.logical_devices", "hardware"),
    ),
    Rule(
        "hardware.xla=true & hardware.deterministic",
        "XLA has no deterministic version of some gradients, such as that of max-pooling",
        "set one of the two to false",
    ),
    Rule(
        "hardware.xla=true & hardware=cpu",
        "on a CPU XLA is seldom faster where it cannot compile the whole loop (measured: 0.5 to 0.75 times; with "
        "several replicas 0.8 to 1.15)",
        "hardware.xla=auto compiles only what is faster",
        "warning",
    ),
    Rule(
        "hardware.remat=[]",
        "the list names no layers",
        "name layers, such as hardware.remat=[block*], or use true or false",
    ),
    Rule(
        "hardware.remat!=false & hardware.xla=true",
        "XLA would reuse what is to be computed again, so no memory would be saved",
        "use hardware.xla=auto, or hardware.remat=false",
    ),
    Rule(
        "hardware.remat!=false & strategy=tpu",
        "a TPU runs XLA programs, which would reuse what is to be computed again",
        "use hardware.remat=false and training.accumulate=2, or another strategy",
    ),
    Rule(
        "hardware.devices=[]",
        "the list is empty, so there is no device to compute on",
        "give at least one index, or null for all devices",
    ),
    Rule(
        "hardware.devices",
        "an index is negative or is given twice",
        "give different indices, counted from 0",
        only_if=has_invalid_indices,
    ),
    Rule(
        "cluster.workers>1 & strategy not in multi_worker|parameter_server",
        "this strategy runs in one process",
        "use strategy=multi_worker or parameter_server, or leave cluster.workers null",
    ),
    Rule(
        "cluster.servers!=null & strategy!=parameter_server",
        "this strategy has no parameter servers",
        "use strategy=parameter_server, or leave cluster.servers null",
    ),
    Rule(
        "cluster.max_restarts>0 & strategy=parameter_server",
        "a coordinator cannot restart processes on other machines",
        "let the system that started the processes restart them, with resume=FOLDER, and leave it null",
        keys=("cluster.max_restarts", "strategy", "cluster"),
        only_if=is_started_elsewhere,
    ),
    Rule(
        "cluster.max_restarts>0 & strategy!=parameter_server & checkpoint=none",
        "a restarted worker continues from the last checkpoint, and no checkpoints are saved",
        "use checkpoint=default, in a folder that all machines see, or leave it null",
        keys=("cluster.max_restarts", "cluster", "checkpoint"),
        only_if=is_started_elsewhere,
    ),
    Rule(
        "strategy=multi_worker",
        "TF_CONFIG names ps, and this strategy has no parameter servers",
        "use strategy=parameter_server",
        keys=("strategy", "cluster"),
        only_if=lambda p: p.task is not None and p.task.servers > 0,
    ),
    Rule(
        "hardware.logical_devices>1 & strategy=parameter_server",
        "each worker is one replica on one device",
        "use more cluster.workers",
    ),
    Rule(
        "strategy!=parameter_server",
        "this strategy has no parameter servers to divide variables among",
        "use strategy=parameter_server, or leave it null",
        keys=("strategy.partitioner.max_shards", "strategy"),
        only_if=lambda p: p.strategy.partitioner != Partitioner(),
    ),
    Rule(
        "strategy.communication!=auto & strategy!=multi_worker",
        "this strategy has no workers that communicate",
        "use strategy=multi_worker, or leave it auto",
    ),
    Rule(
        "strategy=tpu & hardware in cpu|gpu",
        "this strategy runs only on the cores of a TPU",
        "use hardware=tpu, or strategy=mirrored",
    ),
    Rule(
        "hardware=tpu & strategy!=tpu",
        "only strategy=tpu uses a TPU",
        "use strategy=tpu, or hardware=auto",
    ),
    Rule(
        "hardware.tpu!=null & strategy!=tpu",
        "this strategy uses no TPU",
        "use strategy=tpu hardware=tpu, or leave hardware.tpu null",
        keys=("hardware.tpu", "strategy", "hardware"),
    ),
    Rule(
        "hardware.logical_devices>1 & hardware=tpu",
        "the cores of a TPU cannot be divided",
        "leave it 1, or use hardware=cpu",
    ),
    Rule(
        "hardware.devices!=null & hardware=tpu",
        "a TPU is always used with all of its cores",
        "leave it null, or use hardware=gpu",
    ),
    Rule(
        "hardware=tpu",
        "these keys are only for GPUs",
        "leave them false and null",
        keys=("hardware.memory_growth", "hardware.memory_limit_mb", "hardware"),
        only_if=lambda p: p.hardware.memory_growth or p.hardware.memory_limit_mb is not None,
    ),
    Rule(
        "precision=mixed_float16 & hardware=tpu",
        "a TPU computes in bfloat16, not in float16",
        "use precision=mixed_bfloat16, or mixed, which selects it",
    ),
    Rule(
        "strategy=tpu",
        "this strategy runs in one process, and hardware.tpu names the TPU's hosts",
        "use cluster=local",
        keys=("cluster", "strategy"),
        only_if=runs_elsewhere,
    ),
    Rule(
        "strategy in one_device|mirrored",
        "this strategy runs on one machine",
        "use strategy=multi_worker or parameter_server, or cluster=local",
        keys=("cluster", "strategy"),
        only_if=has_several_tasks,
    ),
    Rule(
        "cluster.workers!=null & cluster.submit=null",
        "the system that starts the processes sets their number",
        "leave it null",
        keys=("cluster.workers", "cluster"),
        only_if=is_started_elsewhere,
    ),
    Rule(
        "hardware.logical_devices>1 & strategy=multi_worker & hardware=cpu",
        "on CPUs this strategy has one replica per worker, whatever the number of devices",
        "for more replicas, use for example cluster.workers=4",
        "warning",
        keys=("hardware.logical_devices", "strategy"),
    ),
    Rule(
        "optimizer._target_ & strategy=parameter_server",
        "Muon needs whole matrices, and parameter servers hold parts of matrices",
        "use optimizer=adamw, or another strategy",
        only_if=lambda p: p.optimizer.target.path.endswith(".Muon"),
    ),
)
