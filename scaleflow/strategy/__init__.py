"""Creates the `tf.distribute` strategy of a process from its name, and divides models into pipeline stages."""

from scaleflow.strategy.make import create_strategy, resolve_strategy
from scaleflow.strategy.pipeline import build_pipeline, variable_scope
from scaleflow.strategy.servers import serve

__all__ = ["build_pipeline", "create_strategy", "resolve_strategy", "serve", "variable_scope"]
