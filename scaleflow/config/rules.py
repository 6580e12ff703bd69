"""Defines which options work together, as data.

Each combination that cannot work is one `Rule` in `RULES`, or in the `rules` of a cluster engine if it is only about
that engine. `tests/combinations.py` renders the docs page from them.

The launcher checks the rules with the config, in which `auto` means not known yet. The worker checks them again with
the actual devices, strategy and precision, before `ready`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from scaleflow.cluster.engines import ClusterEngine, find_engine, list_engines
from scaleflow.cluster.members import process_names
from scaleflow.config.parse import format_value
from scaleflow.errors import ConfigError
from scaleflow.interfaces import Cluster, Partitioner, Plan, Rule, Strategy

#: The most keys that a message about keys of another engine shows with their values.
MAX_SHOWN_KEYS = 3

#: The class of `dataset=table` and `dataset=csv`.
TABLE = "scaleflow.dataset.table.Table"


def explain_rule(rule: Rule, plan: Plan) -> str:
    """Returns the text for the user: keys, values, reason, and what would work."""
    settings = " with ".join(f"{key}={format_value(value_of(plan, key))}" for key in rule.keys)
    return f"{settings}: {rule.reason}; {rule.instead}"


def value_of(plan: Plan, key: str) -> object:
    """Returns the value of a dotted key in a plan. The value of a config group is its option."""
    value: object = plan
    for part in key.split("."):
        name = part
        if part == "_target_":  # of a section that names a class, or of the target itself
            value, name = getattr(value, "target", value), "path"
        is_known = value is not plan.cluster or hasattr(value, name)
        value = getattr(value, name) if is_known else plan.config["cluster"].get(name)  # only another engine has it
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
    """Yields the rules that apply to a plan. Of the rules of cluster engines, only those of its own engine can."""
    rules = (*RULES, *make_key_rules(*list_engines().values()), *find_engine(plan.cluster).rules)
    return (rule for rule in rules if rule.applies(plan))


def list_rules() -> Sequence[Rule]:
    """Returns all rules, those of the cluster engines too."""
    engines = list_engines().values()
    return (*RULES, *make_key_rules(*engines), *(rule for engine in engines for rule in engine.rules))


@functools.cache
def make_key_rules(*engines: ClusterEngine) -> Sequence[Rule]:
    """Returns the rules about keys of `cluster` that only some engines have."""
    assigning = [engine.name for engine in engines if engine.assigns_resources]
    submitting = [engine.name for engine in engines if engine.render_job]
    return (
        *(make_key_rule(engine) for engine in engines if engine.own_keys),
        Rule(
            ("cluster.cpus", "cluster.gpus", "cluster"),
            lambda p: not find_engine(p.cluster).assigns_resources and bool(p.cluster.cpus or p.cluster.gpus),
            f"only {' and '.join(map(str.capitalize, assigning))} assign cores and GPUs to processes",
            f"use hardware.devices and hardware.intra_op_threads, or cluster={' or '.join(assigning)}",
        ),
        Rule(
            ("cluster.submit", "cluster"),
            lambda p: p.cluster.submit is not None and find_engine(p.cluster).render_job is None,
            f"scripts can be written only for {' and '.join(map(str.capitalize, submitting))}",
            f"use cluster={' or '.join(submitting)}, or leave it null",
        ),
    )


def make_key_rule(engine: ClusterEngine) -> Rule:
    """Returns the rule that refuses an engine's own keys for other engines."""
    keys = engine.own_keys
    shown, named = (keys, "") if len(keys) <= MAX_SHOWN_KEYS else ((), f"{', '.join(keys)}: ")
    return Rule(
        (*(f"cluster.{key}" for key in shown), "cluster"),
        lambda p: has_foreign_keys(p, engine),
        f"{named}these keys are only for {engine.place}",
        f"use cluster={engine.name}, or remove them",
    )


def has_foreign_keys(plan: Plan, engine: ClusterEngine) -> bool:
    """Whether the config has keys that this engine has, and the config's own engine has not."""
    given = plan.config.get("cluster") or {}
    own, defaults = list_engines()[given.get("name", Cluster.name)].own_keys, vars(engine.section())
    return any(key not in own and given.get(key, defaults[key]) != defaults[key] for key in engine.own_keys)


