"""Defines which options work together, as data.

Each combination that cannot work is one `Rule` in `RULES`. `scaleflow.table` renders the docs page from the rules and
from `AXES`, which take the names of options from the Literals in `interfaces/config.py`.

The launcher checks the rules with the config, in which `auto` means not known yet. The worker checks them again with
the actual devices, strategy and precision, before `ready`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args, get_type_hints

from scaleflow.cluster import EXAMPLE, EXAMPLE_WITH_SERVERS, STARTED_HERE, TF_CONFIG, process_names
from scaleflow.config.parse import format_value
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Cluster, Hardware, Partitioner, Plan, Precision, Strategy, Training


@dataclass(frozen=True)
class Rule:
    """A combination of options that does not work, or that a user should know about.

    Attributes:
        name: a short name, for the tests.
        keys: the keys that the message shows, the one that is best changed first. A group stands for its option.
        applies: whether a plan has the combination. The name `auto` means: not known yet.
        reason: why it does not work.
        instead: what would work.
        verdict: `refused`, or `warning`: the run starts and shows it as a note.
    """

    name: str
    keys: tuple[str, ...]
    applies: Callable[[Plan], bool]
    reason: str
    instead: str
    verdict: Literal["refused", "warning"] = "refused"

    def message(self, plan: Plan) -> str:
        """Returns the text for the user: keys, values, reason, and what would work."""
        settings = " with ".join(f"{key}={format_value(value_of(plan, key))}" for key in self.keys)
        return f"{settings}: {self.reason}; {self.instead}"


def value_of(plan: Plan, key: str) -> object:
    """Returns the value of a dotted key in a plan. The value of a config group is its option."""
    value: object = plan
    for part in key.split("."):
        name = part
        if part == "_target_":  # of a section that names a class, or of the target itself
            value, name = getattr(value, "target", value), "path"
        value = getattr(value, name)
    return getattr(value, "name", value)


def resolve_choices(plan: Plan, strategy: str, hardware: str, precision: str) -> Plan:
    """Returns a plan with the strategy, hardware and precision that `auto` and `mixed` have become."""
    return replace(
        plan,
        strategy=replace(plan.strategy, name=cast(Any, strategy)),
        hardware=replace(plan.hardware, name=cast(Any, hardware)),
        precision=replace(plan.precision, name=cast(Any, precision)),
    )


def find_applicable(plan: Plan) -> Iterator[Rule]:
    """Yields the rules that apply to a plan, in the order of `RULES`."""
    return (rule for rule in RULES if rule.applies(plan))


def check_rules(plan: Plan) -> list[str]:
    """Checks a plan against all rules.

    Returns:
        The messages of the warnings that apply.

    Raises:
        ConfigError: with the message of the first rule that refuses the plan.
    """
    rules = list(find_applicable(plan))
    for rule in rules:
        if rule.verdict == "refused":
            raise ConfigError(rule.message(plan))
    return [rule.message(plan) for rule in rules]


# ---------------------------------------------------------------------------------------------
# Conditions
# ---------------------------------------------------------------------------------------------


def has_indices_that_are_none(plan: Plan) -> bool:
    indices = plan.hardware.devices or []
    return any(index < 0 for index in indices) or len(set(indices)) < len(indices)


def has_no_fraction_to_validate(plan: Plan) -> bool:
    validation = plan.dataset.validation
    return isinstance(validation, float) and not 0 <= validation < 1


def has_monitor_without_validation(plan: Plan) -> bool:
    stopping = plan.training.early_stopping
    return stopping is not None and stopping.monitor.startswith("val/") and not plan.dataset.validation


def is_started_elsewhere(plan: Plan) -> bool:
    """Whether something else starts the processes: TF_CONFIG's environment, Slurm or Kubernetes."""
    return plan.cluster.name not in STARTED_HERE


def is_over_machines(plan: Plan) -> bool:
    """Whether the run has several processes, each with its own launcher."""
    return plan.task is not None and len(plan.task.peers) > 1


