"""Finds which values of a metric are better: larger ones (`max`) or smaller ones (`min`).

Only this module knows directions. The run's own directions (`Objective.modes`) come first, then the name: names of
Keras, scikit-learn and the report, optionally with the prefix of a split or an output, and with the suffix of an
interval. Any other name has no direction, and the caller must ask for it.
"""

import re
from collections.abc import Callable, Mapping
from typing import Literal

Mode = Literal["min", "max"]

#: Names whose larger values are better.
LARGER = frozenset(
    {
        *("accuracy", "acc", "exact_match", "hit_rate", "true_positive_rate", "true_negative_rate"),
        *("auc", "roc_auc", "pr_auc", "average_precision", "precision", "recall", "sensitivity", "specificity", "f1"),
        *("true_positives", "true_negatives", "iou", "io_u", "dice", "jaccard", "kappa", "mcc", "bleu", "rouge"),
        *("r2", "coverage", "log_likelihood", "explained_variance", "positive_likelihood_ratio"),
        *("pearson_correlation", "concordance_correlation", "correlation", "mfu"),
        *("auroc", "auprc", "aucpr", "tpr", "tnr", "ppv", "npv", "ndcg", "mrr", "r_squared", "qwk"),
        *("spearman", "spearmanr", "pearson", "pearsonr", "kendall_tau", "dice_coef", "dice_coefficient"),
    }
)

#: Names whose smaller values are better.
SMALLER = frozenset(
    {
        *("loss", "error", "cost", "deviance", "mae", "rmse", "mse", "mape", "msle", "rmsle", "nll"),
        *("log_loss", "brier", "brier_score", "brier_score_loss", "davies_bouldin_score", "negative_likelihood_ratio"),
        *("pinball", "set_size", "perplexity", "bits_per_token", "bits_per_byte", "error_in_standard_deviations"),
        *("hinge", "squared_hinge", "categorical_hinge", "huber", "poisson", "logcosh", "log_cosh"),
        *("kl_divergence", "kullback_leibler_divergence", "crossentropy", "wer", "cer", "not_finite"),
        *("neg_log_likelihood", "negative_log_likelihood"),
        *("logloss", "bce", "smape", "wape", "mase", "ece", "eer", "fpr", "fnr", "crps"),
        #: proper scores whose smaller values are better
        *("interval_score", "winkler_score", "energy_score", "crps_score"),
        *("false_positives", "false_negatives", "false_positive_rate", "false_negative_rate", "error_rate"),
        *("seconds_to_first_step", "seconds", "ms", "mb"),
    }
)

#: Suffixes of longer names. The first that matches counts.
ENDS: Mapping[str, Mode] = {
    **dict.fromkeys(("_loss", "_error", "_cost", "_deviance", "_crossentropy", "_perplexity", "_divergence"), "min"),
    **dict.fromkeys(("_mae", "_rmse", "_mse", "_mape", "_msle", "_error_rate", "_ms", "_mb", "_seconds"), "min"),
    **dict.fromkeys(
        ("_score", "_accuracy", "_corrcoef", "_precision", "_recall", "_auc", "_f1", "_iou", "_io_u"), "max"
    ),
    **dict.fromkeys(("_specificity", "_sensitivity", "_similarity", "_correlation", "_kappa", "_r2"), "max"),
    **dict.fromkeys(("_coverage", "_likelihood", "_per_second"), "max"),
}

#: Suffixes that do not affect the direction: the bound of an interval, the threshold, the number that Keras appends to
#: a second metric of the same class, and scikit-learn's averaging over classes.
SUFFIXES = re.compile(r"(_at_threshold|_low|_high|_\d+|_(macro|micro|weighted|samples|ovr|ovo))$")

#: Prefixes that do not belong to the metric: splits, baselines, measurements of the machine.
PREFIXES = frozenset({"train", "val", "test", "all", "validation", "baseline", "perf", "system"})

#: Prefixes of scikit-learn's scorers that negate a loss. `neg_recall` is not such a scorer: it may be the recall of the
#: negative class.
NEGATED = ("neg_", "negative_")

#: The advice for a metric without a known direction, if no key sets the direction.
NAME_ADVICE = (
    "give the metric a name that ends in _score (larger is better), or in _loss, _error or _cost (smaller is better)"
)


def find_direction(metric: str, known: Mapping[str, str] | None = None) -> Mode | None:
    """Returns whether larger (`max`) or smaller (`min`) values of a metric are better; None if unknown.

    Args:
        metric: its name, possibly with a split, outputs and classes: `test/price/mae`, `val_auc`, `test/f1/cat_low`.
        known: the run's known directions, by name without the split: `price/mae`.
    """
    names = [metric, metric.removeprefix("val_")]
    parts = metric.split("/")
    while len(parts) > 1 and parts[0] in PREFIXES:
        parts = parts[1:]
        names.append("/".join(parts))
    if metric.startswith("baseline/"):
        names.append(parts[-1])  # the rest may begin with the name of a fitted model, as in `baseline/boosting/auc`
    for name in names:
        for candidate in (name, *strip_suffixes(name)):
            if known and known.get(candidate) in ("min", "max"):
                return "max" if known[candidate] == "max" else "min"
    for look_up in (look_up_name, look_up_end):  # an output may be called `math_score` while its metric is `mae`
        directions = {find_by_name(part, look_up) for part in parts} - {None}
        if directions:
            return directions.pop() if len(directions) == 1 else None  # a class or an output may also be called `loss`
    return None


def find_directions(*metrics: str) -> dict[str, Mode]:
    """Returns the directions of metrics by name. Raises ValueError if one is unknown."""
    return {metric: "min" if is_smaller_better(metric) else "max" for metric in metrics}


def is_smaller_better(metric: str) -> bool:
    """Returns whether smaller values are better. Raises ValueError if the direction is unknown."""
    direction = find_direction(metric)
    if direction is None:
        raise ValueError(f"it is not known whether larger or smaller values of {metric} are better")
    return direction == "min"


def find_by_name(name: str, look_up: Callable[[str], Mode | None]) -> Mode | None:
    """Returns the direction of a name that has no split, output or class; None if unknown."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    plain = re.sub(r"[\s\-.]+", "_", plain).removeprefix("val_")
    for candidate in (plain, *strip_suffixes(plain)):
        direction = look_up(candidate)
        if direction is not None:
            return direction
    return None


def look_up_name(name: str) -> Mode | None:
    """Returns the direction of a whole name that is known; otherwise None."""
    if name in SMALLER:  # some of these begin or end like names with the other direction
        return "min"
    if name in LARGER:
        return "max"
    for prefix in NEGATED:
        if name.startswith(prefix):
            loss = name.removeprefix(prefix)
            return "max" if (look_up_name(loss) or look_up_end(loss)) == "min" else None
    return None


def look_up_end(name: str) -> Mode | None:
    """Returns the direction according to the end of a name; None if unknown."""
    if name.startswith(NEGATED):
        return None
    if name.endswith("_score") and not name.startswith("d2_"):
        stem = name.removesuffix("_score")
        if "min" in (
            look_up_name(stem),
            look_up_end(stem),
        ):  # `rmse_score` may be an error or a negated error
            return None
    for end, direction in ENDS.items():
        if name.endswith(end):
            return direction
    return None


def strip_suffixes(name: str) -> list[str]:
    """Returns a name without its last suffix, without its last two, and so on."""
    shorter_names = []
    shorter = SUFFIXES.sub("", name)
    while shorter != name:
        shorter_names.append(shorter)
        name = shorter
        shorter = SUFFIXES.sub("", name)
    return shorter_names
