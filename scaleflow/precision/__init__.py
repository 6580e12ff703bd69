"""Sets the dtype that layers compute in."""

from scaleflow.precision.policy import apply_policy, resolve_policy