def count_named_servers(plan: Plan) -> int:
    """Counts the parameter servers that TF_CONFIG names."""
    return plan.task.servers if plan.task else 0


def is_fit_mirrored(plan: Plan) -> bool:
    return plan.training.engine == "fit" and plan.strategy.name == "mirrored"


def is_staged(strategy: Strategy) -> bool:
    return differs_from_default(strategy, Strategy(), "stages", "micro_batches", "cuts")


def differs_from_default(section: object, nothing_said: object, *names: str) -> bool:
    """Whether one of the named fields of a section differs from the section with defaults."""
    return any(getattr(section, name) != getattr(nothing_said, name) for name in names)


def has_windows_after_the_end(plan: Plan) -> bool:
    longest = plan.training.max_steps
    return longest is not None and any(last > longest for _, last in plan.profiler.windows)


def has_windows_that_overlap(plan: Plan) -> bool:
    windows = plan.profiler.windows
    return any(following <= last for (_, last), (following, _) in itertools.pairwise(windows))


def is_submitted_to_pods(plan: Plan) -> bool:
    return plan.cluster.submit is not None and plan.cluster.name == "kubernetes"


def has_store_in_pod(plan: Plan) -> bool:
    """Whether pods would record the run in the default store, a file, since no server is named."""
    tracking = plan.tracking
    return is_submitted_to_pods(plan) and tracking.name != "none" and not (tracking.uri or plan.cluster.env_from)


SEVERAL_PROCESSES = ("multi_worker", "parameter_server")

#: Options of `cluster` that `cluster.submit` supports.
SUBMITTED_TO = ("slurm", "kubernetes")

#: Keys of `cluster` that only one option has.
FOR_RAY = ("address", "min_workers", "placement")
FOR_PODS = ("image", "job", "namespace", "memory", "env_from", "volume", "path", "port", "retries")

