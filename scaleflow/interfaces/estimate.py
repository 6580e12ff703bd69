"""A measured value with its interval, and its text form."""

import math
from typing import NamedTuple

from scaleflow.interfaces.formatting import format_number


class Estimate(NamedTuple):
    """A value and the bounds of its 95 % interval; NaN without an interval."""

    value: float
    low: float = math.nan
    high: float = math.nan


def describe_estimate(estimate: Estimate) -> str:
    """Formats a value with its interval: `0.9805 (0.967 to 0.99)`."""
    if math.isnan(estimate.low):
        return format_number(estimate.value)
    return f"{format_number(estimate.value)} ({estimate.low:.3g} to {estimate.high:.3g})"
