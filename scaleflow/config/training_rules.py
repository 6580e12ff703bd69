"""The rules about training, the objective, validation and the model."""

import itertools
from collections.abc import Sequence

from scaleflow.interfaces import Best, Plan, Rule


def has_unfit_levels(plan: Plan) -> bool:
    """Whether `objective.levels` are not ascending quantiles around the median."""
    levels = plan.objective.levels or []
    is_ascending = all(low < high for low, high in itertools.pairwise([0.0, *levels, 1.0]))
    return len(levels) < 2 or 0.5 not in levels or not is_ascending


def has_other_best(plan: Plan) -> bool:
    """Whether early stopping and `checkpoint.best` choose the best model by different values."""
    stopping = plan.training.early_stopping
    best = plan.checkpoint.best
    if stopping is None or best is None:
        return False
    stopping_monitor = stopping.monitor.replace("auto", Best.monitor)
    best_monitor = best.monitor.replace("auto", Best.monitor)
    return stopping_monitor != best_monitor or plan.checkpoint.export != "best"


TRAINING_RULES: Sequence[Rule] = (
    Rule(
        "training.engine=fit & strategy not in auto|one_device|mirrored",
        "Keras 3's fit works only with strategy=one_device and mirrored",
        "use training.engine=loop",
    ),
    Rule(
        "training.engine=fit & training.step._target_!=null",
        "Keras's fit runs its own training step",
        "use training.engine=loop",
    ),
    Rule(
        "training.engine=fit & training.accumulate>1",
        "Keras's gradient accumulation fails under a strategy",
        "use training.engine=loop",
    ),
    Rule(
        "training.engine=fit & training.clip_norm!=null",
        "Keras clips the gradient of each replica before they are summed",
        "use training.engine=loop",
    ),
    Rule(
        "training.engine=fit & hardware.xla=true",
        "XLA is supported only in scaleflow's own loop",
        "use training.engine=loop, or hardware.xla=false",
    ),
    Rule(
        "training.engine=fit & precision=mixed_float16 & strategy=mirrored",
        "Keras checks only the first replica's gradients for overflow",
        "use training.engine=loop",
    ),
    Rule(
        "training.steps_per_loop>1 & training.engine=fit & strategy=mirrored",
        "Keras's steps_per_execution fails under this strategy",
        "use auto, or training.engine=loop",
    ),
    Rule(
        "training.on_nan=rollback & training.engine=fit",
        "Keras's fit cannot go back to an earlier step",
        "use training.engine=loop",
    ),
    Rule(
        "training.on_nan=rollback & checkpoint=none",
        "no checkpoints are saved to go back to",
        "use checkpoint=default",
    ),
    Rule(
        "debug.nan & training.on_nan=rollback",
        "debug.nan ends the run at the first NaN, and a rollback continues it",
        "use only one of the two",
    ),
    Rule(
        "objective.levels!=null",
        "these are two or more, above 0 and below 1, ascending, none twice, and one is 0.5, the prediction",
        "give such as [0.1, 0.5, 0.9], or for the median alone objective.loss=mae",
        only_if=has_unfit_levels,
    ),
    Rule(
        "objective.levels!=null & objective.loss!=null",
        "quantiles have a loss of their own, the pinball loss",
        "leave one of the two null",
    ),
    Rule(
        "objective.levels!=null & evaluation.interval!=null",
        "quantiles are the ends of intervals already",
        "leave one of the two null",
    ),
    Rule(
        "objective.levels!=null & training.step._target_!=null",
        "a custom step computes the training loss itself",
        "leave one of the two null",
    ),
    Rule(
        "objective.class_weight!=null & training.step._target_!=null",
        "a custom step computes the training loss itself",
        "apply the class weights in the step, and leave objective.class_weight null",
    ),
    Rule(
        "training.step._target_!=null & strategy=pipeline",
        "a custom step calls the whole model, and a pipeline divides it into stages",
        "use another strategy",
    ),
    Rule(
        "strategy.communication=nccl & hardware=cpu",
        "NCCL works only between GPUs",
        "use ring, or auto",
    ),
    Rule(
        "precision=mixed_float16 & hardware=cpu",
        "results are correct, but float16 is slow on a CPU",
        "precision=mixed selects bfloat16",
        "warning",
    ),
    Rule(
        "training.validate_every!=null",
        "this is no number of updates or of epochs",
        "write 500 for updates, or '2 epochs'",
        only_if=lambda p: isinstance(p.training.validate_every, str) and not p.training.validate_epochs,
    ),
    Rule(
        "training.validate_every>0 & training.engine=fit",
        "Keras's fit validates at the end of an epoch",
        "write '2 epochs', or use training.engine=loop",
    ),
    Rule(
        "!dataset.validation & !dataset.fold",
        "there is no validation split",
        "set dataset.validation=0.1, or leave them out",
        keys=("training.validate_every", "training.validate_examples", "dataset.validation"),
        only_if=lambda p: bool(p.training.validate_every or p.training.validate_examples),
    ),
    Rule(
        "training.early_stopping.restore_best & checkpoint=none",
        "no checkpoint keeps the best model",
        "use checkpoint=default",
    ),
    Rule(
        "training.early_stopping.restore_best",
        "two values would decide which model is exported",
        "leave checkpoint.best out, or give it the monitor of training.early_stopping and checkpoint.export=best",
        keys=("training.early_stopping.restore_best", "checkpoint.best.monitor", "checkpoint.export"),
        only_if=has_other_best,
    ),
    Rule(
        "model.init_from_preprocessing!=extend & model.init_from=null",
        "there is no earlier run whose preprocessing could be taken",
        "set model.init_from, or leave model.init_from_preprocessing out",
    ),
    Rule(
        "model.freeze!=null",
        "the first epoch is 0",
        "begin with it: {0: [PATTERN], 3: []}; an empty list freezes nothing",
        only_if=lambda p: isinstance(p.model.freeze, dict) and min(p.model.freeze, default=None) != 0,
    ),
    Rule(
        "model.freeze!=null & strategy in parameter_server|pipeline",
        "what trains is fixed there when the run begins",
        "use strategy=one_device, mirrored or multi_worker, or two runs, the second with model.init_from",
        only_if=lambda p: p.model.freezes_by_epoch,
    ),
    Rule(
        "model.lora!=null & !model.lora.layers",
        "it names no layers",
        "name the layers: model.lora.layers=[dense*]",
        keys=("model.lora.layers",),
    ),
)