def check_rules(plan: Plan) -> list[str]:
    """Returns the messages of the warnings that apply. Raises ConfigError with the message of the first rule that
    refuses.
    """
    rules = list(find_applicable(plan))
    for rule in rules:
        if rule.verdict == "refused":
            raise ConfigError(explain_rule(rule, plan))
    return [explain_rule(rule, plan) for rule in rules]


def has_invalid_indices(plan: Plan) -> bool:
    indices = plan.hardware.devices or []
    return any(index < 0 for index in indices) or len(set(indices)) < len(indices)


def has_invalid_fraction(plan: Plan) -> bool:
    validation = plan.dataset.validation
    return isinstance(validation, float) and not 0 <= validation < 1


def is_known_not_to_be_table(path: str) -> bool:
    """Whether this is another dataset of scaleflow's. The worker knows what a class of the user's is."""
    return path.startswith("scaleflow.") and path != TABLE


def has_monitor_without_validation(plan: Plan) -> bool:
    stopping = plan.training.early_stopping
    return stopping is not None and stopping.monitor.startswith("val/") and not plan.dataset.validation


def is_started_elsewhere(plan: Plan) -> bool:
    return find_engine(plan.cluster).is_started_elsewhere


def is_fit_mirrored(plan: Plan) -> bool:
    return plan.training.engine == "fit" and plan.strategy.name == "mirrored"


def has_windows_after_the_end(plan: Plan) -> bool:
    longest = plan.training.max_steps
    return longest is not None and any(last > longest for _, last in plan.profiler.windows)


def has_windows_that_overlap(plan: Plan) -> bool:
    windows = plan.profiler.windows
    return any(following <= last for (_, last), (following, _) in itertools.pairwise(windows))


#: Keys of `strategy` that only one option has.
FOR_PIPELINE = ("stages", "replicas", "micro_batches", "cuts")