RULES: Sequence[Rule] = (
    Rule(
        "memory limit on a CPU",
        ("hardware.memory_limit_mb", "hardware"),
        lambda p: p.hardware.memory_limit_mb is not None and p.hardware.name == "cpu",
        "only a GPU takes a memory limit",
        "use hardware=gpu, or leave it null",
    ),
    Rule(
        "memory growth and limit",
        ("hardware.memory_growth", "hardware.memory_limit_mb"),
        lambda p: p.hardware.memory_growth and p.hardware.memory_limit_mb is not None,
        "a limited device can't grow",
        "leave one of the two",
    ),
    Rule(
        "divided GPU without a limit",
        ("hardware.logical_devices", "hardware"),
        lambda p: p.hardware.name == "gpu" and p.hardware.logical_devices > 1 and p.hardware.memory_limit_mb is None,
        "dividing a GPU takes a limit to the memory of each logical device",
        "give hardware.memory_limit_mb",
    ),
    Rule(
        "XLA and determinism",
        ("hardware.xla", "hardware.deterministic"),
        lambda p: p.hardware.xla and p.hardware.deterministic,
        "XLA has no deterministic form of some gradients, max-pooling's for one",
        "leave one of the two false",
    ),
    Rule(
        "XLA on a CPU",
        ("hardware.xla", "hardware"),
        lambda p: p.hardware.xla and p.hardware.name == "cpu",
        "right, but on a CPU slower than without it (measured: half to three quarters of the examples a second)",
        "hardware.xla=false is faster there",
        "warning",
    ),
    Rule(
        "no device",
        ("hardware.devices",),
        lambda p: p.hardware.devices is not None and not p.hardware.devices,
        "there is no device to compute on",
        "expected at least one index, or null for every device",
    ),
    Rule(
        "indices of devices",
        ("hardware.devices",),
        has_indices_that_are_none,
        "these are no indices of devices",
        "expected different indices from 0",
    ),
    Rule(
        "several processes of a strategy with one",
        ("cluster.workers", "strategy"),
        lambda p: p.cluster.workers not in (None, 1) and p.strategy.name not in SEVERAL_PROCESSES,
        "this strategy has one process",
        "use strategy=multi_worker or parameter_server, or leave cluster.workers null",
    ),
    Rule(
        "servers of a strategy without them",
        ("cluster.servers", "strategy"),
        lambda p: p.cluster.servers is not None and p.strategy.name != "parameter_server",
        "this strategy has no parameter servers",
        "use strategy=parameter_server, or leave cluster.servers null",
    ),
    Rule(
        "restarts of servers elsewhere",
        ("cluster.max_restarts", "strategy", "cluster"),
        lambda p: bool(p.cluster.max_restarts) and is_started_elsewhere(p) and p.strategy.name == "parameter_server",
        "a coordinator can't start again what runs on other machines",
        "have whatever started the processes start them again, with resume=FOLDER, and leave it null",
    ),
    Rule(
        "restarts on several machines",
        ("cluster.max_restarts", "cluster", "checkpoint"),
        lambda p: (
            bool(p.cluster.max_restarts)
            and is_started_elsewhere(p)
            and p.strategy.name != "parameter_server"
            and p.checkpoint.name == "none"
        ),
        "every machine's worker goes on from the last checkpoint, and none is kept",
        "use checkpoint=default, on a path that all of them see, or leave it null",
    ),
    Rule(
        "keys of Ray",
        ("cluster.min_workers", "cluster.address", "cluster.placement", "cluster"),
        lambda p: p.cluster.name != "ray" and differs_from_default(p.cluster, Cluster(), *FOR_RAY),
        "these are for the machines of a Ray cluster",
        "use cluster=ray, or leave them out",
    ),
    Rule(
        "cores and GPUs of processes",
        ("cluster.cpus", "cluster.gpus", "cluster"),
        lambda p: (
            p.cluster.name not in ("ray", "kubernetes") and differs_from_default(p.cluster, Cluster(), "cpus", "gpus")
        ),
        "its processes take what their machine has",
        "use hardware.devices and hardware.intra_op_threads, or cluster=ray or kubernetes",
    ),
    Rule(
        "fewer workers than the least",
        ("cluster.min_workers", "cluster.workers"),
        lambda p: p.cluster.min_workers is not None and p.cluster.min_workers > (p.cluster.workers or 2),
        "the run would begin with fewer than it may go on with",
        "use more cluster.workers, or a smaller cluster.min_workers",
    ),
    Rule(
        "the least workers of a strategy with one",
        ("cluster.min_workers", "strategy"),
        lambda p: p.cluster.min_workers is not None and p.strategy.name not in SEVERAL_PROCESSES,
        "this strategy has one process",
        "use strategy=multi_worker or parameter_server, or leave it null",
    ),
    Rule(
        "inline on other machines",
        ("debug.inline", "cluster"),
        lambda p: p.debug.inline and p.cluster.name == "ray",
        "its process is on another machine than the debugger's terminal",
        "use cluster=local",
    ),
    Rule(
        "nothing to submit to",
        ("cluster.submit", "cluster"),
        lambda p: p.cluster.submit is not None and p.cluster.name not in SUBMITTED_TO,
        "these processes are started by nothing that takes a script",
        "use cluster=slurm or kubernetes, or leave it null",
    ),
    Rule(
        "what pods have elsewhere",
        ("cluster",),
        lambda p: p.cluster.name != "kubernetes" and differs_from_default(p.cluster, Cluster(), *FOR_PODS),
        "its processes are in no pods, which have an image, a job, a volume and so on",
        "use cluster=kubernetes, or leave out such keys",
    ),
    Rule(
        "a time limit of pods",
        ("checkpoint.max_seconds", "cluster"),
        lambda p: p.cluster.name == "kubernetes" and p.checkpoint.max_seconds is not None,
        "its end looks like a pod that was preempted, which is started again at once",
        "put activeDeadlineSeconds into the Job, and leave it null",
    ),
    Rule(
        "pods without an image",
        ("cluster.image", "cluster"),
        lambda p: is_submitted_to_pods(p) and p.cluster.image is None,
        "a pod is started from an image that has Python, scaleflow and your code in it",
        "name it: cluster.image=REGISTRY/IMAGE",
    ),
    Rule(
        "checkpoints in pods",
        ("cluster.volume", "checkpoint"),
        lambda p: is_submitted_to_pods(p) and p.cluster.volume is None and p.checkpoint.name != "none",
        "what a pod has for itself goes with it, and the run's folder is there",
        "name a PersistentVolumeClaim that all pods may write to by cluster.volume, or use checkpoint=none",
    ),
    Rule(
        "servers in pods",
        ("cluster.volume", "strategy"),
        lambda p: is_submitted_to_pods(p) and p.cluster.volume is None and p.strategy.name == "parameter_server",
        "pods of servers learn from the run's folder whether the coordinator that is gone was through",
        "name a PersistentVolumeClaim that all pods may write to by cluster.volume",
    ),
    Rule(
        "a store in a pod",
        ("tracking.uri", "cluster.env_from", "cluster"),
        has_store_in_pod,
        "the store would be a file in the first pod, and go with it",
        "name a server by tracking.uri, or a Secret with MLFLOW_TRACKING_URI in cluster.env_from, or use tracking=none",
    ),
    Rule(
        "TF_CONFIG with servers",
        ("strategy", "cluster"),
        lambda p: is_started_elsewhere(p) and p.strategy.name == "multi_worker" and count_named_servers(p) > 0,
        "TF_CONFIG names ps, and this strategy has no parameter servers",
        "use strategy=parameter_server",
    ),
    Rule(
        "TF_CONFIG without servers",
        ("strategy", "cluster"),
        lambda p: (
            p.cluster.name == "tf_config" and p.strategy.name == "parameter_server" and not count_named_servers(p)
        ),
        "TF_CONFIG names no ps, the servers that hold the variables",
        "give it a chief, worker and ps, or use strategy=multi_worker",
    ),
    Rule(
        "divided devices of a coordinator's workers",
        ("hardware.logical_devices", "strategy"),
        lambda p: p.hardware.logical_devices > 1 and p.strategy.name == "parameter_server",
        "each worker is one replica on one device",
        "use more cluster.workers",
    ),
    Rule(
        "partitioner without servers",
        ("strategy.partitioner.max_shards", "strategy"),
        lambda p: p.strategy.partitioner != Partitioner() and p.strategy.name != "parameter_server",
        "there are no servers to divide variables among",
        "use strategy=parameter_server, or leave it null",
    ),
    Rule(
        "communication without workers",
        ("strategy.communication", "strategy"),
        lambda p: p.strategy.communication != "auto" and p.strategy.name != "multi_worker",
        "this strategy has no workers that speak with each other",
        "use strategy=multi_worker, or leave it auto",
    ),
    Rule(
        "TPU strategy elsewhere",
        ("strategy", "hardware"),
        lambda p: p.strategy.name == "tpu" and p.hardware.name in ("cpu", "gpu"),
        "its replicas are the cores of a TPU",
        "use hardware=tpu, or strategy=mirrored",
    ),
    Rule(
        "TPU with another strategy",
        ("hardware", "strategy"),
        lambda p: p.hardware.name == "tpu" and p.strategy.name != "tpu",
        "only strategy=tpu uses a TPU",
        "use it, or hardware=auto",
    ),
    Rule(
        "address of a TPU that is not used",
        ("hardware.tpu", "strategy", "hardware"),
        lambda p: p.hardware.tpu is not None and p.strategy.name != "tpu",
        "this uses no TPU",
        "use strategy=tpu hardware=tpu, or leave hardware.tpu null",
    ),
    Rule(
        "divided TPU",
        ("hardware.logical_devices", "hardware"),
        lambda p: p.hardware.name == "tpu" and p.hardware.logical_devices > 1,
        "its cores are not divided",
        "leave it 1, or use hardware=cpu",
    ),
    Rule(
        "some of a TPU",
        ("hardware.devices", "hardware"),
        lambda p: p.hardware.name == "tpu" and p.hardware.devices is not None,
        "all of its cores are used",
        "leave it null, or use hardware=gpu",
    ),
    Rule(
        "memory of a TPU",
        ("hardware.memory_growth", "hardware.memory_limit_mb", "hardware"),
        lambda p: p.hardware.name == "tpu" and (p.hardware.memory_growth or p.hardware.memory_limit_mb is not None),
        "they are for GPUs",
        "leave them false and null",
    ),
    Rule(
        "float16 on a TPU",
        ("precision", "hardware"),
        lambda p: p.hardware.name == "tpu" and p.precision.name == "mixed_float16",
        "its units multiply bfloat16",
        "use precision=mixed_bfloat16, or mixed, which means that there",
    ),
    Rule(
        "TPU in TF_CONFIG",
        ("cluster", "strategy"),
        lambda p: p.cluster.name != "local" and p.strategy.name == "tpu",
        "hardware.tpu names the TPU's hosts",
        "use cluster=local",
    ),
    Rule(
        "several machines of a strategy with one",
        ("cluster", "strategy"),
        lambda p: p.strategy.name in ("one_device", "mirrored") and is_over_machines(p),
        "this strategy stays on one machine",
        "use strategy=multi_worker or parameter_server, or cluster=local",
    ),
    Rule(
        "workers counted twice",
        ("cluster.workers", "cluster"),
        lambda p: is_started_elsewhere(p) and p.cluster.workers is not None and p.cluster.submit is None,
        "what has started the processes says how many there are",
        "leave it null",
    ),
    Rule(
        "divided CPUs of several workers",
        ("hardware.logical_devices", "strategy"),
        lambda p: p.hardware.logical_devices > 1 and p.strategy.name == "multi_worker" and p.hardware.name == "cpu",
        "on CPUs this strategy has one replica to a worker, whatever its devices",
        "more replicas take cluster.workers=4, or so",
        "warning",
    ),
    Rule(
        "several processes inline",
        ("debug.inline", "strategy"),
        lambda p: p.debug.inline and len(process_names(p)) > 1,
        "its workers need a process each",
        "use strategy=one_device or mirrored, or cluster.workers=1",
    ),
    Rule(
        "nothing compiled and XLA",
        ("debug.eager", "hardware.xla"),
        lambda p: p.debug.eager and p.hardware.xla,
        "XLA compiles, and this has nothing compiled",
        "leave one of the two false",
    ),
    Rule(
        "nothing compiled on replicas",
        ("debug.eager", "strategy"),
        lambda p: p.debug.eager and p.strategy.name in ("mirrored", "multi_worker"),
        "replicas that are not compiled begin their collectives in any order, and TensorFlow aborts (measured)",
        "use strategy=one_device, or pipeline",
    ),
    Rule(
        "nothing compiled elsewhere",
        ("debug.eager", "strategy"),
        lambda p: p.debug.eager and p.strategy.name in ("parameter_server", "tpu"),
        "what is sent to other machines or a TPU is a compiled function",
        "use strategy=one_device",
    ),
    Rule(
        "NaN looked for by XLA",
        ("debug.nan", "hardware.xla"),
        lambda p: p.debug.nan and p.hardware.xla,
        "the check of each operation is none that XLA compiles",
        "leave one of the two false",
    ),
    Rule(
        "NaN looked for in deterministic operations",
        ("debug.nan", "hardware.deterministic"),
        lambda p: p.debug.nan and p.hardware.deterministic,
        "TensorFlow's deterministic cross-entropy has a NaN among its constants, which the check would find at step 1",
        "leave one of the two false",
    ),
    Rule(
        "NaN looked for in tables",
        ("debug.nan", "dataset._target_"),
        lambda p: p.debug.nan and p.dataset.target.path == "scaleflow.dataset.csv.Csv",
        "the preprocessing of a table marks missing values by NaN, which the check would find before step 1",
        "leave debug=nan away: the first step whose loss is not finite is named anyway",
    ),
    Rule(
        "NaN looked for on a TPU",
        ("debug.nan", "strategy"),
        lambda p: p.debug.nan and p.strategy.name == "tpu",
        "the check of each operation is none that a TPU does",
        "use strategy=one_device or mirrored",
    ),
    Rule(
        "NaN looked for in float16",
        ("debug.nan", "precision"),
        lambda p: p.debug.nan and p.precision.name == "mixed_float16",
        "its loss scale rises until a gradient is Inf, and falls then: that is no fault",
        "use precision=float32 or mixed_bfloat16",
    ),
    Rule(
        "profile of one step",
        ("profiler", "debug.fast"),
        lambda p: p.profiler.name == "trace" and p.debug.fast,
        "there is but one step, which compiles",
        "use profiler=none, or training.max_steps=100 instead of debug=fast",
    ),
    Rule(
        "profile behind the run's end",
        ("profiler.start_step", "profiler.steps", "training.max_steps"),
        has_windows_after_the_end,
        "the run ends before the last step that is to be traced",
        "begin earlier, trace fewer steps, or train longer",
    ),
    Rule(
        "profile of no window",
        ("profiler.start_step",),
        lambda p: p.profiler.name == "trace" and not p.profiler.windows,
        "there is no step to begin with",
        "give profiler.start_step=50",
    ),
    Rule(
        "profiles that overlap",
        ("profiler.start_step", "profiler.steps"),
        has_windows_that_overlap,
        "a window begins before the one before it ends",
        "give starts that are further from each other, or fewer steps",
    ),
    Rule(
        "profile of nothing compiled",
        ("profiler", "debug.eager"),
        lambda p: p.profiler.name == "trace" and p.debug.eager,
        "what would be seen is Python's time, not that of the run",
        "leave one of the two",
    ),
    Rule(
        "profile of fit with several steps to a call",
        ("profiler", "training.engine", "training.steps_per_loop"),
        lambda p: (
            p.profiler.name == "trace" and p.training.engine == "fit" and p.training.steps_per_loop not in ("auto", 1)
        ),
        "Keras's fit can't be told to take the traced steps one by one",
        "use training.steps_per_loop=1, or training.engine=loop",
    ),
    Rule(
        "profile of a TPU",
        ("profiler", "strategy"),
        lambda p: p.profiler.name == "trace" and p.strategy.name == "tpu",
        "nobody has tried it on a TPU, and of one that is reached over a network there is the host's part alone",
        "look at the trace before you trust its summary",
        "warning",
    ),
    Rule(
        "pipeline over machines",
        ("cluster", "strategy"),
        lambda p: p.strategy.name == "pipeline" and p.cluster.name != "local",
        "a pipeline's stages are on one machine",
        "use cluster=local",
    ),
    Rule(
        "devices of a pipeline",
        ("strategy.stages", "hardware.logical_devices"),
        lambda p: (
            p.strategy.name == "pipeline"
            and p.hardware.name == "cpu"
            and p.hardware.logical_devices != p.strategy.stages
        ),
        "a pipeline has one device to each stage, and is not replicated over data",
        "use as many of the one as of the other",
    ),
    Rule(
        "cuts of a pipeline",
        ("strategy.cuts", "strategy.stages"),
        lambda p: (
            p.strategy.name == "pipeline"
            and p.strategy.cuts is not None
            and len(p.strategy.cuts) != p.strategy.stages - 1
        ),
        "these are not the first layer of each stage but the first",
        "expected one less than there are stages, or null",
    ),
    Rule(
        "stages without a pipeline",
        ("strategy.stages", "strategy.micro_batches", "strategy.cuts", "strategy"),
        lambda p: p.strategy.name != "pipeline" and is_staged(p.strategy),
        "this strategy does not divide the model",
        "use strategy=pipeline, or leave them as they are",
    ),
    Rule(
        "XLA and stages",
        ("hardware.xla", "strategy"),
        lambda p: p.hardware.xla and p.strategy.name == "pipeline",
        "XLA makes one program for one device of what is on several",
        "use hardware.xla=false, or another strategy",
    ),
    Rule(
        "XLA and servers",
        ("hardware.xla", "strategy"),
        lambda p: p.hardware.xla and p.strategy.name == "parameter_server",
        "a program of XLA's reads no variables that are on another machine",
        "use hardware.xla=false, or another strategy",
    ),
    Rule(
        "fit under other strategies",
        ("training.engine", "strategy"),
        lambda p: p.training.engine == "fit" and p.strategy.name not in ("auto", "one_device", "mirrored"),
        "Keras 3's fit fails there, it knows one device and mirrored",
        "use training.engine=loop",
    ),
    Rule(
        "fit with an own step",
        ("training.engine", "training.step._target_"),
        lambda p: p.training.engine == "fit" and p.training.step is not None,
        "Keras's fit takes its own step",
        "use training.engine=loop",
    ),
    Rule(
        "fit with accumulation",
        ("training.engine", "training.accumulate"),
        lambda p: p.training.engine == "fit" and p.training.accumulate > 1,
        "Keras's own accumulation fails under a strategy",
        "use training.engine=loop",
    ),
    Rule(
        "fit with clipping",
        ("training.engine", "training.clip_norm"),
        lambda p: p.training.engine == "fit" and p.training.clip_norm is not None,
        "Keras clips each replica's gradient, before they are summed",
        "use training.engine=loop",
    ),
    Rule(
        "fit with XLA",
        ("training.engine", "hardware.xla"),
        lambda p: p.training.engine == "fit" and p.hardware.xla,
        "what XLA compiles is the loop's",
        "use training.engine=loop, or hardware.xla=false",
    ),
    Rule(
        "fit mirrored in float16",
        ("training.engine", "precision", "strategy"),
        lambda p: is_fit_mirrored(p) and p.precision.name == "mixed_float16",
        "Keras looks for an overflow in the first replica's gradients alone",
        "use training.engine=loop",
    ),
    Rule(
        "fit mirrored with several steps to a call",
        ("training.steps_per_loop", "training.engine", "strategy"),
        lambda p: is_fit_mirrored(p) and p.training.steps_per_loop not in ("auto", 1),
        "Keras's steps_per_execution fails there",
        "use auto, or training.engine=loop",
    ),
    Rule(
        "rollback in fit",
        ("training.on_nan", "training.engine"),
        lambda p: p.training.on_nan == "rollback" and p.training.engine == "fit",
        "Keras's fit goes through its epochs once",
        "use training.engine=loop",
    ),
    Rule(
        "rollback without checkpoints",
        ("training.on_nan", "checkpoint"),
        lambda p: p.training.on_nan == "rollback" and p.checkpoint.name == "none",
        "there is nothing to go back to",
        "leave checkpoint=default",
    ),
    Rule(
        "rollback and the search for NaN",
        ("debug.nan", "training.on_nan"),
        lambda p: p.debug.nan and p.training.on_nan == "rollback",
        "the one ends the run where the other goes on",
        "leave one of the two",
    ),
    Rule(
        "class weights with an own step",
        ("objective.class_weight", "training.step._target_"),
        lambda p: p.objective.class_weight is not None and p.training.step is not None,
        "the step computes the training loss itself",
        "weigh the classes in the step, and leave objective.class_weight null",
    ),
    Rule(
        "own step in stages",
        ("training.step._target_", "strategy"),
        lambda p: p.training.step is not None and p.strategy.name == "pipeline",
        "it calls the model as a whole, and a pipeline has it in stages",
        "use another strategy",
    ),
    Rule(
        "NCCL on a CPU",
        ("strategy.communication", "hardware"),
        lambda p: p.strategy.communication == "nccl" and p.hardware.name == "cpu",
        "NCCL connects GPUs",
        "use ring, or auto",
    ),
    Rule(
        "float16 on a CPU",
        ("precision", "hardware"),
        lambda p: p.precision.name == "mixed_float16" and p.hardware.name == "cpu",
        "right, but slow",
        "precision=mixed picks bfloat16 there",
        "warning",
    ),
    Rule(
        "step schedule without a step",
        ("optimizer.schedule",),
        lambda p: p.optimizer.schedule == "step" and p.optimizer.step_every is None,
        "the rate is multiplied by optimizer.step_factor every so many updates",
        "give optimizer.step_every",
    ),
    Rule(
        "LoRA of no layer",
        ("model.lora.layers",),
        lambda p: p.model.lora is not None and not p.model.lora.layers,
        "no layers are named that LoRA is added to",
        "name some: model.lora.layers=[dense*]",
    ),
    Rule(
        "a learning rate of 0",
        ("optimizer.rate_factors",),
        lambda p: 0.0 in (p.optimizer.rate_factors or {}).values(),
        "a layer whose learning rate is 0 does not train",
        "leave it out, and use model.freeze=[PATTERN]",
    ),
    Rule(
        "validation fraction",
        ("dataset.validation",),
        has_no_fraction_to_validate,
        "no fraction of the training split",
        "expected a fraction from 0 to less than 1, the name of a split, or null",
    ),
    Rule(
        "monitor without validation",
        ("training.early_stopping.monitor", "dataset.validation"),
        has_monitor_without_validation,
        "there is nothing to validate on",
        "set dataset.validation=0.1, or monitor train/loss",
    ),
)


