"""The rules about the optimizer, what is searched before a run, and limits of time."""

from collections.abc import Mapping, Sequence
from typing import Any

from scaleflow.cluster.engines import find_engine
from scaleflow.interfaces import Plan, Rule, parse_duration


def validates(plan: Plan) -> bool:
    return bool(plan.dataset.validation or plan.dataset.fold)


def find_weight_decay(arguments: Mapping[str, Any]) -> Any:
    """Returns a weight decay of an optimizer; what does not name one may have a default."""
    values = [arguments[name] for name in ("weight_decay", "adam_weight_decay") if name in arguments]
    return next(filter(None, values), None) if values else True


#: The reason and the advice for a text that is no time.
NO_TIME = "this is no time", "write 600 for seconds, or 10m, 2h, 1d"

OPTIMIZER_RULES: Sequence[Rule] = (
    Rule(
        ("training.batch_size", "training.global_batch_size"),
        lambda p: p.training.batch_size == "auto" and p.training.global_batch_size is not None,
        "the global batch size leaves nothing to find",
        instead="leave training.global_batch_size null, or training.batch_size at its default",
    ),
    Rule(
        ("training.batch_size", "strategy"),
        lambda p: p.training.batch_size == "auto" and p.strategy.name == "parameter_server",
        "its workers do not take steps together, so a trial cannot measure one",
        instead="set a number, or use another strategy",
    ),
    Rule(
        ("training.batch_size", "cluster"),
        lambda p: p.training.batch_size == "auto" and not find_engine(p.cluster).is_local,
        "the trials before the run use this machine only",
        instead="use cluster=local, or set a number",
    ),
    Rule(
        ("training.batch_size", "debug.inline"),
        lambda p: p.training.batch_size == "auto" and p.debug.inline,
        "the trials and the run each need a process of their own",
        instead="set a number",
    ),
    Rule(
        ("optimizer.learning_rate", "debug.inline"),
        lambda p: p.optimizer.learning_rate == "auto" and p.debug.inline,
        "the trials and the run each need a process of their own",
        instead="set a number",
    ),
    Rule(
        ("training.batch_size", "debug.fast"),
        lambda p: p.training.batch_size == "auto" and p.debug.fast,
        "one step needs no fast batch",
        instead="set a number",
    ),
    Rule(
        ("optimizer.schedule",),
        lambda p: p.optimizer.schedule in ("step", "cosine_restarts") and p.optimizer.step_every is None,
        "the schedule needs the number of updates between two changes: a multiplication by optimizer.step_factor, or "
        "a restart",
        instead="set optimizer.step_every",
    ),
    Rule(
        ("optimizer.schedule", "optimizer.final_rate"),
        lambda p: p.optimizer.schedule == "exponential" and p.optimizer.final_rate == 0,
        "the rate falls by the same factor in each update, and never becomes 0",
        instead="set optimizer.final_rate=0.01",
    ),
    Rule(
        ("optimizer.plateau", "optimizer.schedule"),
        lambda p: p.optimizer.plateau is not None and p.optimizer.watched is None,
        "no value lowers the rate of this schedule",
        instead="set optimizer.schedule=plateau, or leave optimizer.plateau out",
    ),
    Rule(
        ("optimizer.schedule", "dataset.validation"),
        lambda p: (
            p.optimizer.watched is not None and p.optimizer.watched.monitor.startswith("val/") and not validates(p)
        ),
        "there is no validation split",
        instead="set dataset.validation=0.1, or optimizer.plateau.metric=train/loss",
    ),
    Rule(
        ("optimizer.schedule", "training.engine"),
        lambda p: p.optimizer.watched is not None and p.training.engine == "fit",
        "the schedule acts between the calls of scaleflow's own loop",
        instead="use training.engine=loop, or the callback keras.callbacks.ReduceLROnPlateau",
    ),
    Rule(
        ("optimizer.schedule", "optimizer.step_factor"),
        lambda p: p.optimizer.watched is not None and p.optimizer.step_factor == 1,
        "the rate would never fall",
        instead="set optimizer.step_factor=0.1",
    ),
    Rule(
        ("optimizer.warmup_steps",),
        lambda p: isinstance(p.optimizer.warmup_steps, float) and p.optimizer.warmup_steps >= 1,
        "a number of updates is whole, and a fraction of the run is below 1",
        instead="write 100, or 0.05 for the first 5 percent of the updates",
    ),
    Rule(("training.max_seconds",), lambda p: parse_duration(p.training.max_seconds) == 0, *NO_TIME),
    Rule(("sweep.max_seconds",), lambda p: parse_duration(p.sweep.max_seconds) == 0, *NO_TIME),
    Rule(
        ("optimizer.no_decay",),
        lambda p: bool(p.optimizer.no_decay) and not find_weight_decay(p.optimizer.target.arguments),
        "there is no weight decay to leave them out of",
        instead="set optimizer.weight_decay=0.01, or use optimizer=adamw",
    ),
    Rule(
        ("optimizer._target_",),
        lambda p: p.optimizer.target.path.endswith(".ScheduleFreeAdamW"),
        "its model has to be averaged before it is evaluated, which Keras leaves to the user",
        instead="use optimizer=adamw optimizer.ema=0.99",
    ),
    Rule(
        ("optimizer.rate_factors",),
        lambda p: 0.0 in (p.optimizer.rate_factors or {}).values(),
        "a layer whose learning rate is 0 does not train",
        instead="leave it out, and use model.freeze=[PATTERN]",
    ),
)