RULES: Sequence[Rule] = (
    Rule(
        ("hardware.memory_limit_mb", "hardware"),
        lambda p: p.hardware.memory_limit_mb is not None and p.hardware.name == "cpu",
        "only a GPU can have a memory limit",
        "use hardware=gpu, or leave it null",
    ),
    Rule(
        ("hardware.memory_growth", "hardware.memory_limit_mb"),
        lambda p: p.hardware.memory_growth and p.hardware.memory_limit_mb is not None,
        "TensorFlow supports memory growth or a memory limit, not both",
        "use only one of the two",
    ),
    Rule(
        ("hardware.logical_devices", "hardware"),
        lambda p: p.hardware.name == "gpu" and p.hardware.logical_devices > 1 and p.hardware.memory_limit_mb is None,
        "each logical device of a GPU needs a memory limit",
        "set hardware.memory_limit_mb",
    ),
    Rule(
        ("hardware.xla", "hardware.deterministic"),
        lambda p: p.hardware.xla is True and p.hardware.deterministic,
        "XLA has no deterministic version of some gradients, such as that of max-pooling",
        "set one of the two to false",
    ),
    Rule(
        ("hardware.xla", "hardware"),
        lambda p: p.hardware.xla is True and p.hardware.name == "cpu",
        "on a CPU XLA is seldom faster where it cannot compile the whole loop (measured: 0.5 to 0.75 times; with "
        "several replicas 0.8 to 1.15)",
        "hardware.xla=auto compiles only what is faster",
        "warning",
    ),
    Rule(
        ("hardware.remat",),
        lambda p: isinstance(p.hardware.remat, list) and not p.hardware.remat,
        "the list names no layers",
        "name layers, such as hardware.remat=[block*], or use true or false",
    ),
    Rule(
        ("hardware.remat", "hardware.xla"),
        lambda p: p.hardware.remat is not False and p.hardware.xla is True,
        "XLA would reuse what is to be computed again, so no memory would be saved",
        "use hardware.xla=auto, or hardware.remat=false",
    ),
    Rule(
        ("hardware.remat", "strategy"),
        lambda p: p.hardware.remat is not False and p.strategy.name == "tpu",
        "a TPU runs XLA programs, which would reuse what is to be computed again",
        "use hardware.remat=false and training.accumulate=2, or another strategy",
    ),
    Rule(
        ("hardware.devices",),
        lambda p: p.hardware.devices is not None and not p.hardware.devices,
        "the list is empty, so there is no device to compute on",
        "give at least one index, or null for all devices",
    ),
    Rule(
        ("hardware.devices",),
        has_invalid_indices,
        "an index is negative or is given twice",
        "give different indices, counted from 0",
    ),
    Rule(
        ("cluster.workers", "strategy"),
        lambda p: p.cluster.workers not in (None, 1) and not p.strategy.has_several_processes,
        "this strategy runs in one process",
        "use strategy=multi_worker or parameter_server, or leave cluster.workers null",
    ),
    Rule(
        ("cluster.servers", "strategy"),
        lambda p: p.cluster.servers is not None and p.strategy.name != "parameter_server",
        "this strategy has no parameter servers",
        "use strategy=parameter_server, or leave cluster.servers null",
    ),
    Rule(
        ("cluster.max_restarts", "strategy", "cluster"),
        lambda p: bool(p.cluster.max_restarts) and is_started_elsewhere(p) and p.strategy.name == "parameter_server",
        "a coordinator cannot restart processes on other machines",
        "let the system that started the processes restart them, with resume=FOLDER, and leave it null",
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
        "use checkpoint=default, in a folder that all machines see, or leave it null",
    ),
    Rule(
        ("strategy", "cluster"),
        lambda p: p.strategy.name == "multi_worker" and p.task is not None and p.task.servers > 0,
        "TF_CONFIG names ps, and this strategy has no parameter servers",
        "use strategy=parameter_server",
    ),
    Rule(
        ("hardware.logical_devices", "strategy"),
        lambda p: p.hardware.logical_devices > 1 and p.strategy.name == "parameter_server",
        "each worker is one replica on one device",
        "use more cluster.workers",
    ),
    Rule(
        ("strategy.partitioner.max_shards", "strategy"),
        lambda p: p.strategy.partitioner != Partitioner() and p.strategy.name != "parameter_server",
        "this strategy has no parameter servers to divide variables among",
        "use strategy=parameter_server, or leave it null",
    ),
    Rule(
        ("strategy.communication", "strategy"),
        lambda p: p.strategy.communication != "auto" and p.strategy.name != "multi_worker",
        "this strategy has no workers that communicate",
        "use strategy=multi_worker, or leave it auto",
    ),
    Rule(
        ("strategy", "hardware"),
        lambda p: p.strategy.name == "tpu" and p.hardware.name in ("cpu", "gpu"),
        "this strategy runs only on the cores of a TPU",
        "use hardware=tpu, or strategy=mirrored",
    ),
    Rule(
        ("hardware", "strategy"),
        lambda p: p.hardware.name == "tpu" and p.strategy.name != "tpu",
        "only strategy=tpu uses a TPU",
        "use strategy=tpu, or hardware=auto",
    ),
    Rule(
        ("hardware.tpu", "strategy", "hardware"),
        lambda p: p.hardware.tpu is not None and p.strategy.name != "tpu",
        "this strategy uses no TPU",
        "use strategy=tpu hardware=tpu, or leave hardware.tpu null",
    ),
    Rule(
        ("hardware.logical_devices", "hardware"),
        lambda p: p.hardware.name == "tpu" and p.hardware.logical_devices > 1,
        "the cores of a TPU cannot be divided",
        "leave it 1, or use hardware=cpu",
    ),
    Rule(
        ("hardware.devices", "hardware"),
        lambda p: p.hardware.name == "tpu" and p.hardware.devices is not None,
        "a TPU is always used with all of its cores",
        "leave it null, or use hardware=gpu",
    ),
    Rule(
        ("hardware.memory_growth", "hardware.memory_limit_mb", "hardware"),
        lambda p: p.hardware.name == "tpu" and (p.hardware.memory_growth or p.hardware.memory_limit_mb is not None),
        "these keys are only for GPUs",
        "leave them false and null",
    ),
    Rule(
        ("precision", "hardware"),
        lambda p: p.hardware.name == "tpu" and p.precision.name == "mixed_float16",
        "a TPU computes in bfloat16, not in float16",
        "use precision=mixed_bfloat16, or mixed, which selects it",
    ),
    Rule(
        ("cluster", "strategy"),
        lambda p: not find_engine(p.cluster).is_local and p.strategy.name == "tpu",
        "this strategy runs in one process, and hardware.tpu names the TPU's hosts",
        "use cluster=local",
    ),
    Rule(
        ("cluster", "strategy"),
        lambda p: p.strategy.name in ("one_device", "mirrored") and p.task is not None and len(p.task.peers) > 1,
        "this strategy runs on one machine",
        "use strategy=multi_worker or parameter_server, or cluster=local",
    ),
    Rule(
        ("cluster.workers", "cluster"),
        lambda p: is_started_elsewhere(p) and p.cluster.workers is not None and p.cluster.submit is None,
        "the system that starts the processes sets their number",
        "leave it null",
    ),
    Rule(
        ("hardware.logical_devices", "strategy"),
        lambda p: p.hardware.logical_devices > 1 and p.strategy.name == "multi_worker" and p.hardware.name == "cpu",
        "on CPUs this strategy has one replica per worker, whatever the number of devices",
        "for more replicas, use for example cluster.workers=4",
        "warning",
    ),
    Rule(
        ("debug.inline", "strategy"),
        lambda p: p.debug.inline and len(process_names(p)) > 1,
        "each worker needs its own process",
        "use strategy=one_device or mirrored, or cluster.workers=1",
    ),
    Rule(
        ("debug.eager", "hardware.xla"),
        lambda p: p.debug.eager and p.hardware.xla is True,
        "XLA compiles, and debug.eager turns compilation off",
        "set one of the two to false",
    ),
    Rule(
        ("debug.eager", "strategy"),
        lambda p: p.debug.eager and p.strategy.name in ("mirrored", "multi_worker"),
        "without compilation, replicas start their collective operations in different orders, and TensorFlow "
        "aborts (measured)",
        "use strategy=one_device or pipeline",
    ),
    Rule(
        ("debug.eager", "strategy"),
        lambda p: p.debug.eager and p.strategy.name in ("parameter_server", "tpu"),
        "only compiled functions run on other machines or on a TPU",
        "use strategy=one_device",
    ),
    Rule(
        ("debug.nan", "hardware.xla"),
        lambda p: p.debug.nan and p.hardware.xla is True,
        "XLA cannot compile the check of each operation",
        "set one of the two to false",
    ),
    Rule(
        ("debug.nan", "hardware.deterministic"),
        lambda p: p.debug.nan and p.hardware.deterministic,
        "TensorFlow's deterministic cross-entropy contains a NaN constant, which the check would report at step 1",
        "set one of the two to false",
    ),
    Rule(
        ("debug.nan", "dataset._target_"),
        lambda p: p.debug.nan and p.dataset.target.path == TABLE,
        "the preprocessing of a table marks missing values with NaN, which the check would report before step 1",
        "remove debug=nan; a run always reports the first step whose loss is not finite",
    ),
    Rule(
        ("debug.nan", "strategy"),
        lambda p: p.debug.nan and p.strategy.name == "tpu",
        "a TPU cannot run the check of each operation",
        "use strategy=one_device or mirrored",
    ),
    Rule(
        ("debug.nan", "precision"),
        lambda p: p.debug.nan and p.precision.name == "mixed_float16",
        "dynamic loss scaling makes some gradients Inf on purpose, which is not an error",
        "use precision=float32 or mixed_bfloat16",
    ),
    Rule(
        ("profiler", "debug.fast"),
        lambda p: p.profiler.name == "trace" and p.debug.fast,
        "debug.fast runs a single step, whose time is mostly compilation",
        "use profiler=none, or training.max_steps=100 instead of debug=fast",
    ),
    Rule(
        ("profiler.start_step", "profiler.steps", "training.max_steps"),
        has_windows_after_the_end,
        "the run ends before the last step to trace",
        "start earlier, trace fewer steps, or train longer",
    ),
    Rule(
        ("profiler.start_step",),
        lambda p: p.profiler.name == "trace" and not p.profiler.windows,
        "the list is empty, so there is no step to start at",
        "set profiler.start_step=50",
    ),
    Rule(
        ("profiler.start_step", "profiler.steps"),
        has_windows_that_overlap,
        "a window starts before the previous one ends",
        "use starts that are further apart, or fewer steps",
    ),
    Rule(
        ("profiler", "debug.eager"),
        lambda p: p.profiler.name == "trace" and p.debug.eager,
        "the trace would show Python's time, not that of a compiled run",
        "use only one of the two",
    ),
    Rule(
        ("profiler", "training.engine", "training.steps_per_loop"),
        lambda p: (
            p.profiler.name == "trace" and p.training.engine == "fit" and p.training.steps_per_loop not in ("auto", 1)
        ),
        "Keras's fit cannot run the traced steps one by one",
        "use training.steps_per_loop=1, or training.engine=loop",
    ),
    Rule(
        ("profiler", "strategy"),
        lambda p: p.profiler.name == "trace" and p.strategy.name == "tpu",
        "this has not been tried on a TPU, and the trace of a TPU on the network contains only the host's part",
        "check the trace before you trust its summary",
        "warning",
    ),
    Rule(
        ("cluster", "strategy"),
        lambda p: p.strategy.name == "pipeline" and not find_engine(p.cluster).is_local,
        "all stages and replicas of a pipeline are on the devices of one process",
        "use cluster=local",
    ),
    Rule(
        ("strategy.stages", "strategy.replicas", "hardware.logical_devices"),
        lambda p: (
            p.strategy.name == "pipeline"
            and p.hardware.name == "cpu"
            and p.hardware.logical_devices != p.strategy.stages * p.strategy.replicas
        ),
        "a pipeline needs exactly one device for each stage of each replica",
        "set hardware.logical_devices to strategy.stages x strategy.replicas",
    ),
    Rule(
        ("strategy.cuts", "strategy.stages"),
        lambda p: (
            p.strategy.name == "pipeline"
            and p.strategy.cuts is not None
            and len(p.strategy.cuts) != p.strategy.stages - 1
        ),
        "the list must name the first layer of every stage except the first stage",
        "give one name fewer than there are stages, or null",
    ),
    Rule(
        ("strategy.stages", "strategy.replicas", "strategy.micro_batches", "strategy.cuts", "strategy"),
        lambda p: (
            not p.strategy.is_pipeline and any(getattr(p.strategy, k) != getattr(Strategy, k) for k in FOR_PIPELINE)
        ),
        "this strategy does not divide the model",
        "use strategy=pipeline, or leave them at their defaults",
    ),
    Rule(
        ("hardware.xla", "strategy"),
        lambda p: p.hardware.xla is True and p.strategy.name == "pipeline",
        "XLA compiles a program for one device, and a pipeline uses several",
        "use hardware.xla=false, or another strategy",
    ),
    Rule(
        ("hardware.xla", "strategy"),
        lambda p: p.hardware.xla is True and p.strategy.name == "parameter_server",
        "an XLA program cannot read variables on another machine",
        "use hardware.xla=false, or another strategy",
    ),
    Rule(
        ("training.engine", "strategy"),
        lambda p: p.training.engine == "fit" and p.strategy.name not in ("auto", "one_device", "mirrored"),
        "Keras 3's fit works only with strategy=one_device and mirrored",
        "use training.engine=loop",
    ),
    Rule(
        ("training.engine", "training.step._target_"),
        lambda p: p.training.engine == "fit" and p.training.step is not None,
        "Keras's fit runs its own training step",
        "use training.engine=loop",
    ),
    Rule(
        ("training.engine", "training.accumulate"),
        lambda p: p.training.engine == "fit" and p.training.accumulate > 1,
        "Keras's gradient accumulation fails under a strategy",
        "use training.engine=loop",
    ),
    Rule(
        ("training.engine", "training.clip_norm"),
        lambda p: p.training.engine == "fit" and p.training.clip_norm is not None,
        "Keras clips the gradient of each replica before they are summed",
        "use training.engine=loop",
    ),
    Rule(
        ("training.engine", "hardware.xla"),
        lambda p: p.training.engine == "fit" and p.hardware.xla is True,
        "XLA is supported only in scaleflow's own loop",
        "use training.engine=loop, or hardware.xla=false",
    ),
    Rule(
        ("training.engine", "precision", "strategy"),
        lambda p: is_fit_mirrored(p) and p.precision.name == "mixed_float16",
        "Keras checks only the first replica's gradients for overflow",
        "use training.engine=loop",
    ),
    Rule(
        ("training.steps_per_loop", "training.engine", "strategy"),
        lambda p: is_fit_mirrored(p) and p.training.steps_per_loop not in ("auto", 1),
        "Keras's steps_per_execution fails under this strategy",
        "use auto, or training.engine=loop",
    ),
    Rule(
        ("training.on_nan", "training.engine"),
        lambda p: p.training.on_nan == "rollback" and p.training.engine == "fit",
        "Keras's fit cannot go back to an earlier step",
        "use training.engine=loop",
    ),
    Rule(
        ("training.on_nan", "checkpoint"),
        lambda p: p.training.on_nan == "rollback" and p.checkpoint.name == "none",
        "no checkpoints are saved to go back to",
        "use checkpoint=default",
    ),
    Rule(
        ("debug.nan", "training.on_nan"),
        lambda p: p.debug.nan and p.training.on_nan == "rollback",
        "debug.nan ends the run at the first NaN, and a rollback continues it",
        "use only one of the two",
    ),
    Rule(
        ("objective.class_weight", "training.step._target_"),
        lambda p: p.objective.class_weight is not None and p.training.step is not None,
        "a custom step computes the training loss itself",
        "apply the class weights in the step, and leave objective.class_weight null",
    ),
    Rule(
        ("training.step._target_", "strategy"),
        lambda p: p.training.step is not None and p.strategy.name == "pipeline",
        "a custom step calls the whole model, and a pipeline divides it into stages",
        "use another strategy",
    ),
    Rule(
        ("strategy.communication", "hardware"),
        lambda p: p.strategy.communication == "nccl" and p.hardware.name == "cpu",
        "NCCL works only between GPUs",
        "use ring, or auto",
    ),
    Rule(
        ("precision", "hardware"),
        lambda p: p.precision.name == "mixed_float16" and p.hardware.name == "cpu",
        "results are correct, but float16 is slow on a CPU",
        "precision=mixed selects bfloat16",
        "warning",
    ),
    Rule(
        ("training.batch_size", "training.global_batch_size"),
        lambda p: p.training.batch_size == "auto" and p.training.global_batch_size is not None,
        "the global batch size leaves nothing to find",
        "leave training.global_batch_size null, or training.batch_size at its default",
    ),
    Rule(
        ("training.batch_size", "strategy"),
        lambda p: p.training.batch_size == "auto" and p.strategy.name == "parameter_server",
        "its workers do not take steps together, so a trial cannot measure one",
        "set a number, or use another strategy",
    ),
    Rule(
        ("training.batch_size", "cluster"),
        lambda p: p.training.batch_size == "auto" and not find_engine(p.cluster).is_local,
        "the trials before the run use this machine only",
        "use cluster=local, or set a number",
    ),
    Rule(
        ("training.batch_size", "debug.inline"),
        lambda p: p.training.batch_size == "auto" and p.debug.inline,
        "the trials and the run each need a process of their own",
        "set a number",
    ),
    Rule(
        ("training.batch_size", "debug.fast"),
        lambda p: p.training.batch_size == "auto" and p.debug.fast,
        "one step needs no fast batch",
        "set a number",
    ),
    Rule(
        ("optimizer.schedule",),
        lambda p: p.optimizer.schedule == "step" and p.optimizer.step_every is None,
        "the schedule needs the number of updates after which the rate is multiplied by optimizer.step_factor",
        "set optimizer.step_every",
    ),
    Rule(
        ("model.init_from_preprocessing", "model.init_from"),
        lambda p: p.model.init_from is None and p.model.init_from_preprocessing != "extend",
        "there is no earlier run whose preprocessing could be taken",
        "set model.init_from, or leave model.init_from_preprocessing out",
    ),
    Rule(
        ("model.lora.layers",),
        lambda p: p.model.lora is not None and not p.model.lora.layers,
        "it names no layers",
        "name the layers: model.lora.layers=[dense*]",
    ),
    Rule(
        ("optimizer.rate_factors",),
        lambda p: 0.0 in (p.optimizer.rate_factors or {}).values(),
        "a layer whose learning rate is 0 does not train",
        "leave it out, and use model.freeze=[PATTERN]",
    ),
    Rule(
        ("dataset.validation",),
        has_invalid_fraction,
        "this is not a fraction of the training split",
        "give a fraction from 0 to less than 1, the name of a split, or null",
    ),
    Rule(
        ("dataset.shards", "dataset._target_"),
        lambda p: p.dataset.shards > 1 and is_known_not_to_be_table(p.dataset.target.path),
        "only tables that are read while training can be divided by their files",
        "use dataset=table, or leave dataset.shards 1",
    ),
    Rule(
        ("dataset.shards", "dataset.cache"),
        lambda p: p.dataset.shards > 1 and p.dataset.cache in ("memory", "file"),
        "every worker would read all rows once, to keep them",
        "use dataset.cache=none, or leave dataset.shards 1",
    ),
    Rule(
        ("training.early_stopping.monitor", "dataset.validation"),
        has_monitor_without_validation,
        "there is no validation split",
        "set dataset.validation=0.1, or monitor train/loss",
    ),
)
