"""Computes quantiles of weighted values, which NumPy has only since 2.0, and the loss of predicted quantiles."""

from collections.abc import Sequence
from typing import Any


def weighted_quantiles(values: Any, quantiles: Sequence[float], weights: Any) -> Any:
    """Returns, for each quantile, the smallest value that at least this share of the weights does not exceed.

    Args:
        values: a NumPy array of numbers [n], at least one.
        quantiles: shares [q] above 0, at most 1.
        weights: an array with the weight of each value [n], at least 0, with a positive sum.

    Returns:
        An array [q] of values, as `numpy.quantile` returns with `method="inverted_cdf"`.
    """
    order = values.argsort(kind="stable")
    shares = weights[order].cumsum()
    return values[order][(shares / shares[-1]).searchsorted(quantiles)]


def average_pinball_losses(targets: Any, quantiles: Any, levels: Any) -> Any:
    """Returns the pinball loss of each target, averaged over the levels, [...], from NumPy arrays.

    Args:
        targets: [...].
        quantiles: [..., levels], or an array that broadcasts to that.
        levels: an array of shares.
    """
    errors = targets[..., None] - quantiles
    return (errors * levels).clip(min=errors * (levels - 1)).mean(axis=-1)
