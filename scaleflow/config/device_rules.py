"""The rules about hardware, strategies, precision and clusters."""

from collections.abc import Sequence

from scaleflow.cluster.engines import find_engine
from scaleflow.interfaces import Partitioner, Plan, Rule


def has_invalid_indices(plan: Plan) -> bool:
    indices = plan.hardware.devices or []
    return any(index < 0 for index in indices) or len(set(indices)) < len(indices)


def is_started_elsewhere(plan: Plan) -> bool:
    return find_engine(plan.cluster).is_started_elsewhere


DEVICE_RULES: Sequence[Rule] = (
    Rule(
        ("hardware.memory_limit_mb", "hardware"),
        lambda p: p.hardware.memory_limit_mb is not None and p.hardware.name == "cpu",
        "only a GPU can have a memory limit",
        instead="use hardware=gpu, or leave it null",
    ),
    Rule(
        ("hardware.memory_growth", "hardware.memory_limit_mb"),
        lambda p: p.hardware.memory_growth and p.hardware.memory_limit_mb is not None,
        "TensorFlow supports memory growth or a memory limit, not both",
        instead="use only one of the two",
    ),
    Rule(
        ("hardware.logical_devices", "hardware"),
        lambda p: p.hardware.name == "gpu" and p.hardware.logical_devices > 1 and p.hardware.memory_limit_mb is None,
        "each logical device of a GPU needs a memory limit",
        instead="set hardware.memory_limit_mb",
    ),
    Rule(
        ("hardware.xla", "hardware.deterministic"),
        lambda p: p.hardware.xla is True and p.hardware.deterministic,
        "XLA has no deterministic version of some gradients, such as that of max-pooling",
        instead="set one of the two to false",
    ),
    Rule(
        ("hardware.xla", "hardware"),
        lambda p: p.hardware.xla is True and p.hardware.name == "cpu",
        "on a CPU XLA is seldom faster where it cannot compile the whole loop (measured: 0.5 to 0.75 times; with "
        "several replicas 0.8 to 1.15)",
        instead="hardware.xla=auto compiles only what is faster",
        verdict="warning",
    ),
    Rule(
        ("hardware.remat",),
        lambda p: isinstance(p.hardware.remat, list) and not p.hardware.remat,
        "the list names no layers",
        instead="name layers, such as hardware.remat=[block*], or use true or false",
    ),
    Rule(
        ("hardware.remat", "hardware.xla"),
        lambda p: p.hardware.remat is not False and p.hardware.xla is True,
        "XLA would reuse what is to be computed again, so no memory would be saved",
        instead="use hardware.xla=auto, or hardware.remat=false",
    ),
    Rule(
        ("hardware.remat", "strategy"),
        lambda p: p.hardware.remat is not False and p.strategy.name == "tpu",
        "a TPU runs XLA programs, which would reuse what is to be computed again",
        instead="use hardware.remat=false and training.accumulate=2, or another strategy",
    ),
    Rule(
        ("hardware.devices",),
        lambda p: p.hardware.devices is not None and not p.hardware.devices,
        "the list is empty, so there is no device to compute on",
        instead="give at least one index, or null for all devices",
    ),
    Rule(
        ("hardware.devices",),
        has_invalid_indices,
        "an index is negative or is given twice",
        instead="give different indices, counted from 0",
    ),
    Rule(
        ("cluster.workers", "strategy"),
        lambda p: p.cluster.workers not in (None, 1) and not p.strategy.has_several_processes,
        "this strategy runs in one process",
        instead="use strategy=multi_worker or parameter_server, or leave cluster.workers null",
    ),
    Rule(
        ("cluster.servers", "strategy"),
        lambda p: p.cluster.servers is not None and p.strategy.name != "parameter_server",
        "this strategy has no parameter servers",
        instead="use strategy=parameter_server, or leave cluster.servers null",
    ),
    Rule(
        ("cluster.max_restarts", "strategy", "cluster"),
        lambda p: bool(p.cluster.max_restarts) and is_started_elsewhere(p) and p.strategy.name == "parameter_server",
        "a coordinator cannot restart processes on other machines",
        instead="let the system that started the processes restart them, with resume=FOLDER, and leave it null",
    ),
    Rule(
        ("cluster.max_restarts", "cluster", "checkpoint"),
        lambda p: (
            bool(p.cluster.max_restarts)
            and is_started_elsewhere(p)
            and p.strategy.name != "parameter_server"
            and p.checkpoint.name == "none"
        ),
        "a restarted worker continues from the last checkpoint, and no checkpoints are saved",
        instead="use checkpoint=default, in a folder that all machines see, or leave it null",
    ),
    Rule(
        ("strategy", "cluster"),
        lambda p: p.strategy.name == "multi_worker" and p.task is not None and p.task.servers > 0,
        "TF_CONFIG names ps, and this strategy has no parameter servers",
        instead="use strategy=parameter_server",
    ),
    Rule(
        ("hardware.logical_devices", "strategy"),
        lambda p: p.hardware.logical_devices > 1 and p.strategy.name == "parameter_server",
        "each worker is one replica on one device",
        instead="use more cluster.workers",
    ),
    Rule(
        ("strategy.partitioner.max_shards", "strategy"),
        lambda p: p.strategy.partitioner != Partitioner() and p.strategy.name != "parameter_server",
        "this strategy has no parameter servers to divide variables among",
        instead="use strategy=parameter_server, or leave it null",
    ),
    Rule(
        ("strategy.communication", "strategy"),
        lambda p: p.strategy.communication != "auto" and p.strategy.name != "multi_worker",
        "this strategy has no workers that communicate",
        instead="use strategy=multi_worker, or leave it auto",
    ),
    Rule(
        ("strategy", "hardware"),
        lambda p: p.strategy.name == "tpu" and p.hardware.name in ("cpu", "gpu"),
        "this strategy runs only on the cores of a TPU",
        instead="use hardware=tpu, or strategy=mirrored",
    ),
    Rule(
        ("hardware", "strategy"),
        lambda p: p.hardware.name == "tpu" and p.strategy.name != "tpu",
        "only strategy=tpu uses a TPU",
        instead="use strategy=tpu, or hardware=auto",
    ),
    Rule(
        ("hardware.tpu", "strategy", "hardware"),
        lambda p: p.hardware.tpu is not None and p.strategy.name != "tpu",
        "this strategy uses no TPU",
        instead="use strategy=tpu hardware=tpu, or leave hardware.tpu null",
    ),
    Rule(
        ("hardware.logical_devices", "hardware"),
        lambda p: p.hardware.name == "tpu" and p.hardware.logical_devices > 1,
        "the cores of a TPU cannot be divided",
        instead="leave it 1, or use hardware=cpu",
    ),
    Rule(
        ("hardware.devices", "hardware"),
        lambda p: p.hardware.name == "tpu" and p.hardware.devices is not None,
        "a TPU is always used with all of its cores",
        instead="leave it null, or use hardware=gpu",
    ),
    Rule(
        ("hardware.memory_growth", "hardware.memory_limit_mb", "hardware"),
        lambda p: p.hardware.name == "tpu" and (p.hardware.memory_growth or p.hardware.memory_limit_mb is not None),
        "these keys are only for GPUs",
        instead="leave them false and null",
    ),
    Rule(
        ("precision", "hardware"),
        lambda p: p.hardware.name == "tpu" and p.precision.name == "mixed_float16",
        "a TPU computes in bfloat16, not in float16",
        instead="use precision=mixed_bfloat16, or mixed, which selects it",
    ),
    Rule(
        ("cluster", "strategy"),
        lambda p: not find_engine(p.cluster).is_local and p.strategy.name == "tpu",
        "this strategy runs in one process, and hardware.tpu names the TPU's hosts",
        instead="use cluster=local",
    ),
    Rule(
        ("cluster", "strategy"),
        lambda p: p.strategy.name in ("one_device", "mirrored") and p.task is not None and len(p.task.peers) > 1,
        "this strategy runs on one machine",
        instead="use strategy=multi_worker or parameter_server, or cluster=local",
    ),
    Rule(
        ("cluster.workers", "cluster"),
        lambda p: is_started_elsewhere(p) and p.cluster.workers is not None and p.cluster.submit is None,
        "the system that starts the processes sets their number",
        instead="leave it null",
    ),
    Rule(
        ("hardware.logical_devices", "strategy"),
        lambda p: p.hardware.logical_devices > 1 and p.strategy.name == "multi_worker" and p.hardware.name == "cpu",
        "on CPUs this strategy has one replica per worker, whatever the number of devices",
        instead="for more replicas, use for example cluster.workers=4",
        verdict="warning",
    ),
    Rule(
        ("optimizer._target_", "strategy"),
        lambda p: p.optimizer.target.path.endswith(".Muon") and p.strategy.has_coordinator,
        "it needs whole matrices, and parameter servers hold parts of them",
        instead="use optimizer=adamw, or another strategy",
    ),
)