# ---------------------------------------------------------------------------------------------
# The axes of the docs page
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """One value of an axis.

    Attributes:
        key: the key of the axis.
        name: the value as it is typed after the key.
    """

    key: str
    name: str

    @property
    def word(self) -> str:
        """The override: `KEY=NAME`."""
        return f"{self.key}={self.name}"


@dataclass(frozen=True)
class Axis:
    """A key and its values. Of values that work with the same values of other keys, only one is listed."""

    key: str
    values: tuple[Value, ...]


#: (overrides, a further override that a combination with all of them needs to make sense): several devices on a CPU.
NEEDS: Sequence[tuple[frozenset[str], str]] = tuple(
    (frozenset({f"strategy={strategy}", f"hardware={hardware}"}), "hardware.logical_devices=2")
    for strategy in ("auto", "mirrored", "pipeline")
    for hardware in ("auto", "cpu")
)

#: (overrides, the environment variables that a combination with all of them needs). A later entry wins.
ENVIRONMENTS: Sequence[tuple[frozenset[str], Mapping[str, str]]] = (
    (frozenset({"cluster=tf_config"}), {TF_CONFIG: EXAMPLE}),
    (frozenset({"cluster=tf_config", "strategy=parameter_server"}), {TF_CONFIG: EXAMPLE_WITH_SERVERS}),
)


def make_axis(key: str, *names: str) -> Axis:
    return Axis(key, tuple(Value(key, name) for name in names))


def literal_values(cls: type[Any], name: str = "name") -> tuple[str, ...]:
    """Returns the values of the Literal of a field."""
    return get_args(get_type_hints(cls)[name])


AXES: Sequence[Axis] = (
    make_axis("strategy", *literal_values(Strategy)),
    make_axis("hardware", *literal_values(Hardware)),
    make_axis("precision", *literal_values(Precision)),
    make_axis("training.engine", *literal_values(Training, "engine")),
    make_axis("training.accumulate", "1", "4"),
    make_axis("training.clip_norm", "null", "1.0"),
    make_axis("hardware.xla", "false", "true"),
    make_axis("cluster", "local", "tf_config"),  # slurm and kubernetes work as tf_config
)
