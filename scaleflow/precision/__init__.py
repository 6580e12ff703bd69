"""The dtype that layers compute in."""

from scaleflow.precision.policy import apply, resolve

__all__ = ["apply", "resolve"]
