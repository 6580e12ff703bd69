"""The rules about debugging."""

from collections.abc import Sequence

from scaleflow.cluster.tasks import process_names
from scaleflow.config.dataset_rules import TABLE
from scaleflow.interfaces import Rule

DEBUG_RULES: Sequence[Rule] = (
    Rule(
        "debug.inline",
        "each worker needs its own process",
        "use strategy=one_device or mirrored, or cluster.workers=1",
        keys=("debug.inline", "strategy"),
        only_if=lambda p: len(process_names(p)) > 1,
    ),
    Rule(
        "debug.eager & hardware.xla=true",
        "XLA compiles, and debug.eager turns compilation off",
        "set one of the two to false",
    ),
    Rule(
        "debug.eager & strategy in mirrored|multi_worker",
        "without compilation, replicas start their collective operations in different orders, and TensorFlow "
        "aborts (measured)",
        "use strategy=one_device or pipeline",
    ),
    Rule(
        "debug.eager & strategy in parameter_server|tpu",
        "only compiled functions run on other machines or on a TPU",
        "use strategy=one_device",
    ),
    Rule(
        "debug.nan & hardware.xla=true",
        "XLA cannot compile the check of each operation",
        "set one of the two to false",
    ),
    Rule(
        "debug.nan & hardware.deterministic",
        "TensorFlow's deterministic cross-entropy contains a NaN constant, which the check would report at step 1",
        "set one of the two to false",
    ),
    Rule(
        f"debug.nan & dataset._target_={TABLE}",
        "the preprocessing of a table marks missing values with NaN, which the check would report before step 1",
        "remove debug=nan; a run always reports the first step whose loss is not finite",
    ),
    Rule(
        "debug.nan & strategy=tpu",
        "a TPU cannot run the check of each operation",
        "use strategy=one_device or mirrored",
    ),
    Rule(
        "debug.nan & precision=mixed_float16",
        "dynamic loss scaling makes some gradients Inf on purpose, which is not an error",
        "use precision=float32 or mixed_bfloat16",
    ),
)
