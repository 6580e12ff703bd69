"""The rules about the optimizer and time limits."""

from collections.abc import Sequence

from scaleflow.interfaces import Plan, Rule, parse_duration


def has_weight_decay(plan: Plan) -> bool:
    """Whether the optimizer has a weight decay. If its arguments do not name one, it may have a default."""
    arguments = plan.optimizer.target.arguments
    values = [arguments[name] for name in ("weight_decay", "adam_weight_decay") if name in arguments]
    return not values or any(values)


def is_lowered_by_validation(plan: Plan) -> bool:
    """Whether a metric of the validation split lowers the learning rate."""
    watched = plan.optimizer.watched
    return watched is not None and watched.monitor.startswith("val/")


#: The reason and the advice for a text that is not a time.
NO_TIME = "this is no time", "write 600 for seconds, or 10m, 2h, 1d"

OPTIMIZER_RULES: Sequence[Rule] = (
    Rule(
        "optimizer.schedule in step|cosine_restarts & optimizer.step_every=null",
        "the schedule needs the number of updates between two changes: a multiplication by optimizer.step_factor, or "
        "a restart",
        "set optimizer.step_every",
        keys=("optimizer.schedule",),
    ),
    Rule(
        "optimizer.schedule=exponential & optimizer.final_rate=0",
        "the rate falls by the same factor in each update, and never becomes 0",
        "set optimizer.final_rate=0.01",
    ),
    Rule(
        "optimizer.plateau!=null & optimizer.schedule!=plateau",
        "no value lowers the rate of this schedule",
        "set optimizer.schedule=plateau, or leave optimizer.plateau out",
    ),
    Rule(
        "optimizer.schedule=plateau & !dataset.validation & !dataset.fold",
        "there is no validation split",
        "set dataset.validation=0.1, or optimizer.plateau.metric=train/loss",
        keys=("optimizer.schedule", "dataset.validation"),
        only_if=is_lowered_by_validation,
    ),
    Rule(
        "optimizer.schedule=plateau & training.engine=fit",
        "the schedule acts between the calls of scaleflow's own loop",
        "use training.engine=loop, or the callback keras.callbacks.ReduceLROnPlateau",
    ),
    Rule(
        "optimizer.schedule=plateau & optimizer.step_factor=1",
        "the rate would never fall",
        "set optimizer.step_factor=0.1",
    ),
    Rule(
        "optimizer.warmup_steps>=1",
        "a number of updates is whole, and a fraction of the run is below 1",
        "write 100, or 0.05 for the first 5 percent of the updates",
        only_if=lambda p: isinstance(p.optimizer.warmup_steps, float),
    ),
    Rule("training.max_seconds!=null", *NO_TIME, only_if=lambda p: parse_duration(p.training.max_seconds) == 0),
    Rule("sweep.max_seconds!=null", *NO_TIME, only_if=lambda p: parse_duration(p.sweep.max_seconds) == 0),
    Rule(
        "optimizer.no_decay",
        "the optimizer has no weight decay, so no variable can be left out of it",
        "set optimizer.weight_decay=0.01, or use optimizer=adamw",
        only_if=lambda p: not has_weight_decay(p),
    ),
    Rule(
        "optimizer._target_",
        "ScheduleFreeAdamW needs averaged weights for an evaluation, and Keras leaves the averaging to the user",
        "use optimizer=adamw optimizer.ema=0.99",
        only_if=lambda p: p.optimizer.target.path.endswith(".ScheduleFreeAdamW"),
    ),
    Rule(
        "optimizer.rate_factors",
        "a layer whose learning rate is 0 does not train",
        "leave the factor 0 out, and use model.freeze=[PATTERN]",
        only_if=lambda p: 0.0 in (p.optimizer.rate_factors or {}).values(),
    ),
)
