"""The rules about pipeline parallelism, and about strategies that XLA cannot compile."""

from collections.abc import Sequence

from scaleflow.config.device_rules import runs_elsewhere
from scaleflow.interfaces import Plan, Rule, Strategy

#: Keys of `strategy` that only `strategy=pipeline` has.
PIPELINE_KEYS = ("stages", "replicas", "micro_batches", "cuts")


def has_pipeline_keys(plan: Plan) -> bool:
    return any(getattr(plan.strategy, key) != getattr(Strategy, key) for key in PIPELINE_KEYS)


PIPELINE_RULES: Sequence[Rule] = (
    Rule(
        "strategy=pipeline",
        "all stages and replicas of a pipeline are on the devices of one process",
        "use cluster=local",
        keys=("cluster", "strategy"),
        only_if=runs_elsewhere,
    ),
    Rule(
        "strategy=pipeline & hardware=cpu",
        "a pipeline needs exactly one device for each stage of each replica",
        "set hardware.logical_devices to strategy.stages x strategy.replicas",
        keys=("strategy.stages", "strategy.replicas", "hardware.logical_devices"),
        only_if=lambda p: p.hardware.logical_devices != p.strategy.stages * p.strategy.replicas,
    ),
    Rule(
        "strategy.cuts!=null & strategy=pipeline",
        "the list must name the first layer of every stage except the first stage",
        "give one name fewer than there are stages, or null",
        keys=("strategy.cuts", "strategy.stages"),
        only_if=lambda p: len(p.strategy.cuts or ()) != p.strategy.stages - 1,
    ),
    Rule(
        "strategy!=pipeline",
        "this strategy does not divide the model",
        "use strategy=pipeline, or leave them at their defaults",
        keys=("strategy.stages", "strategy.replicas", "strategy.micro_batches", "strategy.cuts", "strategy"),
        only_if=has_pipeline_keys,
    ),
    Rule(
        "hardware.xla=true & strategy=pipeline",
        "XLA compiles a program for one device, and a pipeline uses several",
        "use hardware.xla=false, or another strategy",
    ),
    Rule(
        "hardware.xla=true & strategy=parameter_server",
        "an XLA program cannot read variables on another machine",
        "use hardware.xla=false, or another strategy",
    ),
)
